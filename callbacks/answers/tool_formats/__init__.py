"""Formats of tool calls. Each format has a parser and a grammar."""
