"""Matmuls in the matrix unit, with products of bytes."""
