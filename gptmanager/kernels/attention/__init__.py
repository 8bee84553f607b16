"""Attention that reads the pages of the KV cache directly."""
