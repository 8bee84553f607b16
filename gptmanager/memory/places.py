"""Where the tensors of a checkpoint go: the rows of a parameter, and the part that is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Run(NamedTuple):
    """Rows of a tensor, perhaps each n-th one, that go to rows of a parameter in one piece."""

    source: range
    row: int


@dataclass(frozen=True, slots=True)
class Place:
    """The destination of one tensor of a checkpoint.

    The tensor fills `num_rows` rows of `parameter` from `first_row` on (None: all). `transposed`:
    the checkpoint holds the transpose. `twin`: another tensor fills this storage (tied
    embeddings); this one may be missing, and where it is present it must be equal. `scale`: one
    number for all of the rows, or one for each, kept as float32; it may be missing, which means 1.
    `runs`: the tensor's rows in another order, if they do not follow each other from `first_row`.
    `stacked`: the tensor holds that many matrices (or vectors, of a bias), one for each expert;
    its rows are counted through all of them.
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
    """The part of a parameter that is kept: ranges of rows, and some columns of these rows."""

    rows: tuple[range, ...]
    columns: range | None = None  # None: the parameter has none


def whole(shape: tuple[int, ...]) -> Cut:
    """Return the cut that keeps all of a parameter."""
    return Cut((range(shape[0]),), range(shape[1]) if len(shape) == 2 else None)


def kept_shape(cut: Cut) -> tuple[int, ...]:
    """Return the shape that a cut keeps."""
    num_rows = sum(map(len, cut.rows))
    return (num_rows,) if cut.columns is None else (num_rows, len(cut.columns))
