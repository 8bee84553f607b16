"""Matmuls of activations with packed weights, which are stored as floats, int8 or 4-bit values."""
