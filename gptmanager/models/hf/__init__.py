"""Models of any architecture that transformers computes with its attention interface."""
