"""`QuantizedSource`: reads the tensors of a quantized checkpoint as if they were floats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gptmanager.kernels.gemm.int4_groups import Groups
from gptmanager.memory.tensor_sources import TensorInfo, TensorSource
from gptmanager.models.quantized.formats import MatrixFinder
from gptmanager.models.quantized.matrices import ExpertBlocks, IntegerMatrix, StoredMatrix
from gptmanager.models.quantized.scheme import Scheme

_FLOAT_BYTES = 32  # memory per element that becomes a float32, with temporary arrays
_GROUP_BYTES = 8  # memory per element that stays in 4 bits
_STEP = 8  # rows that share a word in some formats
_SMALL = 1 << 24  # bytes that are read at a time


class QuantizedSource:
    """A `GroupedSource` over the tensors of a quantized checkpoint.

    Raises ConfigError if the tensors of a matrix are missing or do not fit the scheme.
    """

    def __init__(self, source: TensorSource, scheme: Scheme) -> None:
        self._source = source
        given = source.describe()
        finder = MatrixFinder(scheme, given, self._read)
        self._matrices: dict[str, StoredMatrix | ExpertBlocks] = finder.matrices
        self._found = {n: it for n, it in given.items() if n not in finder.used}
        self._found |= {
            name: TensorInfo(matrix.shape, "float32", matrix.in_groups)
            for name, matrix in self._matrices.items()
        }

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
        if isinstance(matrix, ExpertBlocks):
            experts, columns, rows = ranges
            for expert in experts:
                floats = matrix.floats(self._read, expert, rows)
                yield expert - experts.start, floats[columns.start : columns.stop].unsqueeze(0)
            return
        rows, columns = ranges
        for own in _slices(rows, max_bytes // (matrix.shape[1] * _FLOAT_BYTES)):
            floats = matrix.floats(self._read, own)
            yield own.start - rows.start, floats[:, columns.start : columns.stop]

    def groups(self, name: str, max_bytes: int, rows: range) -> Iterator[tuple[int, Groups]]:
        matrix = self._matrices[name]
        assert isinstance(matrix, IntegerMatrix)
        for own in _slices(rows, max_bytes // (matrix.shape[1] * _GROUP_BYTES)):
            yield own.start - rows.start, matrix.groups(self._read, own)

    def close(self) -> None:
        self._source.close()

    def _read(self, name: str, *ranges: range) -> Tensor:
        """Return a copy of the given ranges of a tensor, by default of all of it."""
        pieces = self._source.pieces(name, _SMALL, ranges or None)
        found = [piece.clone() for _, piece in pieces]
        return found[0] if len(found) == 1 else torch.cat(found)


def _slices(rows: range, count: int) -> Iterator[range]:
    """Split a range at multiples of `_STEP`, into parts of about `count`."""
    step = max(_STEP, count // _STEP * _STEP)
    start = rows.start
    while start < rows.stop:
        stop = min(rows.stop, (start // step + 1) * step)
        yield range(start, stop)
        start = stop
