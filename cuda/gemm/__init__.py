"""Matmuls: GEMV for few rows, GEMM for up to 256 rows, and LoRA."""
