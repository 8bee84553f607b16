"""The commands `gptmanager run`, `chat`, `convert` and `models`, which need no server."""
