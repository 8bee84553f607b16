"""Calls of tools: definitions, and for each format of calls a parser and a grammar."""
