"""Peers of the benchmark: other libraries that run the same load."""
