"""Conversion between the tokens of a model and text."""
