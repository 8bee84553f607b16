"""`GivenTensors`: finds the tensors of a quantized matrix, and checks their dtypes and shapes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn

from gptmanager.errors import ConfigError
from gptmanager.memory.checkpoint.safetensors_reader import FLOATS
from gptmanager.memory.checkpoint.tensor_sources import TensorInfo, tensor_name
from gptmanager.models.quantized.matrices import Grid, Read
from gptmanager.models.quantized.scheme_fields import Block

SCALES = {*FLOATS.values(), "float8_e4m3fn", "float8_e8m0fnu", "uint8"}  # dtypes of scales


class GivenTensors:
    """The tensors of a checkpoint. `used` has the names of those that were taken."""

    def __init__(self, given: Mapping[str, TensorInfo], read: Read) -> None:
        self._given, self._read = given, read
        self.used: set[str] = set()

    def _take(
        self, name: str, dtypes: str | Collection[str], *shapes: tuple[int, ...]
    ) -> TensorInfo:
        """Return the info of a tensor, and add its name to `used`.

        Raises ConfigError if the tensor is missing, or has another dtype or shape.
        """
        info = self._given.get(name)
        if info is None:
            self._missing(name)
        allowed = {dtypes} if isinstance(dtypes, str) else dtypes
        if info.dtype not in allowed or (shapes and info.shape not in shapes):
            wanted = " or ".join(map(str, map(list, shapes)))
            raise ConfigError(
                f"tensor {tensor_name(name)} is {info.dtype} {list(info.shape)}: it must be "
                f"{' or '.join(sorted(allowed))} {wanted}".rstrip()
            )
        self.used.add(name)
        return info

    def _missing(self, name: str) -> NoReturn:
        raise ConfigError(f"tensor {tensor_name(name)} is missing: a quantized matrix needs it")

    def _matrix_shape(self, name: str, info: TensorInfo, dtype: str = "") -> tuple[int, int]:
        """Return the shape of a tensor. Raises ConfigError if it is not a matrix of `dtype`."""
        if len(info.shape) != 2 or 0 in info.shape or (dtype and info.dtype != dtype):
            raise ConfigError(
                f"tensor {tensor_name(name)} is {info.dtype} {list(info.shape)}: it must be "
                f"{dtype or info.dtype} [rows, columns]"
            )
        rows, columns = info.shape
        return rows, columns

    def _grid(
        self,
        name: str,
        shape: tuple[int, int],
        blocks: Sequence[Block],
        bits: int = 0,
        dtypes: Collection[str] = SCALES,
    ) -> Grid:
        """Return the tensor `name`, `[blocks of rows, blocks of columns]`, as a grid over a matrix.

        `shape`: the shape of the matrix. `blocks`: the allowed block sizes (rows, columns), in
        addition to whole rows and the whole matrix. `bits`: see `Grid`. Raises ConfigError for a
        tensor that does not fit.
        """
        info = self._take(name, "int32" if bits else dtypes)
        return self._fitted(name, info.shape, shape, blocks, bits)

    def _fitted(
        self,
        name: str,
        stored: tuple[int, ...],
        shape: tuple[int, ...],
        blocks: Sequence[Block],
        bits: int = 0,
    ) -> Grid:
        """Return the grid of a tensor of the shape `stored`; see `_grid`."""
        rows, columns = shape
        given = stored if len(stored) > 1 else (*stored, 1, 1)[:2]
        if len(stored) == 4 and stored[1::2] == (1, 1):  # ModelOpt's scales of blocks
            given = stored[::2]
        fitting = {
            (min(height, rows), min(width, columns))
            for height, width in [(rows, columns), (1, columns), *blocks]
            if given
            == (
                ceil_div(ceil_div(rows * bits, 32) if bits else rows, height),
                ceil_div(columns, width),
            )
        }
        if len(fitting) != 1 or (bits and len(stored) != 2):
            raise ConfigError(
                f"tensor {tensor_name(name)} has shape {list(stored)}: it must have a number "
                f"for each block of a matrix of {list(shape)}; a block is a row, the whole matrix, "
                f"or one of these (rows, columns): {[*blocks]}"
            )
        [(height, width)] = fitting
        return Grid(name, stored, height, width, bits=bits)


def ceil_div(count: int, size: int) -> int:
    """Return how many parts of `size` hold `count` elements."""
    return -(-count // size)
