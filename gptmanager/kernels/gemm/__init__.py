"""Matmuls of activations with packed weights, which are floats, int8 or 4 bits."""
