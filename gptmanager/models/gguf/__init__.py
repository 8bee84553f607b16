"""Reads GGUF files, the format of llama.cpp, as the parts of a Hugging Face checkpoint."""
