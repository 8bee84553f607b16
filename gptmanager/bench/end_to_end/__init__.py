"""The end-to-end benchmark: a whole model behind a manager."""
