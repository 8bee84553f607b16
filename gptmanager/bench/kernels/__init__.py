"""The kernel benchmark: cases by part, run beside their peers, right before fast."""
