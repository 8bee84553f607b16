"""Descriptions of a checkpoint's quantized matrices, which return rows as `Codes` or floats.

A description holds the names and shapes of a matrix's tensors. When rows are requested, it reads
only the parts of the tensors that these rows need. The formulas are those of the library that
defines the format, computed in float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gptmanager.errors import ConfigError
from gptmanager.kernels.gemm.packed_matrix import Quantized
from gptmanager.kernels.gemm.panels.code_loops import NAMED
from gptmanager.kernels.gemm.panels.codes import Codes, numbers
from gptmanager.kernels.gemm.panels.words import PackedGroups, unpack_columns, unpack_stream
from gptmanager.memory.checkpoint.tensor_sources import CodesOf, tensor_name

IN_WORDS = (2, 4, 8)  # bits of integers of which none is in two words
LIMIT = 2.0**64  # scales must be smaller in magnitude, which keeps weights far from infinity
_SIGNS = -0x77777778  # the highest bit of each 4 bits
# `read(name, *ranges)` returns a part of the tensor `name`: one range of indices per dimension.
# `read(name)` returns the whole tensor.
Read = Callable[..., Tensor]


def check_scales(name: str, scales: Tensor) -> None:
    """Raise ConfigError if the tensor `name` leads to a scale or zero that is too large, or NaN."""
    if not (scales.abs() < LIMIT).all():
        raise ConfigError(
            f"tensor {tensor_name(name)} leads to a scale or zero that is NaN, or has a magnitude "
            f"of {LIMIT:g} or more"
        )


@dataclass(frozen=True, slots=True)
class Grid:
    """A tensor of scales or zeros, one for each block of `height` rows and `width` columns.

    `shape`: the shape of the tensor. `transposed`: the tensor has a row for each block of columns.
    `bits`: the bits of a packed number, or 0 if numbers are not packed. A word of packed numbers
    holds the numbers of several rows. `order`: see `unpack_columns`.
    """

    name: str
    shape: tuple[int, ...]
    height: int
    width: int
    transposed: bool = False
    bits: int = 0
    order: tuple[int, ...] = ()

    def rows(self, read: Read, rows: range) -> Tensor:
        """Return the numbers of these rows, `[n, blocks of columns]`.

        The numbers are uint8 if the tensor is packed, otherwise float32.
        """
        step, size = _whole_words(self.bits) if self.bits else (self.height, 1)
        first, last = rows.start // step, -(-rows.stop // step)
        own = range(first * size, last * size)
        if self.bits:  # the last words may hold fewer rows
            own = range(own.start, min(own.stop, self.shape[1 if self.transposed else 0]))
        ranges = [own, *map(range, self.shape[1:])][: len(self.shape)]
        found = read(self.name, *([range(self.shape[0]), own] if self.transposed else ranges))
        if self.bits:
            words = found if self.transposed else found.t()
            if self.bits in IN_WORDS:
                found = unpack_columns(words, self.bits, self.order)
            else:
                found = _unpacked_stream(words, self.bits).t()
        else:
            found = numbers(found.t() if self.transposed else found.reshape(len(own), -1))
            check_scales(self.name, found)
        if self.height > 1 and not self.bits:
            return found[torch.arange(rows.start, rows.stop) // self.height - first]
        return found[rows.start - first * step :][: len(rows)]


class StoredMatrix(ABC):
    """A quantized matrix of `shape` `[rows, columns]`.

    `groups_of`: see `TensorInfo.groups`; unless it is None, the matrix has a method `groups`.
    `codes_of`: see `TensorInfo.codes`.
    """

    shape: tuple[int, ...]
    groups_of: Quantized | None = None
    codes_of: CodesOf = "rows"

    @abstractmethod
    def codes(self, read: Read, rows: range) -> Codes:
        """Return `rows` as stored numbers with their scales and zeros."""

    def floats(self, read: Read, rows: range) -> Tensor:
        """Return `rows` in float32, `[n, columns]`."""
        return self.codes(read, rows).floats()


@dataclass(frozen=True)
class ScaledMatrix(StoredMatrix):
    """8-bit integers or floats with scales. An element is (number - zero) * scale * factor."""

    name: str
    shape: tuple[int, ...]
    scales: Grid
    zeros: Grid | None = None
    factor: float = 1

    def codes(self, read: Read, rows: range) -> Codes:
        grids = self.scales, self.zeros or self.scales
        return Codes(
            codes=read(self.name, rows, range(self.shape[1])),
            scales=self.scales.rows(read, rows),
            block=min(grid.width for grid in grids),
            zeros=0.0 if self.zeros is None else self.zeros.rows(read, rows),
            factor=self.factor,
        )


@dataclass(frozen=True)
class ScaledExperts(StoredMatrix):
    """8-bit floats of all experts, `[experts, rows, columns]`, with a scale for each block.

    `scales`: the scales of one expert's matrix as a grid, of which the tensor has one per expert,
    or if `is_shared` one for all of them. Rows are numbered consecutively across the experts; rows
    that are read belong to one expert.
    """

    name: str
    shape: tuple[int, ...]
    scales: Grid
    is_shared: bool = False

    def codes(self, read: Read, rows: range) -> Codes:
        expert, first = divmod(rows.start, self.shape[1])
        own, each = range(first, first + len(rows)), range(expert, expert + 1)

        def read_own(name: str, *ranges: range) -> Tensor:
            return read(name, each, *ranges)[0]

        return Codes(
            codes=read_own(self.name, own, range(self.shape[2])),
            scales=self.scales.rows(read if self.is_shared else read_own, own),
            block=self.scales.width,
        )


@dataclass(frozen=True)
class IntegerMatrix(StoredMatrix):
    """Packed integers in groups of columns. An element is (integer - zero) * scale.

    `bits`: 2 to 8. `transposed`: the tensor is `[columns, rows]`, packed along its second
    dimension if `order` is given, otherwise along its first. `order`: see `unpack_columns`.
    `offset` is added to the stored zeros, modulo 2 ** bits. Without `zeros`, all zeros are the
    middle of the range, 2 ** (bits - 1). `middle`: whether `zeros` may contain only this middle.
    `column_groups`: the group of each column, int32 `[columns]`, or None if groups are in order.
    `groups_of`: "int4" if `groups` can return the matrix. `signed`: the 4 bits of an integer are
    those of a number from -8 to 7, to which 8 is added.
    """

    name: str
    shape: tuple[int, ...]
    bits: int
    scales: Grid
    zeros: Grid | None = None
    offset: int = 0
    middle: bool = False
    transposed: bool = False
    order: tuple[int, ...] = ()
    column_groups: Tensor | None = None
    groups_of: Quantized | None = None
    signed: bool = False

    def codes(self, read: Read, rows: range) -> Codes:
        codes, bits = self._words(read, rows), 0
        if self.order:
            codes = self._integers(codes, rows)
        elif self.bits in IN_WORDS:
            bits = self.bits
        else:
            codes = _unpacked_stream(codes, self.bits)
        return Codes(
            codes=codes,
            bits=bits,
            scales=self.scales.rows(read, rows),
            block=self.scales.width,
            columns=self.shape[1],
            zeros=self._zeros(read, rows),
            index=self.column_groups,
        )

    def groups(self, read: Read, rows: range) -> PackedGroups:
        """Return `rows` as groups of 4-bit values. `groups_of` must not be None."""
        scales, width = self.scales.rows(read, rows).half(), self.scales.width
        zeros, minima = self._zeros(read, rows), None
        if isinstance(zeros, Tensor) and not self.middle:
            minima = (scales.float() * -zeros).half()
            scales = scales.expand_as(minima)
            check_scales(self.scales.name, minima)
        words = self._words(read, rows)
        skipped = self._rows_skipped(rows)
        return PackedGroups(words, self.shape[1], scales, width, minima, self.order, skipped)

    def _integers(self, words: Tensor, rows: range) -> Tensor:
        """Return the integers of `rows`, uint8 `[n, columns]`; only with an `order`."""
        start = self._rows_skipped(rows)
        return unpack_columns(words.t(), self.bits, self.order)[start : start + len(rows)]

    def _words(self, read: Read, rows: range) -> Tensor:
        """Return the words of `rows`, int32 `[n, words]`; with an `order`, `[words, columns]`."""
        if self.transposed:
            words = read(self.name, *self.words_of(rows)).t()
            return words ^ _SIGNS if self.signed else words
        return read(self.name, rows, range(-(-self.shape[1] * self.bits // 32)))

    def _rows_skipped(self, rows: range) -> int:
        """Return how many rows of the first word come before `rows`."""
        return rows.start % (32 // self.bits) if self.order else 0

    def words_of(self, rows: range) -> tuple[range, range]:
        """Return the ranges of both dimensions of the transposed tensor that hold these rows."""
        per_word, count = 32 // self.bits, self.shape[1]
        if not self.order:
            return range(count * self.bits // 32), rows
        return range(count), range(rows.start // per_word, -(-rows.stop // per_word))

    def _zeros(self, read: Read, rows: range) -> Tensor | int:
        middle = 1 << (self.bits - 1)
        if self.zeros is None:
            return middle
        found = (self.zeros.rows(read, rows) + self.offset) & ((1 << self.bits) - 1)
        if self.middle and not (found == middle).all():
            raise ConfigError(
                f"tensor {tensor_name(self.zeros.name)} has other values than "
                f"{middle - self.offset}: the config says that the integers are symmetric (sym)"
            )
        return found.float()


@dataclass(frozen=True)
class CodebookMatrix(StoredMatrix):
    """4-bit indices into a table of sixteen values, with a scale for each `block` of elements.

    The elements of all rows are contiguous, two in a byte, the first one in its upper half. A
    number of the tensor `name`, of any dtype, is `size` of these bytes.
    `table`: the values, float32 `[16]`. `scales` returns the float32 scales of a range of blocks.
    """

    name: str
    shape: tuple[int, ...]
    table: Tensor
    block: int
    scales: Callable[[Read, range], Tensor]
    size: int = 1

    @property
    def codes_of(self) -> CodesOf:  # type: ignore[override]
        return "" if self.shape[1] % self.block else "rows"

    def codes(self, read: Read, rows: range) -> Codes:
        first, last = rows.start * self.shape[1], rows.stop * self.shape[1]
        packed = self._bytes(read, range(first // 2, last // 2)).view(len(rows), -1)
        scales = self.scales(read, range(first // self.block, last // self.block))
        return self._codes(packed, scales.view(len(rows), -1))

    def _bytes(self, read: Read, own: range) -> Tensor:
        first, last = own.start // self.size, -(-own.stop // self.size)
        found = read(self.name, range(first, last), range(1)).contiguous().view(torch.uint8)
        return found.flatten()[own.start - first * self.size :][: len(own)]

    def _codes(self, packed: Tensor, scales: Tensor) -> Codes:
        check_scales(f"{self.name}.absmax", scales)
        return Codes(
            codes=packed,
            scales=scales,
            block=self.block,
            kind=NAMED,
            table=self.table,
            high_first=True,
        )

    def floats(self, read: Read, rows: range) -> Tensor:
        first, last = rows.start * self.shape[1], rows.stop * self.shape[1]
        blocks = range(first // self.block, -(-last // self.block))
        start, size = blocks.start * self.block, len(blocks) * self.block
        packed = self._bytes(read, range(start // 2, -(-last // 2)))
        packed = F.pad(packed, (0, size // 2 - len(packed))).view(len(blocks), -1)
        found = self._codes(packed, self.scales(read, blocks).unsqueeze(1)).floats()
        return found.flatten()[first - start : last - start].view(len(rows), -1)


@dataclass(frozen=True)
class NestedScales:
    """Scales that are quantized to bytes. A scale is values[byte] * outer + offset.

    `name`: the name of the tensor of bytes. `values`: the value of each byte, float32 `[256]`.
    `outer`: float32, one number for each `block` consecutive scales.
    """

    name: str
    outer: Tensor
    values: Tensor
    block: int
    offset: float

    def __call__(self, read: Read, blocks: range) -> Tensor:
        """Return the scales of these blocks in float32."""
        places = torch.arange(blocks.start, blocks.stop) // self.block
        return self.values[read(self.name, blocks).int()] * self.outer[places] + self.offset


def _whole_words(bits: int) -> tuple[int, int]:
    """Return the smallest number of integers that fill whole words, and the number of words."""
    return (32 // bits, 1) if bits in IN_WORDS else (32, bits)


def _unpacked_stream(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 `[n, words]` as `unpack_stream` does, and further elements at the end."""
    return unpack_stream(F.pad(words, (0, -words.shape[1] % bits)), bits)
