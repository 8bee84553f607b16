"""Checkpoints with int8 matrices and one scale per row, as `convert` writes them.

Names follow compressed-tensors (format int-quantized, weights only): the int8 matrix keeps its
name, and its float32 scales `[rows, 1]` are named `<module>.weight_scale`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gptmanager.errors import ConfigError, quoted
from gptmanager.memory.tensor_sources import FLOATS, TensorInfo, TensorSource, tensor_name

FIELD = "quantization_config"
LAYOUT_VERSION = 1
SCALE = "_scale"  # suffix of a matrix's name
_WEIGHTS = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "channel",
    "dynamic": False,
}
_TEMPORARIES = 2


def quantization_config() -> dict[str, Any]:
    """Return the value of `quantization_config` in a config.json."""
    group = {"targets": ["Linear"], "weights": dict(_WEIGHTS), "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [],
        "gptmanager_layout": LAYOUT_VERSION,
    }


def without_quantization(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config without its int8 quantization, as for a checkpoint of floats.

    A config without int8 is returned unchanged. Raises ConfigError for another layout version.
    """
    own = config.get(FIELD)
    if not isinstance(own, dict) or "gptmanager_layout" not in own:
        return config
    if own != quantization_config():
        raise ConfigError(
            f"config.json: {FIELD} = {quoted(own)}: not version {LAYOUT_VERSION} of the int8 "
            "layout; convert the checkpoint again"
        )
    return {field: value for field, value in config.items() if field != FIELD}


class Int8Tensors:
    """A `TensorSource` of floats, computed from a source of int8 matrices and their scales.

    Raises ConfigError if the scales of a matrix are missing or have another shape.
    """

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._found: dict[str, TensorInfo] = {}
        self._scaled: set[str] = set()
        given = source.describe()
        for name, info in given.items():
            if info.dtype != "int8":
                self._found[name] = info
                continue
            scales = given.get(name + SCALE)
            rows = info.shape[:1]
            if len(info.shape) != 2 or scales is None or scales.shape != (*rows, 1):
                raise ConfigError(
                    f"tensor {tensor_name(name)} is int8 {list(info.shape)}: it must be a matrix "
                    f"with the scales {tensor_name(name + SCALE)}, one per row"
                )
            self._found[name] = TensorInfo(info.shape, "float32")
            self._scaled.add(name)
        for name in self._scaled:
            if self._found.pop(name + SCALE).dtype not in FLOATS.values():
                raise ConfigError(f"tensor {tensor_name(name + SCALE)} does not hold floats")

    def describe(self) -> Mapping[str, TensorInfo]:
        return self._found

    def pieces(
        self, name: str, max_bytes: int, region: Sequence[range] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        if name not in self._scaled:
            yield from self._source.pieces(name, max_bytes, region)
            return
        [(_, scales)] = self._source.pieces(name + SCALE, 1 << 62)
        scales = scales.float().clone()  # copied, because later reads may unmap it
        first = region[0].start if region else 0
        # each int8 byte becomes a float32, and conversion needs temporary arrays
        own_bytes = max_bytes // (4 * _TEMPORARIES)
        for start, piece in self._source.pieces(name, own_bytes, region):
            rows = slice(first + start, first + start + len(piece))
            yield start, piece.float().mul_(scales[rows])

    def close(self) -> None:
        self._source.close()


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 rows, and their scales `[n, 1]` in float32. A row of zeros gets the scale 1."""
    wide = rows.float()
    scales = wide.abs().amax(dim=1, keepdim=True) / 127
    scales[scales == 0] = 1
    return (wide / scales).round().to(torch.int8), scales
