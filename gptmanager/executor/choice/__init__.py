"""Chooses the tokens of a step from its logits, and computes their log probabilities."""
