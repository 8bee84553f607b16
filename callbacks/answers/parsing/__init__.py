"""Parses a model's text, as it arrives, into thoughts, content and tool calls."""
