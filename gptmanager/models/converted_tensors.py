"""Reads checkpoints that `convert` has written, with matrices in 8 or 4 bits packed for matmuls.

A matrix is stored as the `Panels` of a `PackedMatrix` or an `Int4Matrix`. The tensor with the
matrix's name has its values, int8 `[panels, depth / 4, 16, 4]` or uint8 `[panels, groups, 4, 16,
4]`. `<name>_scale` has the scales, `<name>_minimum` the minima, if any, `<name>_codebook` the
numbers of the codebook, if any, as float32 `[16]`, and `<name>_shape` the shape `[rows, columns]`.
If panels do not have 16 rows, or are padded to a depth that this machine does not use, they are
converted when they are read, not mapped into memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gptmanager.errors import ConfigError, quoted
from gptmanager.kernels.gemm.int4_groups import CODEBOOKS, GROUP, Codebook, Groups, codebook_of
from gptmanager.kernels.gemm.packed_matrix import Panels, Quantized
from gptmanager.memory.checkpoint.safetensors_reader import SafetensorsFolder
from gptmanager.memory.checkpoint.tensor_sources import TensorInfo, tensor_name

FIELD = "quantization_config"
LAYOUT_VERSION = 4
# suffixes of tensor names
SCALE, MINIMUM, CODEBOOK, SHAPE = "_scale", "_minimum", "_codebook", "_shape"
_KINDS: Mapping[str, Quantized] = {"int8": "int8", "uint8": "int4"}  # by the dtype of values
_SCALES = {"int8": "float32", **dict.fromkeys(("int4", *CODEBOOKS), "float16")}
_TEMPORARIES = 2  # number of arrays of a piece's size that exist at once during its conversion
_ANY_SIZE = 1 << 62


def quantization_config() -> dict[str, Any]:
    """Return the field `quantization_config` of the config.json that `convert` writes."""
    return {"quant_method": "gptmanager", "gptmanager_layout": LAYOUT_VERSION, "group_size": GROUP}


def is_own_layout(config: Mapping[str, Any]) -> bool:
    """Return whether the config.json `config` declares this layout.

    Raise ConfigError for another version of the layout.
    """
    own = config.get(FIELD)
    if not isinstance(own, dict) or "gptmanager_layout" not in own:
        return False
    if own != quantization_config():
        raise ConfigError(
            f"config.json: {FIELD} = {quoted(own)}: not a layout of this version; convert the "
            "checkpoint again"
        )
    return True


class ConvertedTensors:
    """A `PanelSource` of a converted checkpoint. `pieces` dequantizes packed matrices to float32.

    The constructor raises ConfigError if the scales or the shape of a matrix are missing, or if
    their shapes or dtypes do not fit the values.
    """

    def __init__(self, source: SafetensorsFolder) -> None:
        self._source = source
        self._given = source.describe()
        self._kinds: dict[str, Quantized] = {}
        self._found: dict[str, TensorInfo] = {}
        used: set[str] = set()
        for name, info in self._given.items():
            if info.dtype in _KINDS:
                kind = self._kinds[name] = self._codebook(name) or _KINDS[info.dtype]
                shape = self._checked(name, info.shape, kind)
                groups = None if kind == "int8" else kind
                self._found[name] = TensorInfo(shape, "float32", groups, quantized=True)
                used |= {name + end for end in (SCALE, MINIMUM, CODEBOOK, SHAPE)}
        self._found |= {
            n: it for n, it in self._given.items() if n not in self._found.keys() | used
        }

    def _codebook(self, name: str) -> Codebook | None:
        """Return the codebook of a matrix, or None if it has none."""
        info = self._given.get(name + CODEBOOK)
        if info is None:
            return None
        found = None
        if self._given[name].dtype == "uint8" and info[:2] == ((16,), "float32"):
            given = self._whole(name + CODEBOOK)
            found = next((it for it, own in CODEBOOKS.items() if torch.equal(own, given)), None)
        if found is None:
            raise ConfigError(
                f"tensor {tensor_name(name + CODEBOOK)} is not a codebook of this version; convert "
                "the checkpoint again"
            )
        return found

    def _checked(self, name: str, stored: tuple[int, ...], kind: Quantized) -> tuple[int, int]:
        """Return the shape of a matrix, checked against `stored`, the shape of its values."""
        shape = self._given.get(name + SHAPE)
        if shape is None or shape[:2] != ((2,), "int64"):
            raise ConfigError(
                f"tensor {tensor_name(name)} needs the tensor {tensor_name(name + SHAPE)} with two "
                "int64 numbers"
            )
        rows, columns = self._whole(name + SHAPE).tolist()
        ends = {name + SCALE, *({name + MINIMUM} & self._given.keys())}
        scales = [self._given.get(end) for end in ends]
        in_groups = kind != "int8"
        is_right = len(stored) == (5 if in_groups else 4) and min(rows, columns, *stored) > 0
        if is_right:
            panels, depth, lanes = stored[0], stored[1], stored[3 if in_groups else 2]
            rest = (4, lanes, 4) if in_groups else (lanes, 4)
            fits = depth == -(-columns // GROUP) if in_groups else 4 * depth >= columns
            is_right = stored[2:] == rest and fits and panels == -(-rows // lanes)
            own = (panels, depth, lanes) if in_groups else (panels * lanes,)
            is_right &= all(it is not None and it[:2] == (own, _SCALES[kind]) for it in scales)
        if not is_right:
            raise ConfigError(
                f"tensor {tensor_name(name)}, {list(stored)}, and its scales do not have the "
                f"layout of a matrix {[rows, columns]} in {kind}; convert the checkpoint again"
            )
        return rows, columns

    def describe(self) -> Mapping[str, TensorInfo]:
        return self._found

    def pieces(
        self, name: str, max_bytes: int, region: Sequence[range] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        kind = self._kinds.get(name)
        if kind is None:
            yield from self._source.pieces(name, max_bytes, region)
            return
        rows, columns = region or map(range, self._found[name].shape)
        if kind != "int8":
            for start, groups in self.groups(name, max_bytes // _TEMPORARIES, rows):
                yield start, groups.floats()[:, columns.start : columns.stop]
            return
        scales = self._whole(name + SCALE).clone()  # copied, because later reads may unmap it
        # each int8 value becomes a float32, and conversion needs temporary arrays
        for first, panels in self._read(name, name, max_bytes // (4 * _TEMPORARIES), rows):
            whole = panels.transpose(1, 2).flatten(0, 1).flatten(1)
            skipped, count = max(0, rows.start - first), min(rows.stop - first, len(whole))
            own = whole[skipped:count, columns.start : columns.stop].float()
            yield max(first - rows.start, 0), own.mul_(scales[first + skipped :][: len(own), None])

    def groups(self, name: str, max_bytes: int, rows: range) -> Iterator[tuple[int, Groups]]:
        columns, kind = self._found[name].shape[1], self._kinds[name]
        codebook = codebook_of(kind)
        ends = [SCALE, *([MINIMUM] if name + MINIMUM in self._given else [])]
        # Each byte has two values, which become two floats of 4 bytes.
        pieces = self._read(name, name, max_bytes // 8, rows)
        for first, panels in pieces:
            halves = panels.permute(0, 3, 1, 2, 4).flatten(0, 1)
            own = slice(max(0, rows.start - first), min(rows.stop - first, len(halves)))
            values = torch.stack((halves & 15, halves >> 4), dim=2).flatten(1)[own, :columns]
            read = range(first + own.start, first + own.stop)
            parts = [
                torch.cat(
                    [
                        it.transpose(1, 2).flatten(0, 1)
                        for _, it in self._read(name, name + end, _ANY_SIZE, read)
                    ]
                )
                for end in ends
            ]
            scales, minima = parts[0][own], parts[1][own] if len(parts) > 1 else None
            yield max(first - rows.start, 0), Groups(values, scales, minima, codebook)

    def _read(
        self, name: str, part: str, max_bytes: int, rows: range
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, panels) for the panels of `part` that contain `rows`.

        `name`: the tensor with the values of the matrix. `part`: this tensor, or the tensor with
        the scales or the minima.
        """
        shape = self._given[name].shape
        lanes = shape[-2]
        panels = range(rows.start // lanes, -(-rows.stop // lanes))
        region = [panels, *map(range, self._given[part].shape[1:])]
        for start, piece in self._source.pieces(part, max_bytes, region):
            yield (panels.start + start) * lanes, piece

    def _whole(self, name: str) -> Tensor:
        [(_, found)] = self._source.pieces(name, _ANY_SIZE)
        return found

    def panels(self, names: Sequence[str]) -> Panels | None:
        kinds = {self._kinds.get(name) for name in names}
        kind = kinds.pop()
        shapes = [self._given[name].shape for name in names]
        rows = [self._found[name].shape[0] for name in names]
        lanes = shapes[0][-2] if kind is not None else 1
        # Only the last matrix may have rows that pad its last panel.
        if kind is None or kinds or any(count % lanes for count in rows[:-1]):
            return None
        if len({shape[1:] for shape in shapes}) > 1:
            return None
        count, first = sum(shape[0] for shape in shapes), self._given[names[0]]
        of_scales = (count, *shapes[0][1:2], lanes) if kind != "int8" else (count * lanes,)
        values = self._joined(names, "", first.dtype, (count, *shapes[0][1:]))
        scales = self._joined(names, SCALE, _SCALES[kind], of_scales)
        minima = None
        if any(name + MINIMUM in self._given for name in names):
            minima = self._joined(names, MINIMUM, _SCALES[kind], of_scales)
            values = values if minima is not None else None
        if values is None or scales is None:
            return None
        return Panels(values, scales, minima, codebook_of(kind))

    def _joined(
        self, names: Sequence[str], end: str, dtype: str, shape: tuple[int, ...]
    ) -> Tensor | None:
        parts = [name + end for name in names]
        if not all(part in self._given for part in parts):
            return None
        found = self._source.joined(parts, getattr(torch, dtype))
        return None if found is None or found.numel() != math.prod(shape) else found.view(shape)

    def close(self) -> None:
        self._source.close()
