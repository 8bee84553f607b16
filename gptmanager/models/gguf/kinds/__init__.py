"""Kinds of architectures of GGUF files, for the table in `architectures`."""
