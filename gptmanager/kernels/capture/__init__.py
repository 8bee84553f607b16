"""Generation steps captured as lists of tasks."""
