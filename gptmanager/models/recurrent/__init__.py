"""Kinds of recurrent layers, which keep a state for each sequence in place of keys and values."""
