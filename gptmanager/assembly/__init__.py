"""Builds all parts of a running loop from options and a checkpoint."""
