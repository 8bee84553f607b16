"""The destinations of a checkpoint's tensors: rows of a parameter, and which of them are kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Run(NamedTuple):
    """Rows of a tensor, possibly every n-th one, copied to consecutive rows of a parameter."""

    source: range
    row: int


@dataclass(frozen=True, slots=True)
class Place:
    """The destination of one tensor of a checkpoint.

    The tensor fills `num_rows` rows of `parameter` from `first_row` on; None: all that follow.
    `transposed`: the checkpoint has the transpose. `twin`: another tensor fills this storage (tied
    embeddings); this tensor may be missing, otherwise it must be equal to the other one. `scale`:
    the tensor has one number for all rows, or one per row, kept as float32; a missing scale is 1.
    `runs`: the order of the tensor's rows, if they are not consecutive from `first_row`. `stacked`:
    the tensor has this number of matrices (or bias vectors), one per expert; its rows are numbered
    through all of them.
    """

    parameter: str
    first_row: int = 0
    num_rows: int | None = None
    transposed: bool = False
    twin: bool = False
    scale: bool = False
    runs: tuple[Run, ...] = ()
    stacked: int = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a parameter that is kept: ranges of rows, and a range of their columns."""

    rows: tuple[range, ...]
    columns: range | None = None  # None for a vector


def whole(shape: tuple[int, ...]) -> Cut:
    """Return the cut that keeps all of a parameter."""
    return Cut((range(shape[0]),), range(shape[1]) if len(shape) == 2 else None)


def kept_shape(cut: Cut) -> tuple[int, ...]:
    """Return the shape that a cut keeps."""
    num_rows = sum(map(len, cut.rows))
    return (num_rows,) if cut.columns is None else (num_rows, len(cut.columns))
