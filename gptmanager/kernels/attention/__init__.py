"""Attention straight on the pages of the KV cache."""
