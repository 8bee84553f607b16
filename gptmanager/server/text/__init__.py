"""Reads the generation fields of requests, and builds answers from generated text."""
