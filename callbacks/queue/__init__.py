"""Queues between a host and its manager, and the handles on what they hold."""
