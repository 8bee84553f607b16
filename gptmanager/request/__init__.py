"""Requests before they run: checked tensors and options."""
