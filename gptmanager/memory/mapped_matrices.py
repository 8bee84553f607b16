"""Finds the matrices that a file stores in the order in which matmuls read them.

Such matrices are mapped instead of loaded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from gptmanager.kernels.gemm.packed_matrix import Panels
from gptmanager.memory.places import Place
from gptmanager.memory.tensor_sources import PanelSource, TensorSource


class MappedMatrix(NamedTuple):
    """The memory of a matrix in a source. `names` are the library's names of its tensors."""

    names: list[str]
    panels: Panels


def mapped_matrices(
    source: TensorSource,
    names: Mapping[str, str],
    places: Mapping[str, Place],
    parameters: Collection[str],
) -> dict[str, MappedMatrix]:
    """Return those matrices of `parameters` that can be mapped from `source`, by parameter.

    `places` has the place of each tensor by the library's name, and `names` maps this name to the
    source's. Later writes to the memory change private copies of its pages, not the file.
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
