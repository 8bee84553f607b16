"""Matmuls of few rows, of some more, and of LoRA."""
