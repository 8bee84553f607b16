"""Matmuls of bytes in the matrix unit."""
