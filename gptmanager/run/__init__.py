"""`gptmanager run`, `convert` and `models`: commands that use a manager without a server."""
