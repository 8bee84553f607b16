"""The kernel benchmark: checks and times our kernels, next to kernels of other libraries."""
