"""Models of any architecture in transformers that uses its attention interface."""
