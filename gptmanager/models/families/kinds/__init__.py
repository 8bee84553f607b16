"""The families of models, by what sets them apart from Llama."""
