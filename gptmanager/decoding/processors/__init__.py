"""Logits post-processors: which rows they get, and how they are called."""
