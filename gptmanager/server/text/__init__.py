"""Reads the fields for generation, and makes answers of texts, for the front of each protocol."""
