"""`CpuKernels`: stand-in until the Numba kernels land (KERNELS is at it); same interface."""

from __future__ import annotations

from gptmanager.kernels.reference import Kernels


class CpuKernels(Kernels):
    """The reference, for now."""
