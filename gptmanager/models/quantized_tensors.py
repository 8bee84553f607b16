"""Checkpoints with matrices in 8 or 4 bits, as `convert` writes them.

The names are those of compressed-tensors. In 8 bits (int-quantized) a matrix has its own name, and
its float32 scales `[rows, 1]` are `<module>.weight_scale`. In 4 bits (pack-quantized) the values,
eight in an int32, are `<module>.weight_packed`; the float16 scales of groups of 32 are
`<module>.weight_scale`, and `<module>.weight_shape` is the shape. Minima, which a file of llama.cpp
may have, are `<module>.weight_minimum`: a name of our own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptmanager.errors import ConfigError, quoted
from gptmanager.kernels.gemm.int4_groups import GROUP, MIDDLE, Groups
from gptmanager.kernels.gemm.packed_matrix import Quantized
from gptmanager.memory.safetensors_reader import FLOATS
from gptmanager.memory.tensor_sources import TensorInfo, TensorSource, tensor_name

FIELD = "quantization_config"
LAYOUT_VERSIONS: Mapping[Quantized, int] = {"int8": 1, "int4": 2}
SCALE, PACKED, SHAPE, MINIMUM = (
    "_scale",
    "_packed",
    "_shape",
    "_minimum",
)  # suffixes of a matrix's name
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_INT4 = {**_INT8, "num_bits": 4, "strategy": "group", "group_size": GROUP}
_HEAD = ["re:.*embed_tokens", "re:.*wte", "re:.*lm_head"]
_TEMPORARIES = 2
_PER_INT = 8  # values in an int32


def quantization_config(kind: Quantized) -> dict[str, Any]:
    """Return the value of `quantization_config` in a config.json."""
    group: dict[str, Any] = {
        "targets": ["Linear"],
        "weights": dict(_INT8),
        "input_activations": None,
    }
    groups = {"group_0": group}
    if kind == "int4":
        own = {**group, "weights": dict(_INT4), "format": "pack-quantized"}
        groups = {"group_0": own, "group_1": {**group, "targets": _HEAD, "format": "int-quantized"}}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if kind == "int8" else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [],
        "gptmanager_layout": LAYOUT_VERSIONS[kind],
    }


def without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config without its quantization, as for a checkpoint of floats.

    Any other config is returned unchanged. Raises ConfigError for another layout version.
    """
    own = config.get(FIELD)
    if not isinstance(own, dict) or "gptmanager_layout" not in own:
        return config
    if all(own != quantization_config(kind) for kind in LAYOUT_VERSIONS):
        raise ConfigError(
            f"config.json: {FIELD} = {quoted(own)}: not a layout of this version; convert the "
            "checkpoint again"
        )
    return {field: value for field, value in config.items() if field != FIELD}


class QuantizedTensors:
    """A `GroupedSource` of floats over matrices of integers and their scales.

    Raises ConfigError if the scales of a matrix are missing or have another shape.
    """

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._given = source.describe()
        self._found: dict[str, TensorInfo] = {}
        self._scaled: set[str] = set()
        used: set[str] = set()
        for name, info in self._given.items():
            if info.dtype == "int8":
                self._found[name] = self._in_bytes(name, info)
                self._scaled.add(name)
                used.add(name + SCALE)
            elif info.dtype == "int32" and name.endswith(PACKED):
                own = name.removesuffix(PACKED)
                self._found[own] = self._in_groups(own, info)
                used |= {name, own + SCALE, own + SHAPE, own + MINIMUM}
        self._found |= {n: it for n, it in self._given.items() if n not in used | self._scaled}

    def _in_bytes(self, name: str, info: TensorInfo) -> TensorInfo:
        scales = self._given.get(name + SCALE)
        if len(info.shape) != 2 or scales is None or scales.shape != (*info.shape[:1], 1):
            raise ConfigError(
                f"tensor {tensor_name(name)} is int8 {list(info.shape)}: it must be a matrix "
                f"with the scales {tensor_name(name + SCALE)}, one per row"
            )
        if scales.dtype not in FLOATS.values():
            raise ConfigError(f"tensor {tensor_name(name + SCALE)} does not hold floats")
        return TensorInfo(info.shape, "float32")

    def _in_groups(self, name: str, info: TensorInfo) -> TensorInfo:
        shape = self._shape(name)
        rows, columns = shape
        groups = (rows, -(-columns // GROUP)), "float16"
        scales, minima = (self._given.get(name + end) for end in (SCALE, MINIMUM))
        fits = info.shape == (rows, -(-columns // _PER_INT)) and scales is not None
        if not fits or any(it is not None and it[:2] != groups for it in (scales, minima)):
            raise ConfigError(
                f"tensor {tensor_name(name + PACKED)} is int32 {list(info.shape)}: a matrix of "
                f"{list(shape)} in 4 bits needs eight values in an integer, and the float16 scales "
                f"{tensor_name(name + SCALE)}, one for each {GROUP} of them"
            )
        return TensorInfo(shape, "float32", True)

    def _shape(self, name: str) -> tuple[int, int]:
        found = self._given.get(name + SHAPE)
        if found is None or found[:2] != ((2,), "int64"):
            raise ConfigError(
                f"tensor {tensor_name(name + PACKED)} needs {tensor_name(name + SHAPE)}, two int64"
            )
        [(_, shape)] = self._source.pieces(name + SHAPE, 1 << 62)
        rows, columns = shape.tolist()
        return rows, columns

    def describe(self) -> Mapping[str, TensorInfo]:
        return self._found

    def pieces(
        self, name: str, max_bytes: int, region: Sequence[range] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        if self._found[name].in_groups:
            rows, columns = region or map(range, self._found[name].shape)
            for start, groups in self.groups(name, max_bytes // _TEMPORARIES, rows):
                yield start, groups.floats()[:, columns.start : columns.stop]
        elif name in self._scaled:
            [(_, scales)] = self._source.pieces(name + SCALE, 1 << 62)
            scales = scales.float().clone()  # copied, because later reads may unmap it
            first = region[0].start if region else 0
            # each int8 byte becomes a float32, and conversion needs temporary arrays
            own_bytes = max_bytes // (4 * _TEMPORARIES)
            for start, piece in self._source.pieces(name, own_bytes, region):
                rows_of = slice(first + start, first + start + len(piece))
                yield start, piece.float().mul_(scales[rows_of])
        else:
            yield from self._source.pieces(name, max_bytes, region)

    def groups(self, name: str, max_bytes: int, rows: range) -> Iterator[tuple[int, Groups]]:
        columns = self._found[name].shape[1]
        scales = self._rows(name + SCALE, rows)
        minima = self._rows(name + MINIMUM, rows) if name + MINIMUM in self._given else None
        # eight floats of 4 bytes for each int32
        region = [rows, range(-(-columns // _PER_INT))]
        for start, piece in self._source.pieces(name + PACKED, max_bytes // _PER_INT, region):
            own = slice(start, start + len(piece))
            values = unpacked_values(piece, columns)
            yield start, Groups(values, scales[own], None if minima is None else minima[own])

    def _rows(self, name: str, rows: range) -> Tensor:
        region = [rows, range(self._given[name].shape[1])]
        return torch.cat([it.clone() for _, it in self._source.pieces(name, 1 << 24, region)])

    def close(self) -> None:
        self._source.close()


class Part(NamedTuple):
    """A tensor that a quantized matrix is written as: its end of the name, shape and dtype."""

    end: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def written_parts(
    kind: Quantized, shape: tuple[int, ...], has_minima: bool = False
) -> Sequence[Part]:
    """Return the tensors that a matrix is written as."""
    rows, columns = shape
    if kind == "int8":
        return Part("", shape, torch.int8), Part(SCALE, (rows, 1), torch.float32)
    groups = rows, -(-columns // GROUP)
    parts = [
        Part(PACKED, (rows, -(-columns // _PER_INT)), torch.int32),
        Part(SCALE, groups, torch.float16),
        Part(SHAPE, (2,), torch.int64),
    ]
    return [*parts, Part(MINIMUM, groups, torch.float16)] if has_minima else parts


def packed_values(values: Tensor) -> Tensor:
    """Return uint8 `[n, columns]` as int32 `[n, columns / 8]`, the first in the lowest bits."""
    columns = -(-values.shape[1] // _PER_INT) * _PER_INT
    whole = torch.full((len(values), columns), MIDDLE, dtype=torch.uint8)
    whole[:, : values.shape[1]] = values
    pairs = whole[:, ::2] | whole[:, 1::2] << 4
    return pairs.contiguous().view(torch.int32)


def unpacked_values(packed: Tensor, columns: int) -> Tensor:
    """Return `packed_values` as it was given."""
    pairs = packed.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)[:, :columns]


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 rows, and their scales `[n, 1]` in float32. A row of zeros gets the scale 1."""
    wide = rows.float()
    scales = wide.abs().amax(dim=1, keepdim=True) / 127
    scales[scales == 0] = 1
    return (wide / scales).round().to(torch.int8), scales
