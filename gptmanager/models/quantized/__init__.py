"""Quantized checkpoints in safetensors: their matrices as floats, or as 4 bits in groups."""
