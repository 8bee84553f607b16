"""Parses answers of chat models into thoughts, content and tool calls, by the format of a model."""
