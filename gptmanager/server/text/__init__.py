"""Answers as text, shared by the protocols."""
