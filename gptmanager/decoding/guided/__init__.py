"""JSON schemas and grammars, enforced by token masks."""
