"""Finds the matrices of a checkpoint that need not become floats.

If a file stores a matrix in the order in which matmuls read matrices, the matrix is mapped. Other
matrices are copied without conversion to floats, if the parameter's storage accepts their format.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple, cast

from gptmanager.kernels.gemm.int4_matrix import Int4Matrix
from gptmanager.kernels.gemm.packed_matrix import Matrix, PackedMatrix, Panels
from gptmanager.memory.checkpoint.tensor_sources import (
    CodedSource,
    GroupedSource,
    PanelSource,
    TensorSource,
)
from gptmanager.memory.places import Place


class MappedMatrix(NamedTuple):
    """The memory of a matrix in a source.

    `names` are the names of the matrix's tensors in the `places` of `mapped_matrices`.
    """

    names: list[str]
    panels: Panels


def mapped_matrices(
    source: TensorSource,
    names: Mapping[str, str],
    places: Mapping[str, Place],
    parameters: Collection[str],
) -> dict[str, MappedMatrix]:
    """Return the matrices among `parameters` that can be mapped from `source`, by parameter.

    `names` maps the name of each tensor in `places` to its name in the source. Later writes to a
    mapped matrix change private copies of the pages, not the file.
    """
    if not isinstance(source, PanelSource):
        return {}
    tensors: dict[str, list[str]] = {}
    for name in sorted(names, key=lambda name: places[name].first_row):
        if not places[name].twin:
            tensors.setdefault(places[name].parameter, []).append(name)
    found = {}
    for parameter in parameters:
        own = [places[name] for name in tensors[parameter]]
        if any(it.runs or it.stacked or it.transposed for it in own):
            continue  # loading changes the order of elements
        panels = source.panels([names[name] for name in tensors[parameter]])
        if panels is not None:
            found[parameter] = MappedMatrix(tensors[parameter], panels)
    return found


def packed_pieces(
    source: TensorSource, name: str, storage: Matrix, place: Place, max_bytes: int, rows: range
) -> Iterator[tuple[int, Any]] | None:
    """Return an iterator of (first index, slice) over `rows`, or None if only floats can be read.

    A slice is `Groups` or `PackedGroups` if the tensor has groups both in the source and in the
    storage, of the same kind. A slice is `Codes` if the source has codes and the storage is int8.
    """
    info = source.describe()[name]
    # the rows of a matrix are outputs, unless it is transposed; then its columns are outputs
    has_outputs = info.codes == ("columns" if place.transposed else "rows")
    if isinstance(storage, Int4Matrix):
        has_groups = has_outputs if info.codes else not place.transposed
        if info.groups != storage.kind or not has_groups:
            return None
        return cast(GroupedSource, source).groups(name, max_bytes, rows)
    if has_outputs and isinstance(storage, PackedMatrix) and storage.takes_codes:
        return cast(CodedSource, source).codes(name, max_bytes, rows)
    return None
