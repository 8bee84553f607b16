"""Chooses a token from a row of logits, with random numbers seeded by position."""
