"""`gptmanager convert` and `gptmanager models`: the checkpoints of this machine."""
