"""Reads GGUF files, the format of llama.cpp, as if they were Hugging Face checkpoints."""
