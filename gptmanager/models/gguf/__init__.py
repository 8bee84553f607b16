"""GGUF: the files of llama.cpp, as the parts of a checkpoint that a Hugging Face folder has."""
