"""Every op of the network: the reference in torch, and compiled versions for the CPU."""

from __future__ import annotations

from gptmanager.kernels.attention.attention_arguments import AttentionShape, Pages
from gptmanager.kernels.cpu import CpuKernels
from gptmanager.kernels.gemm.packed_matrix import PackedMatrix, plain
from gptmanager.kernels.providers import AttentionProvider, AttentionRows, LinearProvider
from gptmanager.kernels.reference import Kernels

__all__ = [
    "AttentionProvider",
    "AttentionRows",
    "AttentionShape",
    "CpuKernels",
    "Kernels",
    "LinearProvider",
    "PackedMatrix",
    "Pages",
    "plain",
]
