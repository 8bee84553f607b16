"""Devices, the compiler, streams and CUDA graphs, which all launches use."""
