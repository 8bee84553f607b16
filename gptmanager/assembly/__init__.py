"""Builds all parts of a running loop from a host's options and a checkpoint."""
