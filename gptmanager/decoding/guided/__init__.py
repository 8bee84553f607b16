"""JSON schemas and grammars as masks of tokens."""
