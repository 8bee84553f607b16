"""Reads quantized safetensors checkpoints: matrices as floats, or as groups of 4-bit values."""
