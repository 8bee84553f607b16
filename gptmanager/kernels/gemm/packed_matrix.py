"""`PackedMatrix`: a weight of the network in the order in which matmuls read it.

Sixteen rows make a panel, through which a matmul streams. For float32 and float16, `values` is
`[panels, depth, 16, 1]`. For bfloat16, `values` is `[panels, depth / 2, 16, 2]`, and for int8
`[panels, depth / 4, 16, 4]`, so that an instruction reads 32 bits of each row. The rows that pad
the last panel, and the positions that pad the depth, are zero.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from gptmanager.environment.machine.memory import zeroed_memory
from gptmanager.kernels.gemm.int4_groups import Codebook
from gptmanager.kernels.gemm.panels.codes import Codes
from gptmanager.kernels.gemm.panels.panel_writing import write_int8, write_words
from gptmanager.kernels.gemm.weight_quantization import round_to_int8

PANEL_ROWS = 16  # the lanes of a SIMD register, see `lanes`
_WORD_BYTES = 4
UNIT_BYTES = 64  # bytes of a bfloat16 or int8 row that a matrix unit (Intel AMX) reads at a time
_OWN_PAGES = 64 << 10  # tensors of at least this number of bytes get memory pages of their own
_ALL = slice(None)
_Matrix = TypeVar("_Matrix", bound="PackedMatrix")

# How a matrix is stored in fewer bits than its dtype has; the last two are codebooks of 4 bits.
Quantized = Literal["int8", "int4", "fp8", "e2m1", "iq4"]


class Panels(NamedTuple):
    """The storage of a quantized matrix, see `PackedMatrix` and `Int4Matrix`."""

    values: Tensor
    scales: Tensor
    minima: Tensor | None = None
    codebook: Codebook | None = None


class PackedMatrix:
    """A matrix `[rows, columns]` of float32, bfloat16 or float16.

    This object is not a tensor: `copy_` writes it, and `unpacked` reads it. If `quantized`, the
    matrix is stored as int8 with one scale per row. The largest magnitude of a row becomes 127, so
    `copy_` needs whole rows, even to write only some of their columns. `shape` and `dtype` describe
    the unpacked matrix.
    """

    def __init__(
        self, rows: int, columns: int, dtype: torch.dtype, quantized: bool = False
    ) -> None:
        self.shape, self.dtype = torch.Size((rows, columns)), dtype
        stored = torch.int8 if quantized else dtype
        self.depth, group = columns, {torch.bfloat16: 2, torch.int8: 4}.get(stored, 1)
        if group > 1:
            unit_depth = UNIT_BYTES // stored.itemsize
            self.depth = -(-columns // unit_depth) * unit_depth
        panels = -(-rows // PANEL_ROWS)
        self.values = zeros((panels, self.depth // group, PANEL_ROWS, group), stored)
        self.plans: dict[Any, Any] = {}  # `CpuKernels` makes them from shape and addresses
        self._parts: tuple[Matrix, ...] = ()
        self.scales = torch.zeros(panels * PANEL_ROWS, dtype=torch.float32) if quantized else None

    def __len__(self) -> int:
        return self.shape[0]

    def clone(self: _Matrix) -> _Matrix:
        """Return a copy with storage of its own."""
        made = copy.copy(self)
        for name in ("values", "scales", "minima"):
            tensor = getattr(self, name, None)
            if tensor is not None:
                setattr(made, name, tensor.clone())
        made.plans, made._parts = {}, ()
        return made

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @property
    def position_bytes(self) -> int:
        """The size in bytes of one position of a panel, for all its rows."""
        return self.values.itemsize * PANEL_ROWS

    @property
    def takes_codes(self) -> bool:
        """Whether `copy_` may be passed `Codes`."""
        return self.scales is not None

    @property
    def panels(self) -> Panels:
        """The storage of a quantized matrix."""
        assert self.scales is not None
        return Panels(self.values, self.scales)

    def adopt(self, panels: Panels) -> bool:
        """Use `panels` as the storage; return False if their shape, dtype or device differs."""
        for own, other in ((self.values, panels.values), (self.scales, panels.scales)):
            if own is None or own.dtype != other.dtype or own.shape != other.shape:
                return False
            if own.device != other.device:
                return False
        self.values, self.scales = panels.values, panels.scales
        self.plans, self._parts = {}, ()
        return True

    def parts(self, count: int) -> tuple[Matrix, ...]:
        """Split the matrix into `count` matrices with equal numbers of rows.

        The parts are views if each part consists of whole panels, otherwise unpacked copies.
        """
        size = len(self) // count
        if size % PANEL_ROWS:
            return tuple(self.unpacked(slice(n * size, (n + 1) * size)) for n in range(count))
        if len(self._parts) != count:
            self._parts = tuple(self._part(number * size, size) for number in range(count))
        return self._parts

    def _part(self, first: int, size: int) -> PackedMatrix:
        part = PackedMatrix.__new__(PackedMatrix)
        part.shape, part.dtype, part.depth = (
            torch.Size((size, self.shape[1])),
            self.dtype,
            self.depth,
        )
        part.values = self.values[first // PANEL_ROWS : (first + size) // PANEL_ROWS]
        part.scales = None if self.scales is None else self.scales[first : first + size]
        part.plans, part._parts = {}, ()
        return part

    def unpacked(self, rows: slice = _ALL) -> Tensor:
        """Return a copy of these rows, `[n, columns]`."""
        start, stop, _ = rows.indices(len(self))
        first, end = start // PANEL_ROWS, -(-stop // PANEL_ROWS)
        whole = self.values[first:end].transpose(1, 2).flatten(0, 1).flatten(1)
        own = whole[start - PANEL_ROWS * first : stop - PANEL_ROWS * first, : self.shape[1]]
        if self.scales is None:
            return own.contiguous()
        return (own * self.scales[start:stop].unsqueeze(1)).to(self.dtype)

    def copy_(
        self,
        values: Tensor | Codes,
        first_row: int = 0,
        first_column: int = 0,
        columns: slice = _ALL,
    ) -> None:
        """Convert `columns` of `values [n, m]`, and write them from the given row and column on.

        `first_column` must be 0 if the matrix is quantized. Scales are computed from all columns of
        `values`, so that parts of a row have the same scale.
        """
        if self.scales is not None:
            assert first_column == 0
            if isinstance(values, Codes):
                values.write_int8(columns, self.values, self.scales, first_row)
            else:
                write_int8(values, columns, self.values, self.scales, first_row)
            return
        if isinstance(values, Codes):
            values = values.floats()
        values = values[:, columns]
        group = self.values.shape[3]
        if group * self.values.itemsize == _WORD_BYTES:
            values = values.to("cpu", self.dtype)
            if first_column % group == 0 and _has_words(values, group):
                self._copy_words(values.view(torch.int32), first_row, first_column // group)
                return
        for part in range(group):
            skipped = (part - first_column) % group
            start = (first_column + skipped) // group
            of_part = values[:, skipped::group]
            positions = self.values[..., part].transpose(1, 2)[..., start:][..., : of_part.shape[1]]
            copy_rows(positions, first_row, of_part)

    def _copy_words(self, words: Tensor, first_row: int, first_word: int) -> None:
        """Write words of 32 bits, int32 `[n, words]`. Compiled code writes whole panels."""
        of_rows = self.values.view(torch.int32)[..., 0].transpose(1, 2)
        of_rows = of_rows[..., first_word:][..., : words.shape[1]]
        head = min(-first_row % PANEL_ROWS, len(words))
        tail = head + (len(words) - head) // PANEL_ROWS * PANEL_ROWS
        copy_rows(of_rows, first_row, words[:head])
        if tail > head:
            write_words(words[head:tail], self.values, first_row + head, first_word)
        copy_rows(of_rows, first_row + tail, words[tail:])

    def holds(
        self,
        values: Tensor | Codes,
        first_row: int = 0,
        first_column: int = 0,
        columns: slice = _ALL,
    ) -> bool:
        """Return whether `copy_` with the same arguments would change nothing."""
        own = self.unpacked(slice(first_row, first_row + len(values)))
        if isinstance(values, Codes):
            values = values.floats()
        if self.scales is not None:
            values = self._rounded(values)
        values = values[:, columns]
        own = own[:, first_column : first_column + values.shape[1]]
        return torch.equal(own, values.to(own))

    def _rounded(self, values: Tensor) -> Tensor:
        """Return these rows as a quantized matrix would hold them, in float32."""
        ints, scales = round_to_int8(values)
        return ints * scales.unsqueeze(1)


Matrix = Tensor | PackedMatrix


def plain(matrix: Matrix) -> Tensor:
    """Return the matrix as a tensor: itself, or an unpacked copy."""
    return matrix.unpacked() if isinstance(matrix, PackedMatrix) else matrix


def stored(matrix: Matrix) -> list[Tensor]:
    """Return the tensors that hold a matrix."""
    if not isinstance(matrix, PackedMatrix):
        return [matrix]
    own = (matrix.values, matrix.scales, getattr(matrix, "minima", None))
    return [tensor for tensor in own if tensor is not None]


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros in the CPU's memory; large tensors get huge pages if the system has them.

    The system provides zeros when the memory is first used.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _OWN_PAGES:
        return torch.zeros(*shape, dtype=dtype)
    return torch.frombuffer(zeroed_memory(num_bytes), dtype=dtype).view(*shape)


def _has_words(rows: Tensor, group: int) -> bool:
    """Return whether `rows` can be viewed as words of 32 bits, each of `group` elements."""
    sizes = rows.shape[1], rows.stride(0), rows.storage_offset()
    return rows.stride(1) == 1 and not any(size % group for size in sizes)


def copy_rows(panels: Tensor, first: int, rows: Tensor) -> None:
    """Copy `rows [n, ...]` to `panels [P, 16, ...]`, from row `first` on.

    All whole panels are written in one copy.
    """
    head = min(-first % PANEL_ROWS, len(rows))
    whole = (len(rows) - head) // PANEL_ROWS
    panel, lane = divmod(first, PANEL_ROWS)
    if head:
        panels[panel, lane : lane + head].copy_(rows[:head])
        panel += 1
    middle = rows[head : head + PANEL_ROWS * whole]
    if whole:
        panels[panel : panel + whole].copy_(middle.reshape(whole, PANEL_ROWS, *rows.shape[1:]))
    tail = rows[head + PANEL_ROWS * whole :]
    if len(tail):
        panels[panel + whole, : len(tail)].copy_(tail)
