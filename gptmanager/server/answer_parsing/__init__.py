"""Finds thoughts, content and calls of tools in the text of a model, piece by piece."""
