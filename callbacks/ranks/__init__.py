"""Rank 0's callbacks, answered on every rank."""
