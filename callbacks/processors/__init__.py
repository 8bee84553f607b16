"""Ready-made logits post-processors."""
