"""The journal: accepted requests and sent tokens, on disk, so that a new process can continue."""
