"""`TensorSource`: the tensors of a checkpoint by name. `StateDict`: a source of tensors in memory.

A source finds tensors and reads slices of them. It does not know how a tensor is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from gptmanager.errors import ConfigError, quoted
from gptmanager.kernels.gemm.int4_groups import Groups
from gptmanager.kernels.gemm.packed_matrix import Panels, Quantized
from gptmanager.kernels.gemm.panels.codes import Codes
from gptmanager.kernels.gemm.panels.words import PackedGroups

CodesOf = Literal["", "rows", "columns"]


class TensorInfo(NamedTuple):
    """The shape and dtype of a tensor, known before the tensor is read.

    `dtype` is the name of a torch dtype. `groups`: the kind of 4-bit groups in which
    `GroupedSource.groups` can read the matrix, or the matrices of all experts; None if it cannot.
    `quantized`: whether the checkpoint has fewer bits than `dtype`. `codes`: `CodedSource.codes`
    can read their "rows" or "columns"; "" if neither. If `codes` is "columns",
    `GroupedSource.groups` reads columns, too, and rows otherwise.
    """

    shape: tuple[int, ...]
    dtype: str
    groups: Quantized | None = None
    codes: CodesOf = ""
    quantized: bool = False


class TensorSource(Protocol):
    """The tensors of a checkpoint by name, read in slices."""

    def describe(self) -> Mapping[str, TensorInfo]:
        """Return the `TensorInfo` of each tensor by name, without reading the tensors."""
        ...

    def pieces(
        self, name: str, max_bytes: int, region: Sequence[range] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield slices of a tensor along its first dimension, in order, as (first index, slice).

        `region`: the range of indices to read in each dimension; None reads the whole tensor. The
        first index of a slice counts from the beginning of the region. A slice that is read from a
        file has at most about `max_bytes`, and is valid until the next slice is requested.
        """
        ...

    def close(self) -> None:
        """Close the files. The next read opens them again."""
        ...


class GroupedSource(TensorSource, Protocol):
    """A source that can also return int4 matrices without converting them to floats."""

    def groups(
        self, name: str, max_bytes: int, rows: range
    ) -> Iterator[tuple[int, Groups | PackedGroups]]:
        """Yield these rows of a matrix `[outputs, inputs]` in slices, as (first index, groups).

        Rows of a tensor `[experts, outputs, inputs]` are numbered as in `CodedSource.codes`.
        """
        ...


class CodedSource(TensorSource, Protocol):
    """A source that can also return quantized matrices without dequantizing them."""

    def codes(self, name: str, max_bytes: int, rows: range) -> Iterator[tuple[int, Codes]]:
        """Yield these rows of a matrix in slices, as (first index, codes).

        For a tensor with the matrices of all experts, row `expert * outputs + i` is output i of an
        expert. All `rows` must be outputs of the same expert.
        """
        ...


@runtime_checkable
class PanelSource(GroupedSource, Protocol):
    """A source that holds matrices in the memory layout that matmuls read."""

    def panels(self, names: Sequence[str]) -> Panels | None:
        """Return these matrices in memory as one matrix, or None if they must be copied."""
        ...


class StateDict:
    """A source of tensors in memory.

    Raises ConfigError unless `tensors` maps names to dense tensors.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if not isinstance(name, str):
                raise ConfigError(f"tensor {quoted(name)}: the name must be a string")
            if not isinstance(tensor, Tensor):
                raise ConfigError(
                    f"{tensor_name(name)}: must be a torch.Tensor, got {type(tensor).__name__}"
                )
            if tensor.is_meta or tensor.layout is not torch.strided:
                raise ConfigError(
                    f"{tensor_name(name)}: must be a dense tensor with values, got layout "
                    f"{tensor.layout} on {tensor.device}"
                )
        self._tensors = tensors

    def describe(self) -> Mapping[str, TensorInfo]:
        return {
            name: TensorInfo(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self._tensors.items()
        }

    def pieces(
        self, name: str, max_bytes: int, region: Sequence[range] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        tensor = self._tensors[name]
        yield 0, tensor if region is None else tensor[tuple(map(as_slice, region))]

    def close(self) -> None:
        """Do nothing, because no file is open."""


def as_slice(indices: range) -> slice:
    return slice(indices.start, indices.stop)


def tensor_name(tensor: str) -> str:
    """Return a tensor's name for messages: quoted unless it is printable and short."""
    return tensor if tensor.isprintable() and len(tensor) <= 200 else quoted(tensor)
