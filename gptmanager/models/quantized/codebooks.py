"""Describe the 4-bit matrices (NF4 and FP4) of bitsandbytes, and check their tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor

from gptmanager.errors import ConfigError, quoted
from gptmanager.memory.checkpoint.tensor_sources import TensorInfo, tensor_name
from gptmanager.memory.checkpoint.untrusted_files import parse_object
from gptmanager.models.quantized.matrices import (
    LIMIT,
    CodebookMatrix,
    NestedScales,
    Read,
    check_scales,
)

_STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
# The dtypes of floats that `bnb_4bit_quant_storage` allows for packed elements -> their bytes.
_STORED = {"bfloat16": 2, "float16": 2, "float32": 4}
_MAX_STATE_BYTES = 1 << 16
_CODES, _NESTED_CODES = 16, 256
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
Take = Callable[..., TensorInfo]


def codebook_matrix(
    name: str, given: Mapping[str, TensorInfo], take: Take, read: Read
) -> CodebookMatrix:
    """Describe the matrix with the packed elements in the tensor `name`.

    `given` has the tensors of the checkpoint by name. `take(tensor, dtype, shape)` checks that a
    tensor exists and has this dtype and shape, and returns its `TensorInfo`. `read(tensor)` returns
    the values of a tensor. Raises ConfigError if a tensor of the matrix is missing or does not fit.
    """
    state_name = name + next((it for it in _STATES if name + it in given), _STATES[0])
    state = _State(state_name, take, read)
    rows, columns = state.shape()
    count = rows * columns
    stored = given[name].dtype if given[name].dtype in _STORED else "uint8"
    size = _STORED.get(stored, 1)
    take(name, stored, (-(-count // (2 * size)), 1))
    take(f"{name}.quant_map", "float32", (_CODES,))
    block = state.size("blocksize", _BLOCKS)
    blocks = -(-count // block)
    table = read(f"{name}.quant_map")
    check_scales(f"{name}.quant_map", table)
    nested = _nested(name, state, blocks, take, read)
    if nested is not None:
        return CodebookMatrix(name, (rows, columns), table, block, nested, size)
    take(f"{name}.absmax", "float32", (blocks,))
    return CodebookMatrix(name, (rows, columns), table, block, _Plain(f"{name}.absmax"), size)


def has_codebook(name: str, given: Mapping[str, TensorInfo]) -> bool:
    """Return whether the tensor `name` may have packed elements: it is not a matrix of floats."""
    return given[name].dtype not in _STORED or any(name + it in given for it in _STATES)


def _nested(name: str, state: _State, blocks: int, take: Take, read: Read) -> NestedScales | None:
    """Return the scales of a matrix if they are quantized too ("double quantization"), or None.

    `blocks` is the number of blocks of the matrix; each has one scale.
    """
    if not state.has("nested_blocksize"):
        return None
    block = state.size("nested_blocksize")
    take(f"{name}.absmax", "uint8", (blocks,))
    take(f"{name}.nested_absmax", "float32", (-(-blocks // block),))
    take(f"{name}.nested_quant_map", "float32", (_NESTED_CODES,))
    outer, values = (read(f"{name}.nested_{it}") for it in ("absmax", "quant_map"))
    return NestedScales(f"{name}.absmax", outer, values, block, state.number("nested_offset"))


class _Plain:
    """Scales that are stored as float32. A call returns the scales of a range of blocks."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, read: Read, blocks: range) -> Tensor:
        return read(self._name, blocks)


class _State:
    """The quantization state of a matrix: a JSON object that bitsandbytes stores in a uint8 tensor.

    The methods except `has` raise ConfigError if a field is missing or invalid.
    """

    def __init__(self, name: str, take: Take, read: Read) -> None:
        info = take(name, "uint8")
        self._name = name
        if len(info.shape) != 1 or info.shape[0] > _MAX_STATE_BYTES:
            raise ConfigError(
                f"tensor {tensor_name(name)} has shape {list(info.shape)}: it must hold at most "
                f"{_MAX_STATE_BYTES} bytes of JSON"
            )
        self._values = parse_object(f"tensor {tensor_name(name)}", bytes(read(name).tolist()))

    def has(self, field: str) -> bool:
        return field in self._values

    def shape(self) -> tuple[int, int]:
        given = self._values.get("shape")
        if not isinstance(given, list) or len(given) != 2:
            raise self._error("shape", "must be [rows, columns]")
        rows, columns = (self._positive("shape", size) for size in given)
        return rows, columns

    def size(self, field: str, allowed: Collection[int] = ()) -> int:
        found = self._positive(field, self._values.get(field))
        if allowed and found not in allowed:
            raise self._error(field, f"must be one of {[*allowed]}")
        return found

    def number(self, field: str) -> float:
        value = self._values.get(field)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._error(field, "must be a number")
        if not abs(value) < LIMIT:
            raise self._error(field, f"its magnitude must be less than {LIMIT:g}")
        return float(value)

    def _positive(self, field: str, value: Any) -> int:
        if type(value) is not int or not 1 <= value <= 2**31 - 1:
            raise self._error(field, "sizes must be integers from 1 to 2147483647")
        return value

    def _error(self, field: str, need: str) -> ConfigError:
        value = quoted(self._values.get(field))
        return ConfigError(f"tensor {tensor_name(self._name)}: {field} = {value}: {need}")
