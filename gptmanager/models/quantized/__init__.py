"""Quantized safetensors checkpoints, read as floats or as integers with their scales."""
