"""Rows of weights, and of quantized checkpoints, written to panels."""
