"""Runs models through transformers, for architectures that use its attention interface."""
