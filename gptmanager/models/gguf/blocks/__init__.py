"""Blocks of quantized elements, as GGUF files store them."""
