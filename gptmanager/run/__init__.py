"""A file of requests, run by a manager."""
