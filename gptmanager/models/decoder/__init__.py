"""The network of a `ModelSpec`, on weights and kernels."""
