"""`Weights`: a model's parameters, in storage that is filled from a checkpoint.

The storage never moves, so later loads change the values of a parameter in place. A `Place` says
which parameter a tensor belongs to, and `TensorCopies` copies the tensor there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor

from gptmanager.config import ProgressCallback
from gptmanager.environment.machine.memory import free_memory_bytes
from gptmanager.errors import ConfigError, error_summary
from gptmanager.kernels.gemm.int4_groups import CODEBOOKS, GROUP
from gptmanager.kernels.gemm.packed_matrix import Matrix, PackedMatrix, Quantized, stored
from gptmanager.memory.checkpoint.tensor_sources import StateDict, TensorInfo, TensorSource
from gptmanager.memory.places import (
    Cut,
    Place,
    expected_shapes,
    filled_from_twins,
    kept_shape,
    missing_hint,
    name_in_places,
    whole,
)
from gptmanager.memory.stored_matrices import MappedMatrix, mapped_matrices
from gptmanager.memory.tensor_checks import check_tensor, check_values, refuse_tensors
from gptmanager.memory.tensor_copies import MIN_PIECE_BYTES, TensorCopies

NewMatrix = Callable[[int, int, torch.dtype, Quantized | None], PackedMatrix | None]
# bytes per element
_BYTES = {"int8": 1.0, "fp8": 1.0, **dict.fromkeys(("int4", *CODEBOOKS), 0.5 + 2 / GROUP)}


class Weights:
    """The parameters of a model, by our names, filled from the tensors of a checkpoint.

    `places` maps the names of a checkpoint's tensors, which may be one of several sets of names, to
    the destinations of all tensors by name. A name in the checkpoint may lack `prefix`. If the name
    begins with a key of `prefixes`, the key is replaced by its value. Tensors without a place are
    skipped if their names match `ignored`; otherwise they are an error.
    Parameters in `wide` are kept in float32 at least, and matrices in `quantized` in fewer bits.
    Matrices in `quantized` that have groups of a kind in `kept_groups` in the first source keep
    them. Embeddings in `lookups` are kept in the given format if the first source has them in fewer
    bits than floats. `cuts` has the part to keep of each parameter; by default, all are kept whole.
    `shapes` and `places` describe whole parameters. The first `load` allocates the storage. A
    parameter in `matrices` is stored in the result of `new_matrix(rows, columns, dtype,
    quantized)`, or in a tensor if this result is None. `as_source` returns a source of the tensors
    of a mapping, such as an update. `version` counts the loads, so that results of older weights
    can be recognized.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        places: Callable[[Collection[str]], Mapping[str, Place]],
        *,
        prefix: str = "",
        prefixes: Mapping[str, str] = MappingProxyType({}),
        ignored: re.Pattern[str] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        matrices: Collection[str] = (),
        new_matrix: NewMatrix = lambda *_: None,
        quantized: Mapping[str, Quantized] = MappingProxyType({}),
        lookups: Mapping[str, Quantized] = MappingProxyType({}),
        kept_groups: Collection[Quantized] = (),
        wide: Collection[str] = (),
        cuts: Mapping[str, Cut] | None = None,
        as_source: Callable[[Mapping[str, Tensor]], TensorSource] = StateDict,
    ) -> None:
        self.version = 0
        self._shapes = shapes
        self._cuts = {n: whole(shape) for n, shape in shapes.items()} if cuts is None else cuts
        self._find_places, self._places = places, places(())
        self._as_source = as_source
        self._prefix, self._prefixes = prefix, prefixes
        self._ignored = ignored
        self._dtype, self._device = dtype, device
        self._matrices, self._new_matrix = frozenset(matrices), new_matrix
        self._wide = frozenset(wide)
        self._quantized, self._kept_groups = quantized, kept_groups
        self._lookups = lookups
        self._storage: dict[str, Matrix] = {}
        self._mapped: list[str] = []  # matrices that are mapped from a file, and not changed since

    def __getitem__(self, name: str) -> Matrix:
        return self._storage[name]

    def tensor(self, name: str) -> Tensor:
        """Return `self[name]`, which must not be a packed matrix."""
        return cast(Tensor, self[name])

    @property
    def matrices(self) -> list[Matrix]:
        """The stored matrices that matmuls use."""
        return [self._storage[name] for name in self._storage if name in self._matrices]

    def __contains__(self, name: str) -> bool:
        return name in self._storage

    def __iter__(self) -> Iterator[str]:
        return iter(self._storage)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._storage.values())

    def load(
        self,
        tensors: TensorSource | Mapping[str, Tensor],
        *,
        partial: bool = False,
        on_progress: ProgressCallback | None = None,
    ) -> None:
        """Copy tensors into their storage and convert the dtype. The storage does not move.

        If `partial`, and a load has been completed before, tensors may be missing; the storage of
        missing tensors is not changed.
        `on_progress` is called with "weights", the bytes copied so far, and all bytes to copy.
        Raises ConfigError, with their names, for tensors that are missing, unknown, duplicated, of
        a wrong shape, not of a floating dtype, or different from the parameter that they are tied
        to, and for scales that are not positive. Raises ConfigError before anything is copied if
        memory does not suffice.
        """
        source = self._as_source(tensors) if isinstance(tensors, Mapping) else tensors
        found = source.describe()
        names = self.check(source, partial=partial)
        scales = self._cuts.keys() & {it.parameter for it in self._places.values() if it.scale}
        self._mapped = []
        if not self._storage:
            self._quantized = {**self._quantized, **self._quantized_lookups(names, found)}
            self._quantized = {**self._quantized, **self._in_groups(names, found)}
            packed = self._matrices | self._quantized.keys()
            cuts = {name: self._cuts[name] for name in packed & self._cuts.keys()}
            kept_whole = [n for n, cut in cuts.items() if kept_shape(cut) == self._shapes[n]]
            panels = mapped_matrices(source, names, self._places, kept_whole)
            self._mapped = self._allocate(scales, panels)
            for parameter in self._mapped:
                for name in panels[parameter].names:
                    del names[name]
        if not (partial and self.version):
            for name in scales:
                self.tensor(name).fill_(1)
        max_bytes = max(MIN_PIECE_BYTES, self.nbytes // 16)
        self._copies(source).copy_all(names, max_bytes, on_progress)
        self.version += 1

    def memory(self, *, keeps: bool) -> tuple[list[Tensor], list[Tensor]]:
        """Return the tensors of all parameters, and the tensors to save before memory is released.

        If `keeps`, all parameters that are not mapped from a file are saved, otherwise the scales.
        """
        of = {name: stored(matrix) for name, matrix in self._storage.items()}
        scales = of.keys() & {it.parameter for it in self._places.values() if it.scale}
        names = of.keys() - {*self._mapped} if keeps else scales
        return [it for own in of.values() for it in own], [it for n in names for it in of[n]]

    def check(
        self, tensors: TensorSource | Mapping[str, Tensor], *, partial: bool = False
    ) -> dict[str, str]:
        """Check names, shapes and dtypes as `load` does. Return name in `places` -> given name."""
        source = self._as_source(tensors) if isinstance(tensors, Mapping) else tensors
        found = source.describe()
        names = self.names(found, partial=partial and self.version > 0)
        for name, given in names.items():
            place = self._places[name]
            check_tensor(
                given, found[given], *expected_shapes(place, self._shapes[place.parameter])
            )
        return names

    def check_values(self, tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
        """Check scales and tied tensors as `load` does; `names` is what `check` has returned."""
        source = self._as_source(tensors)
        copies = self._copies(source)
        for name in check_values(source, names, self._places, self._dtype):
            copies.copy(names[name], name)

    def is_twin(self, given: str) -> bool:
        """Return whether a tensor is only compared with the parameter that it is tied to."""
        name = self._own_name(given)
        return name in self._places and self._places[name].twin

    def _copies(self, source: TensorSource) -> TensorCopies:
        given = self._places, self._storage, self._shapes, self._cuts, self._quantized
        return TensorCopies(source, *given)

    def _quantized_lookups(
        self, names: Mapping[str, str], found: Mapping[str, TensorInfo]
    ) -> dict[str, Quantized]:
        """Return the formats of the embeddings that the source has in fewer bits than floats."""
        own = {self._places[name].parameter for name, it in names.items() if found[it].quantized}
        return {name: kind for name, kind in self._lookups.items() if name in own}

    def _in_groups(
        self, names: Mapping[str, str], found: Mapping[str, TensorInfo]
    ) -> dict[str, Quantized]:
        """Return the kind of groups that all tensors of a quantized matrix have, if it is kept."""
        kinds: dict[str, set[Quantized | None]] = {}
        for name, own in names.items():
            kinds.setdefault(self._places[name].parameter, set()).add(found[own].groups)
        return {
            name: kind
            for name in self._quantized
            for kind in self._kept_groups
            if kinds.get(name) == {kind}
        }

    def _allocate(self, scales: Collection[str], panels: Mapping[str, MappedMatrix]) -> list[str]:
        """Allocate the storage. Return the names of the matrices that are mapped from `panels`."""
        shapes = {name: kept_shape(cut) for name, cut in self._cuts.items()}
        wide = {*scales} if self._dtype is torch.float64 else {*scales, *self._wide}
        dtypes = {n: torch.float32 if n in wide else self._dtype for n in shapes}
        sizes = {n: float(dtypes[n].itemsize) for n in shapes}
        sizes |= {n: _BYTES[kind] for n, kind in self._quantized.items()}
        needed = int(sum(math.prod(shape) * sizes[n] for n, shape in shapes.items()))
        # On a device, torch itself raises an error if memory does not suffice.
        free = free_memory_bytes() if torch.device(self._device).type == "cpu" else math.inf
        adopted: list[str] = []
        try:
            if needed > free:
                raise MemoryError(f"{free:.0f} bytes are free")
            for name, shape in shapes.items():
                matrix = self._storage[name] = self._new(name, shape, dtypes[name])
                if name in panels and isinstance(matrix, PackedMatrix):
                    if matrix.adopt(panels[name].panels):
                        adopted.append(name)
        except (RuntimeError, MemoryError) as error:  # torch raises either of them
            self._storage = {}
            raise ConfigError(
                f"no memory for weights of {needed} bytes in {self._dtype}: {error_summary(error)}"
            ) from error
        return adopted

    def _new(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Matrix:
        packed = None
        if name in self._matrices or name in self._quantized:
            packed = self._new_matrix(shape[0], shape[1], dtype, self._quantized.get(name))
        if packed is not None:
            return packed
        return torch.empty(shape, dtype=dtype, device=self._device)

    def names(self, given_names: Collection[str], *, partial: bool = False) -> dict[str, str]:
        """Find the places for these names, and return name in `places` -> given name.

        Raises ConfigError for unknown names and, unless `partial`, for missing tensors.
        """
        self._places = self._find_places(given_names)
        names: dict[str, str] = {}
        unknown = []
        for given in given_names:
            name = self._own_name(given)
            if name in names:
                raise ConfigError(f"tensor {name} occurs twice: as {names[name]} and as {given}")
            if name in self._places:
                names[name] = given
            elif self._ignored is None or not self._ignored.search(given):
                unknown.append(given)
        refuse_tensors("tensors are unknown", unknown)
        if not partial:
            self._places = filled_from_twins(self._places, names)
            optional = {name for name, it in self._places.items() if it.twin or it.scale}
            missing = self._places.keys() - names.keys() - optional
            refuse_tensors("tensors are missing", missing, missing_hint(self._places, missing))
        return names

    def _own_name(self, given: str) -> str:
        return name_in_places(given, self._places, self._prefix, self._prefixes)
