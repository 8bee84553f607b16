"""The journal: what was accepted and what was sent, on disk, so that a new process can go on."""
