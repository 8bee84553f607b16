"""Queues of requests between a host and its manager, and the handles of these requests."""
