"""The engine, which runs the requests of every protocol, with its adapters and metrics."""
