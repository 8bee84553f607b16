"""A thread, and a life around the loop."""
