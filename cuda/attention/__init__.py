"""Attention over the pages of the KV cache, and the kernels that write these pages."""
