"""Kernels that compute tokens and log probabilities from logits."""
