"""The engine that runs the requests of every protocol, with its adapters and metrics."""
