"""The commands that need no server."""
