"""The thread that runs a token loop, its life cycle and the questions about it."""
