"""Activations of MLPs, and other ops on single elements."""
