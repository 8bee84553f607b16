"""Callbacks of rank 0, with their answers on all ranks."""
