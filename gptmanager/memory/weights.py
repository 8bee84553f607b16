"""`Weights`: a model's parameters, in storage that is owned here and filled by tensor name.

Decides how a tensor reaches its storage: whole, or as rows of a fused parameter, transposed or
not, converted to the storage's dtype while it is copied. The storage never moves: a parameter that
somebody holds has the values that are loaded later. Knows nothing of models: `Place`s tell which
tensor belongs where.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from gptmanager.config import ProgressCallback
from gptmanager.errors import ConfigError
from gptmanager.kernels.packed_matrix import Matrix, PackedMatrix
from gptmanager.memory.checkpoint_files import told
from gptmanager.memory.cpu_memory import free_memory_bytes
from gptmanager.memory.tensor_sources import (
    FLOATS,
    StateDict,
    TensorInfo,
    TensorSource,
    tensor_name,
)

_MIN_PIECE_BYTES = 1 << 20

NewMatrix = Callable[[int, int, torch.dtype, bool], PackedMatrix | None]


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor of a checkpoint goes.

    It fills `num_rows` rows of `parameter` from `first_row` on (None: all). `transposed`:
    the checkpoint holds the transpose. `twin`: another tensor fills this storage (tied
    embeddings); this one may be missing, and where it is present it must be equal. `scale`: one
    number for all of the rows, or one for each, kept as float32; it may be missing, which means 1.
    """

    parameter: str
    first_row: int = 0
    num_rows: int | None = None
    transposed: bool = False
    twin: bool = False
    scale: bool = False


class Weights:
    """Parameters by our names, filled from tensors by the checkpoint's names.

    `places` says where each tensor goes; its name may come with `prefix` or without. Tensors
    whose name matches `ignored` are passed over; any other that has no place is an error.
    The first `load` makes the storage: tensors, and for those in `matrices` what
    `new_matrix(rows, columns, dtype, quantized)` returns, if it is not None.
    `version` counts the loads, so that what was computed with older weights can be told apart.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        places: Mapping[str, Place],
        *,
        prefix: str = "",
        ignored: re.Pattern[str] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        matrices: Collection[str] = (),
        new_matrix: NewMatrix = lambda *_: None,
        quantized: bool = False,
    ) -> None:
        self.version = 0
        self._shapes = shapes
        self._places = places
        self._prefix = prefix
        self._ignored = ignored
        self._dtype, self._device = dtype, device
        self._matrices, self._new_matrix = frozenset(matrices), new_matrix
        self._quantized = quantized
        self._storage: dict[str, Matrix] = {}

    def __getitem__(self, name: str) -> Matrix:
        return self._storage[name]

    def tensor(self, name: str) -> Tensor:
        """`self[name]`, which is no packed matrix."""
        return cast(Tensor, self._storage[name])

    @property
    def matrices(self) -> list[Matrix]:
        """Those of products."""
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
        """Copy tensors into their storage, converting the dtype; the storage stays where it is.

        `partial`: tensors may be missing once all were loaded; what they fill is left as it is.
        `on_progress`: is told "weights", the bytes that are copied, and those that will be.
        `ConfigError` names the tensors that are missing, unknown, double, misshapen, not of a
        floating dtype, the bytes that there is no memory for (nothing is allocated or copied then),
        or the tensor that is not equal to its twin.
        """
        source = StateDict(tensors) if isinstance(tensors, Mapping) else tensors
        found = source.describe()
        names = self._names(found)
        if not (partial and self.version):
            optional = {name for name, place in self._places.items() if place.twin or place.scale}
            _refuse("tensors are missing", self._places.keys() - names.keys() - optional)
        for name, given in names.items():
            _check(given, found[given], *self._expected_shapes(self._places[name]))
        scales = {place.parameter for place in self._places.values() if place.scale}
        if not self._storage:
            self._allocate(scales)
        if not (partial and self.version):
            for name in scales:
                self.tensor(name).fill_(1)
        self._copy_all(source, names, on_progress)
        self.version += 1

    def _allocate(self, scales: Collection[str]) -> None:
        dtypes = {n: torch.float32 if n in scales else self._dtype for n in self._shapes}
        sizes = {n: dtypes[n].itemsize for n in self._shapes}
        if self._quantized:
            sizes |= dict.fromkeys(self._matrices, 1)
        needed = sum(math.prod(shape) * sizes[n] for n, shape in self._shapes.items())
        on_cpu = torch.device(self._device).type == "cpu"
        free = free_memory_bytes() if on_cpu else math.inf  # a device says itself what it has
        try:
            if needed > free:
                raise MemoryError(f"{free} bytes are free")
            self._storage = {
                name: self._new(name, shape, dtypes[name]) for name, shape in self._shapes.items()
            }
        except (RuntimeError, MemoryError) as error:  # torch has both
            raise ConfigError(
                f"no memory for weights of {needed} bytes in {self._dtype}: {told(error)}"
            ) from error

    def _new(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Matrix:
        packed = None
        if name in self._matrices:
            num_rows, num_columns = shape
            packed = self._new_matrix(num_rows, num_columns, dtype, self._quantized)
        if packed is not None:
            return packed
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _copy_all(
        self,
        source: TensorSource,
        names: Mapping[str, str],
        on_progress: ProgressCallback | None,
    ) -> None:
        # twins are compared, so what they are compared with must be there
        order = sorted(names, key=lambda name: self._places[name].twin)
        total = sum(self._nbytes(self._places[name]) for name in names)
        max_bytes = max(_MIN_PIECE_BYTES, self.nbytes // 16)
        done = 0
        with torch.no_grad():
            for name in order:
                place = self._places[name]
                # a row that is quantized is seen whole
                in_one = self._quantized and place.transposed
                for start, piece in source.pieces(names[name], total if in_one else max_bytes):
                    self._copy(names[name], place, start, piece)
                    done += piece.numel() * self._dtype.itemsize
                    if on_progress is not None:
                        on_progress("weights", done, total)

    def _names(self, given_names: Iterable[str]) -> dict[str, str]:
        """The places' names -> the names as given."""
        names: dict[str, str] = {}
        unknown = []
        for given in given_names:
            name = given if given in self._places else self._prefix + given
            if name in names:
                raise ConfigError(f"tensor {name} is there twice: as {names[name]} and as {given}")
            if name in self._places:
                names[name] = given
            elif self._ignored is None or not self._ignored.search(given):
                unknown.append(given)
        _refuse("tensors are unknown", unknown)
        return names

    def _expected_shapes(self, place: Place) -> list[tuple[int, ...]]:
        shape = self._shapes[place.parameter]
        num_rows = shape[0] - place.first_row if place.num_rows is None else place.num_rows
        shape = (num_rows, *shape[1:])
        if place.scale:
            return [shape, (1,), ()]
        return [shape[::-1] if place.transposed else shape]

    def _nbytes(self, place: Place) -> int:
        itemsize = self._storage[place.parameter].dtype.itemsize
        return math.prod(self._expected_shapes(place)[0]) * itemsize

    def _copy(self, name: str, place: Place, start: int, piece: Tensor) -> None:
        """`piece`: the rows from `start` on of the tensor as the checkpoint has it."""
        if place.scale:
            if not (piece.isfinite() & (piece > 0)).all():
                raise ConfigError(f"tensor {name} holds {piece.tolist()}: scales are positive")
            self.tensor(place.parameter)[place.first_row :][: place.num_rows].copy_(piece)
            return
        row, column = place.first_row + start, 0
        if place.transposed:
            piece, row, column = piece.t(), place.first_row, start
        storage, is_equal = self._storage[place.parameter], True
        if isinstance(storage, PackedMatrix):
            if place.twin:
                is_equal = storage.holds(piece, row, column)
            else:
                storage.copy_(piece, row, column)
        else:
            region = storage[row : row + len(piece)]
            if piece.dim() == 2:
                region = region[:, column : column + piece.shape[1]]
            if place.twin:
                is_equal = torch.equal(region, piece.to(region))
            else:
                region.copy_(piece)
        if not is_equal:
            raise ConfigError(
                f"tensor {name} differs from {place.parameter}, to which the config ties it "
                "(tie_word_embeddings)"
            )


def _check(name: str, found: TensorInfo, *expected: tuple[int, ...]) -> None:
    if found.shape not in expected:
        wanted = " or ".join(str(list(shape)) for shape in expected)
        raise ConfigError(
            f"tensor {name} has shape {list(found.shape)}, the config asks for {wanted}"
        )
    if found.dtype not in FLOATS.values():
        needed = ", ".join(FLOATS.values())
        raise ConfigError(f"tensor {name} has dtype {found.dtype}; needed is one of {needed}")


def _refuse(what: str, names: Collection[str]) -> None:
    if names:
        first = ", ".join(tensor_name(name) for name in sorted(names)[:8])
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        raise ConfigError(f"{what}: {first}{more}")
