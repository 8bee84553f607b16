"""`mlx_matrix`: describes a matrix that MLX has quantized, and checks its tensors.

A module has its packed numbers in `weight`, and their scales in `scales`. In the mode "affine", it
also has `biases`, which are added to the scaled numbers. The experts of a layer may be one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gptmanager.errors import ConfigError
from gptmanager.kernels.gemm.packed_matrix import Quantized
from gptmanager.kernels.gemm.panels.code_loops import E2M1
from gptmanager.kernels.gemm.panels.codes import Codes, powers_of_two
from gptmanager.kernels.gemm.panels.words import PackedGroups, unpack_stream
from gptmanager.memory.checkpoint.safetensors_reader import FLOATS
from gptmanager.memory.checkpoint.tensor_sources import TensorInfo, tensor_name
from gptmanager.models.quantized.float4 import float4_groups, kept_groups
from gptmanager.models.quantized.matrices import (
    IN_WORDS,
    Read,
    StoredMatrix,
    check_scales,
)
from gptmanager.models.quantized.mlx_options import BITS, MLX_FIELD, Packing, Packings, mlx_error

_WORDS = ("uint32", "int32")  # dtypes of packed numbers
_NVFP4_LARGEST = 448 * 6  # the largest e4m3 number times the largest e2m1 number
_MOST_ERROR = 2.0**-7  # share of a step by which float16 scales may move an element


@dataclass(frozen=True)
class MlxMatrix(StoredMatrix):
    """A matrix `[rows, columns]`, or those of all experts, `[experts, rows, columns]`.

    `module`: the name of the matrix's tensors up to their ending. Rows are numbered consecutively
    across the experts; rows that are read belong to one expert.
    """

    module: str
    shape: tuple[int, ...]
    packing: Packing
    groups_of: Quantized | None = None

    def codes(self, read: Read, rows: range) -> Codes:
        bits, block, mode, _ = self.packing
        words, scales = self._part(read, "weight", rows).view(torch.int32), self._scales(read, rows)
        shared: dict[str, Any] = {"scales": scales, "block": block, "columns": self.shape[-1]}
        if mode == "mxfp8":
            return Codes(codes=_bytes(words).view(torch.float8_e4m3fn), **shared)
        if mode != "affine":
            return Codes(codes=_bytes(words), kind=E2M1, **shared)
        minima = self._numbers(read, "biases", rows)
        if bits in IN_WORDS:
            return Codes(codes=words, bits=bits, minima=minima, **shared)
        return Codes(codes=unpack_stream(words, bits), minima=minima, **shared)

    def groups(self, read: Read, rows: range) -> PackedGroups:
        """Return `rows` as groups of 4-bit values. `groups_of` must not be None."""
        words = self._part(read, "weight", rows).view(torch.int32)
        if self.packing.mode != "affine":
            return float4_groups(_bytes(words), self._scales(read, rows))
        scales, minima = (
            self._numbers(read, it, rows).half().contiguous() for it in ("scales", "biases")
        )
        return PackedGroups(words, self.shape[-1], scales, self.packing.group_size, minima)

    def _scales(self, read: Read, rows: range) -> Tensor:
        if self.packing.mode == "affine":
            return self._numbers(read, "scales", rows)
        stored = self._part(read, "scales", rows)
        if self.packing.mode == "nvfp4":
            scales = stored.view(torch.float8_e4m3fn).float()
            if self.packing.global_scale:
                scales = scales * (self._largest(read, rows) / _NVFP4_LARGEST)
        else:
            scales = powers_of_two(stored)
        check_scales(f"{self.module}.scales", scales)
        return scales

    def _largest(self, read: Read, rows: range) -> Tensor:
        """Return the largest magnitude that the matrix with these rows can have."""
        found = read(f"{self.module}.global_scale").float().flatten()
        check_scales(f"{self.module}.global_scale", found)
        return found[rows.start // self.shape[1] if len(self.shape) == 3 else 0]

    def _numbers(self, read: Read, ending: str, rows: range) -> Tensor:
        found = self._part(read, ending, rows).float()
        check_scales(f"{self.module}.{ending}", found)
        return found

    def _part(self, read: Read, ending: str, rows: range) -> Tensor:
        """Return `rows` of the tensor with this ending."""
        name, bits = f"{self.module}.{ending}", self.packing.bits
        columns = self.shape[-1]
        columns = columns * bits // 32 if ending == "weight" else columns // self.packing.group_size
        if len(self.shape) == 2:
            return read(name, rows, range(columns))
        expert, first = divmod(rows.start, self.shape[1])
        own = range(first, first + len(rows))
        return read(name, range(expert, expert + 1), own, range(columns))[0]


def mlx_matrix(
    name: str,
    packings: Packings,
    given: Mapping[str, TensorInfo],
    take: Callable[..., TensorInfo],
    read: Read,
) -> MlxMatrix | None:
    """Describe the matrix in the tensor `name`; None if it is not quantized.

    `given`, `take` and `read`: see `codebook_matrix`. Raises ConfigError if a tensor of the matrix
    is missing or does not fit.
    """
    module, info = name.removesuffix(".weight"), given[name]
    if info.dtype not in _WORDS and f"{module}.scales" not in given:
        return None
    packing = packings.get(module, packings[""])
    if packing is None:
        raise mlx_error(
            f"{MLX_FIELD}.{module}", False, f"but tensor {tensor_name(name)} is {info.dtype}"
        )
    bits, size, mode, has_global = packing
    take(name, _WORDS)
    packed_bits = info.shape[-1] * 32 if info.shape else 0
    columns = packed_bits // bits
    if len(info.shape) not in (2, 3) or 0 in info.shape or packed_bits % (bits * size):
        raise ConfigError(
            f"tensor {tensor_name(name)} is {info.dtype} {list(info.shape)}: it must be [rows, "
            f"words] or [experts, rows, words], with the {bits} bits of whole groups of {size} "
            "columns in a row"
        )
    shape = (*info.shape[:-1], columns)
    groups = (*shape[:-1], columns // size)
    if (scales := given.get(f"{module}.scales")) is not None:
        _check_bits(module, packing, info, scales)
    if mode == "nvfp4" and (has_global or f"{module}.global_scale" in given):
        take(f"{module}.global_scale", {*FLOATS.values()}, shape[:-2])
        packing = packing._replace(global_scale=True)
    matrix = MlxMatrix(module, shape, packing)
    if mode != "affine":
        take(f"{module}.scales", "uint8", groups)
        if mode != "mxfp4":
            return matrix
        return replace(matrix, groups_of=kept_groups(read(f"{module}.scales")))
    for ending in ("scales", "biases"):
        take(f"{module}.{ending}", {*FLOATS.values()}, groups)
    if bits == 4 and _fit_float16(*(read(f"{module}.{it}") for it in ("scales", "biases"))):
        return replace(matrix, groups_of="int4")
    return matrix


def _check_bits(module: str, packing: Packing, words: TensorInfo, scales: TensorInfo) -> None:
    """Raise ConfigError if the shapes of numbers and scales are those of other bits."""
    columns = scales.shape[-1] * packing.group_size if scales.shape else 0
    bits = words.shape[-1] * 32 / (columns or 1)
    if words.shape[:-1] != scales.shape[:-1] or bits not in BITS or bits == packing.bits:
        return
    raise mlx_error(
        f"{MLX_FIELD}.{module}",
        {"bits": packing.bits, "group_size": packing.group_size},
        f"but tensor {tensor_name(f'{module}.weight')} is {list(words.shape)} with scales "
        f"{list(scales.shape)}, so this module must have {bits:g} bits",
    )


def _fit_float16(scales: Tensor, biases: Tensor) -> bool:
    """Return whether float16 scales and biases move no element by more than `_MOST_ERROR` steps.

    A step is the largest scale of the matrix. float16 holds every bfloat16 from 2^-17 to 65504.
    """
    moved = [(it.half().float() - it.float()).abs() for it in (scales, biases)]
    error = 15 * moved[0] + moved[1]
    return bool((error <= scales.float().abs().max() * _MOST_ERROR).all())


def _bytes(words: Tensor) -> Tensor:
    return words.contiguous().view(torch.uint8)
