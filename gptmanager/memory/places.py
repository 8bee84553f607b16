"""The destinations of a checkpoint's tensors: rows of a parameter, and which of them are kept."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


class Run(NamedTuple):
    """A run of rows that is copied from a tensor to a parameter.

    `source` has the tensor's rows, possibly every n-th row. They fill the parameter's rows from
    `row` on. If `stored_transposed`, the memory of these rows of the parameter, `[n, m]`, holds the
    transpose `[m, n]`. Such a run is kept whole.
    """

    source: range
    row: int
    stored_transposed: bool = False


class Part(NamedTuple):
    """Rows of a tensor that are kept as consecutive rows of the storage, from `row` on.

    `stored_transposed`: see `Run`.
    """

    rows: range
    row: int
    stored_transposed: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """The destination of one tensor of a checkpoint.

    The tensor fills `num_rows` rows of `parameter` from `first_row` on, by default all rows from
    there. If `transposed`, the checkpoint has the transpose. A `twin` is the second tensor of a
    parameter that another tensor fills (tied embeddings). Either of them may be missing; otherwise
    they must be equal. A `scale` has one number for all rows, or one per row, kept
    as float32; a missing scale is 1. `runs` has the places of the tensor's rows, if they do not
    fill consecutive rows from `first_row` on. If `stacked` is not 0, the tensor has this number of
    matrices (or bias vectors), one per expert, and its rows are numbered through all of them.
    If `squeezed`, which is used with `transposed`, the tensor has a dimension of size 1 after its
    first dimension.
    """

    parameter: str
    first_row: int = 0
    num_rows: int | None = None
    transposed: bool = False
    twin: bool = False
    scale: bool = False
    runs: tuple[Run, ...] = ()
    stacked: int = 0
    squeezed: bool = False


def name_in_places(
    given: str, places: Mapping[str, Place], prefix: str, prefixes: Mapping[str, str]
) -> str:
    """Return the name that a checkpoint's tensor has in `places`, if there is any.

    The checkpoint's name may lack `prefix`. A start that is a key of `prefixes` is replaced.
    """
    theirs = next(filter(given.startswith, prefixes), "")
    name = prefixes.get(theirs, "") + given.removeprefix(theirs)
    return name if name in places else prefix + name


def filled_from_twins(places: Mapping[str, Place], names: Collection[str]) -> Mapping[str, Place]:
    """Return `places` in which a twin fills its parameter if no other tensor in `names` does."""
    filled = {places[name].parameter for name in names if not places[name].twin}
    twins = {places[n].parameter: n for n in names if places[n].parameter not in filled}
    return {
        name: replace(place, twin=False) if twins.get(place.parameter) == name else place
        for name, place in places.items()
        if place.twin or place.parameter not in twins
    }


def missing_hint(places: Mapping[str, Place], names: Collection[str]) -> str:
    """Return what to do if the tensors `names` are missing; "" if unknown."""
    if {places[name].parameter for name in names} != {"lm_head.weight"}:
        return ""
    return "; if the output matrix is the embedding, change tie_word_embeddings to true"


@dataclass(frozen=True, slots=True)
class Cut:
    """The part of a parameter that is kept: ranges of rows, and one range of columns."""

    rows: tuple[range, ...]
    columns: range | None = None  # None for a vector


def whole(shape: tuple[int, ...]) -> Cut:
    """Return the cut that keeps all of a parameter."""
    return Cut((range(shape[0]),), range(shape[1]) if len(shape) == 2 else None)


def kept_shape(cut: Cut) -> tuple[int, ...]:
    """Return the shape of the part that a cut keeps."""
    num_rows = sum(map(len, cut.rows))
    return (num_rows,) if cut.columns is None else (num_rows, len(cut.columns))


def runs(place: Place, shape: Sequence[int]) -> Sequence[Run]:
    """Return the runs of rows that are copied from a tensor to a parameter of `shape`."""
    if place.runs:
        return place.runs
    first = place.first_row
    num_rows = place.num_rows or shape[0] - first
    size = num_rows // max(1, place.stacked)
    return [Run(range(at, at + size), first + at) for at in range(0, num_rows, size)]


def expected_shapes(place: Place, shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the shapes that a checkpoint's tensor may have for a parameter of `shape`."""
    num_rows = sum(len(it.source) for it in runs(place, shape))
    whole_shape = (num_rows, *shape[1:])
    if place.scale:
        return [whole_shape, (1,), ()]
    stack = (place.stacked,) if place.stacked else ()
    each = (num_rows // max(1, place.stacked), *shape[1:])
    each = each[::-1] if place.transposed else each
    return [(each[0], 1, *each[1:]) if place.squeezed else (*stack, *each)]


def kept_parts(place: Place, cut: Cut, shape: tuple[int, ...]) -> list[Part]:
    """Return the parts of a tensor that are kept of a parameter with this shape."""
    found, row = [], 0
    for kept in cut.rows:
        for source, first, stored_transposed in runs(place, shape):
            rows = range(max(first, kept.start), min(first + len(source), kept.stop))
            if rows:
                own = source[rows.start - first : rows.stop - first]
                found.append(Part(own, row + rows.start - kept.start, stored_transposed))
        row += len(kept)
    return found
