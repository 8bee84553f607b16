"""A request before it runs: its tensors, checked, and its options."""
