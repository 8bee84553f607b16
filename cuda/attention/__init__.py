"""Attention over the pages of the KV cache, and what writes them."""
