"""The engine that every protocol runs requests on, with its adapters and metrics."""
