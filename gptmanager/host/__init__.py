"""Calls the four callbacks of a host, and handles their errors."""
