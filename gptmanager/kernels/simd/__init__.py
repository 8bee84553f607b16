"""Code for Numba and LLVM that no operation owns: lanes, dtypes, threads, kept machine code."""
