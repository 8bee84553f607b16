"""The kernel benchmark: cases by part, checked for correct results and timed next to peers."""
