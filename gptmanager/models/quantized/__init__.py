"""Reads quantized safetensors checkpoints: matrices as floats, 4-bit groups, or `Codes`."""
