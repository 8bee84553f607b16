"""Shared code for Numba and LLVM: lanes, dtypes, threads, cached machine code."""
