"""`QuantizedSource`: reads the tensors of a quantized checkpoint, and dequantizes its matrices."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from gptmanager.kernels.gemm.packed_matrix import PANEL_ROWS
from gptmanager.kernels.gemm.panels.codes import Codes
from gptmanager.kernels.gemm.panels.words import PackedGroups
from gptmanager.memory.checkpoint.safetensors_reader import SafetensorsFolder
from gptmanager.memory.checkpoint.tensor_sources import TensorInfo, TensorSource
from gptmanager.models.quantized.float4 import ExpertBlocks, Float4Matrix
from gptmanager.models.quantized.formats import MatrixFinder
from gptmanager.models.quantized.matrices import IntegerMatrix, Read, StoredMatrix
from gptmanager.models.quantized.mlx import MlxMatrix
from gptmanager.models.quantized.scheme_fields import Scheme

_FLOAT_BYTES = 6  # memory per element that becomes a float32: the float and its stored bits
_CODE_BYTES = 1  # memory per element that stays quantized: at most a byte
_PIECE_BYTES = 16 << 20  # memory of a piece, which should fit into the last-level cache
_STEP = 8  # rows that share a word in some formats
_READ_BYTES = 8 << 20  # bytes that are read at a time


class QuantizedSource:
    """A `GroupedSource` and `CodedSource` over the tensors of a quantized checkpoint.

    The constructor raises ConfigError if tensors of a matrix are missing or do not fit the scheme;
    reading a matrix raises ConfigError if scales or zeros are not allowed.
    """

    def __init__(self, source: TensorSource, scheme: Scheme) -> None:
        self._source = source
        given = source.describe()
        finder = MatrixFinder(scheme, given, self._read)
        self._matrices: dict[str, StoredMatrix | ExpertBlocks] = finder.matrices
        self._found = {n: it for n, it in given.items() if n not in finder.used}
        self._found |= {
            name: TensorInfo(matrix.shape, "float32", matrix.groups_of, matrix.codes_of, True)
            for name, matrix in self._matrices.items()
        }

    @property
    def formats(self) -> Collection[str]:
        """See `SafetensorsFolder`."""
        return self._source.formats if isinstance(self._source, SafetensorsFolder) else ()

    @property
    def matrices(self) -> Collection[str]:
        """The names of the quantized matrices."""
        return self._matrices.keys()

    def describe(self) -> Mapping[str, TensorInfo]:
        return self._found

    def pieces(
        self, name: str, max_bytes: int, region: Sequence[range] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        matrix = self._matrices.get(name)
        if matrix is None:
            yield from self._source.pieces(name, max_bytes, region)
            return
        ranges = list(region or map(range, matrix.shape))
        if len(ranges) > 2 or isinstance(matrix, ExpertBlocks):
            yield from self._expert_pieces(matrix, *ranges)
            return
        rows, columns = ranges
        for own, read in self._slices(matrix, rows, max_bytes, _FLOAT_BYTES):
            floats = matrix.floats(read, own)
            yield own.start - rows.start, floats[:, columns.start : columns.stop]

    def _expert_pieces(
        self, matrix: StoredMatrix | ExpertBlocks, experts: range, first: range, second: range
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield a part of each expert's matrix, as `pieces` does."""
        by_column = matrix.codes_of == "columns"
        outputs, inputs = (second, first) if by_column else (first, second)
        size, read = matrix.shape[2 if by_column else 1], self._reader(_READ_BYTES)
        for expert in experts:
            own = range(expert * size + outputs.start, expert * size + outputs.stop)
            floats = matrix.codes(read, own).floats()[:, inputs.start : inputs.stop]
            yield expert - experts.start, (floats.t() if by_column else floats).unsqueeze(0)

    def groups(self, name: str, max_bytes: int, rows: range) -> Iterator[tuple[int, PackedGroups]]:
        matrix = self._matrices[name]
        assert isinstance(matrix, (IntegerMatrix, MlxMatrix, Float4Matrix, ExpertBlocks))
        if isinstance(matrix, ExpertBlocks):
            yield 0, matrix.groups(self._reader(max_bytes), rows)
            return
        for own, read in self._slices(matrix, rows, max_bytes, _CODE_BYTES):
            yield own.start - rows.start, matrix.groups(read, own)

    def codes(self, name: str, max_bytes: int, rows: range) -> Iterator[tuple[int, Codes]]:
        matrix = self._matrices[name]
        if isinstance(matrix, ExpertBlocks):
            yield 0, matrix.codes(self._reader(max_bytes), rows)
            return
        for own, read in self._slices(matrix, rows, max_bytes, _CODE_BYTES):
            yield own.start - rows.start, matrix.codes(read, own)

    def close(self) -> None:
        self._source.close()

    def _slices(
        self, matrix: StoredMatrix, rows: range, max_bytes: int, element_bytes: int
    ) -> Iterator[tuple[range, Read]]:
        """Yield pieces of `rows` that fit into the cache, each with the function that reads it.

        If the tensor is transposed, a row of the matrix has elements on all memory pages of the
        tensor, so a read covers more rows. Without a limit (`max_bytes` is `sys.maxsize`), all rows
        are one piece.
        """
        columns = matrix.shape[-1]
        size = max_bytes if max_bytes == sys.maxsize else min(max_bytes, _PIECE_BYTES)
        size //= columns * element_bytes
        if not (isinstance(matrix, IntegerMatrix) and matrix.transposed):
            read = self._reader(max_bytes)
            yield from ((own, read) for own in _split(rows, size))
            return
        for many in _split(rows, max_bytes * 8 // (columns * matrix.bits)):
            read = self._held(max_bytes, matrix.name, *matrix.words_of(many))
            yield from ((own, read) for own in _split(many, size))

    def _held(self, max_bytes: int, name: str, rows: range, columns: range) -> Read:
        """Read a part of the tensor `name`, and return a `Read` function.

        For the tensor `name`, the function returns columns of this part. For other tensors, it
        calls `_view`.
        """
        others = self._reader(max_bytes)
        part = others(name, rows, columns)

        def read(asked: str, *ranges: range) -> Tensor:
            if asked != name:
                return others(asked, *ranges)
            start = columns.start
            return part[:, ranges[1].start - start : ranges[1].stop - start]

        return read

    def _reader(self, max_bytes: int) -> Read:
        return partial(self._view, max_bytes)

    def _view(self, max_bytes: int, name: str, *ranges: range) -> Tensor:
        """Return the given ranges of a tensor as `_read` does, but without a copy if possible.

        Only the last dimension of the result is guaranteed to be contiguous. A view keeps pages of
        the file resident, so callers should drop the view soon.
        """
        if ranges:
            _, piece = next(self._source.pieces(name, max_bytes, ranges))
            if len(piece) == len(ranges[0]):
                return piece if piece.stride(-1) == 1 else piece.contiguous()
        return self._read(name, *ranges)

    def _read(self, name: str, *ranges: range) -> Tensor:
        """Return a copy of the given ranges of a tensor. Without ranges, copy the whole tensor."""
        shape, dtype, *_ = self._source.describe()[name]
        found = torch.empty([*map(len, ranges)] or shape, dtype=getattr(torch, dtype))
        for start, piece in self._source.pieces(name, _READ_BYTES, ranges or None):
            (found[start : start + len(piece)] if shape else found).copy_(piece)
        return found


def _split(rows: range, count: int) -> Iterator[range]:
    """Split a range into parts of about `count` rows, at least 8, cut at multiples of 8."""
    step = max(_STEP, count // PANEL_ROWS * PANEL_ROWS)
    start = rows.start
    while start < rows.stop:
        stop = min(rows.stop, (start // step + 1) * step)
        yield range(start, stop)
        start = stop
