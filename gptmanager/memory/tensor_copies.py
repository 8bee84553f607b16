"""`TensorCopies`: copies the tensors of a checkpoint into the storage of parameters.

A tensor is copied as a whole or as rows of a fused parameter, transposed or not, and converted to
the storage's dtype.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from gptmanager.config import ProgressCallback
from gptmanager.kernels.gemm.packed_matrix import Matrix, PackedMatrix, Quantized
from gptmanager.memory.checkpoint.tensor_sources import TensorSource
from gptmanager.memory.places import Cut, Part, Place, kept_parts, runs
from gptmanager.memory.stored_matrices import packed_pieces
from gptmanager.memory.tensor_checks import read_scales, tied_error

MIN_PIECE_BYTES = 1 << 20


class TensorCopies:
    """Copies tensors of `source` into `storage`, to the places that `places` has for their names.

    `shapes`, `cuts` and `quantized` describe the parameters, as in `Weights`. If the place
    is a twin, its tensor is compared instead of copied. Raises ConfigError if it differs.
    """

    def __init__(
        self,
        source: TensorSource,
        places: Mapping[str, Place],
        storage: Mapping[str, Matrix],
        shapes: Mapping[str, tuple[int, ...]],
        cuts: Mapping[str, Cut],
        quantized: Mapping[str, Quantized],
    ) -> None:
        self._source, self._places, self._storage = source, places, storage
        self._shapes, self._cuts, self._quantized = shapes, cuts, quantized

    def copy_all(
        self, names: Mapping[str, str], max_bytes: int, on_progress: ProgressCallback | None
    ) -> None:
        """Copy all tensors, at most `max_bytes` at once. `names`: name in `places` -> given name.

        `on_progress` is called with "weights", the bytes copied so far, and all bytes to copy.
        """
        # Twins are last, because a twin is compared with its parameter.
        order = sorted(names, key=lambda name: self._places[name].twin)
        parts = {name: self._parts(self._places[name]) for name in names}
        total = sum(self._nbytes(name, part) for name in names for part in parts[name])
        done = 0
        with torch.no_grad():
            for name in order:
                for part in parts[name]:
                    for num_bytes in self._copy_part(names[name], name, part, max_bytes):
                        done += num_bytes
                        if on_progress is not None:
                            on_progress("weights", done, total)

    def copy(self, given: str, name: str) -> None:
        """Copy the tensor `given` of the source to the place of `name`."""
        for part in self._parts(self._places[name]):
            for _ in self._copy_part(given, name, part, MIN_PIECE_BYTES):
                pass

    def _parts(self, place: Place) -> list[Part]:
        """Return the parts of a tensor that are kept."""
        name = place.parameter
        return kept_parts(place, self._cuts[name], self._shapes[name]) if name in self._cuts else []

    def _nbytes(self, name: str, part: Part) -> int:
        """Return the size in bytes of a kept part, in the dtype of its parameter."""
        parameter = self._places[name].parameter
        columns = self._cuts[parameter].columns
        num_columns = 1 if columns is None else len(columns)
        return len(part.rows) * num_columns * self._storage[parameter].dtype.itemsize

    def _copy_part(self, given: str, name: str, part: Part, max_bytes: int) -> Iterator[int]:
        """Copy a part slice by slice; yield the size in bytes of each slice."""
        place, num_bytes = self._places[name], self._nbytes(name, part)
        if place.scale:
            self._copy_scales(given, name, part)
            yield num_bytes
            return
        if place.stacked or part.rows.step != 1 or part.stored_transposed:
            yield self._copy_picked(given, place, part, max_bytes)
            return
        # rows are read whole to be quantized: a scale depends on a whole row, or a whole group
        in_rows = place.parameter in self._quantized
        columns = self._cuts[place.parameter].columns
        region = [part.rows]
        if columns is not None:
            inputs = range(self._shapes[place.parameter][1])
            region.append(inputs if in_rows else columns)
        if place.transposed:
            region.reverse()
            max_bytes = sys.maxsize if in_rows else max_bytes
        region[1:1] = [range(1)] * place.squeezed
        num_first = len(region[0])
        pieces = packed_pieces(
            self._source, given, self._storage[place.parameter], place, max_bytes, part.rows
        )
        if pieces is None:
            pieces = self._source.pieces(given, max_bytes, region)
        else:
            num_first = len(part.rows)
        for start, piece in pieces:
            done = len(piece)
            row, column = part.row + start, 0
            if place.transposed and isinstance(piece, Tensor):
                own = piece.squeeze(1) if place.squeezed else piece
                piece, row, column = own.t(), part.row, start
            if not self._copy(place, piece, row, column, columns if in_rows else None):
                raise tied_error(given, place.parameter)
            yield num_bytes * done // num_first

    def _copy_picked(self, given: str, place: Place, part: Part, max_bytes: int) -> int:
        """Copy rows of an expert's matrix, with a step, or to transpose; return the bytes."""
        rows, columns = part.rows, self._cuts[place.parameter].columns
        itemsize = self._storage[place.parameter].dtype.itemsize
        every = range(rows.start, rows[-1] + 1)
        packed = packed_pieces(
            self._source, given, self._storage[place.parameter], place, max_bytes, every
        )
        if packed is not None:
            for start, own in packed:
                skipped = -start % rows.step
                row = part.row + (start + skipped) // rows.step
                own = own if rows.step == 1 else own.rows(slice(skipped, None, rows.step))
                self._copy(place, own, row, 0, columns)
            return len(rows) * self._shapes[place.parameter][1] * itemsize
        shape = self._shapes[place.parameter]
        size = sum(len(own.source) for own in runs(place, shape)) // max(1, place.stacked)
        number = rows.start // size
        stack, offset = [range(number, number + 1)] if place.stacked else [], number * size
        region = [range(rows.start - offset, rows[-1] + 1 - offset), *map(range, shape[1:])]
        region = region[::-1] if place.transposed else region
        pieces = self._source.pieces(given, max_bytes, [*stack, *region])
        piece = torch.cat([own.clone() for _, own in pieces])
        piece = piece[0] if stack else piece
        piece = (piece.t() if place.transposed else piece)[:: rows.step]
        if columns is not None and place.parameter not in self._quantized:
            piece, columns = piece[:, columns.start : columns.stop], None
        piece = piece.t().reshape(piece.shape) if part.stored_transposed else piece
        self._copy(place, piece, part.row, 0, columns)
        return piece.numel() * itemsize

    def _copy_scales(self, given: str, name: str, part: Part) -> None:
        piece = read_scales(self._source, given)
        if piece.numel() > 1:
            piece = piece[part.rows.start : part.rows.stop]
        storage = cast(Tensor, self._storage[self._places[name].parameter])
        storage[part.row : part.row + len(part.rows)].copy_(piece)

    def _copy(self, place: Place, piece: Any, row: int, column: int, columns: range | None) -> bool:
        """Copy `columns` of `piece`, or all, to the storage from `row` and `column` on.

        `piece`: a tensor, or a slice from `packed_pieces`. A twin is compared instead of copied;
        the result is False if the twin differs.
        """
        storage = self._storage[place.parameter]
        if isinstance(storage, PackedMatrix):
            own = slice(None) if columns is None else slice(columns.start, columns.stop)
            if place.twin:
                return storage.holds(piece, row, column, own)
            storage.copy_(piece, row, column, own)
            return True
        assert isinstance(piece, Tensor)
        piece = piece if columns is None else piece[:, columns.start : columns.stop]
        region = storage[row : row + len(piece)]
        if piece.dim() == 2:
            region = region[:, column : column + piece.shape[1]]
        if place.twin:
            return torch.equal(region, piece.to(region))
        region.copy_(piece)
        return True
