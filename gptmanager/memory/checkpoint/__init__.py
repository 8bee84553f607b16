"""The tensors of checkpoint files, read within limits and written."""
