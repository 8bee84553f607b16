"""Chooses tokens from logits, and decides from the tokens where an output ends."""
