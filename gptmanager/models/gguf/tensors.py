"""`GgufTensors`: the tensors of a GGUF file, by their names in a Hugging Face checkpoint.

Rows are unpacked on demand, so a file is never in memory as a whole, neither packed nor as floats.
"""

from __future__ import annotations

import itertools
import math
import mmap
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gptmanager.errors import ConfigError, quoted_path
from gptmanager.kernels.gemm.int4_groups import Groups
from gptmanager.memory.checkpoint.tensor_sources import TensorInfo, tensor_name
from gptmanager.models.gguf.architecture import Architecture
from gptmanager.models.gguf.header import Header, StoredTensor
from gptmanager.models.gguf.metadata import Metadata
from gptmanager.models.gguf.row_orders import (
    Order,
    ValueHeads,
    order_of_groups,
    pairs_to_halves,
)

_LAYER = re.compile(r"blk\.(\d{1,9})\.")
_IN_LAYER = re.compile(r"blk\.(\d+)\.((?:shortconv\.)?\w+?)(?:\.(weight|bias))?")
_PLUS_ONE = re.compile(r"(?!ssm_)\w+_norm")
_OUTSIDE = re.compile(r"(\w+)\.(weight|bias)")
# tensors that are left out, because `config_of` reads them as fields of the RoPE scaling
_FROM_CONFIG = {"rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"}
# a tensor with the matrices of two modules, one below the other
_JOINED = {"ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps")}
_CONVOLUTIONS = ("ssm_conv1d", "shortconv.conv")
# vectors that llama.cpp stores as matrices for Mamba-2
_FLAT = ("ssm_a", "ssm_d", "ssm_norm")
_SCALE = ".scale"  # ends the name of a tensor with scales of the matrices ".weight"
_TEMPORARIES = 4  # memory needed to unpack, in multiples of the result's size
_FLOAT_BYTES = 4
_MAX_EXPERTS = 1024  # per layer; also the most heads with matrices of their own


class _Named(NamedTuple):
    """How a tensor of a checkpoint is stored.

    `shape` is the shape in a checkpoint, and `first_row` the stored row at which the tensor begins.
    If `transposed`, the matrix is stored as [out, in], but is [in, out] in a checkpoint. `rows` and
    `columns` are orders in which the file differs from a checkpoint. If `plus_one`, values are
    stored with 1 added. If `is_decay`, the values v of a checkpoint are stored as -exp(v).
    `scales` has a factor for all elements of each stored matrix.
    """

    stored: StoredTensor
    shape: tuple[int, ...]
    first_row: int = 0
    transposed: bool = False
    rows: Order | None = None
    columns: Order | None = None
    plus_one: bool = False
    is_decay: bool = False
    scales: StoredTensor | None = None

    @property
    def group_order(self) -> Tensor | None:
        """The index in the file of each group of 32 columns; None if columns are in order."""
        return self.columns and order_of_groups(self.columns, self.shape[-1])

    @property
    def keeps_groups(self) -> bool:
        """Whether groups of the file are groups of this tensor, which is a matrix."""
        is_unscaled_matrix = len(self.shape) == 2 and self.scales is None
        return is_unscaled_matrix and (self.columns is None or self.group_order is not None)


class GgufTensors:
    """The `GroupedSource` of a GGUF file.

    `num_heads` and `num_kv_heads` are the numbers of query heads and of key heads. If `num_layers`
    is given, tensors of layers from this number on are left out. `value_heads` are those of linear
    attention if the file has them in its own order. The constructor raises ConfigError if the file
    has a tensor that its architecture does not have.
    """

    def __init__(
        self,
        header: Header,
        own: Architecture,
        num_heads: int,
        num_kv_heads: int,
        *,
        num_layers: int | None = None,
        value_heads: ValueHeads | None = None,
    ) -> None:
        self._header, self._own = header, own
        self._heads = {"attn_q": num_heads, "attn_k": num_kv_heads}
        self._value_heads = value_heads
        self._numbers = _numbers(header, own)
        self._tensors: dict[str, _Named] = {}
        self._found: dict[str, TensorInfo] = {}
        self._mappings: dict[Path, mmap.mmap] = {}
        for name, stored in header.tensors.items():
            layer = _LAYER.match(name)
            is_further = layer and num_layers is not None and int(layer[1]) >= num_layers
            if name in _FROM_CONFIG or is_further or self._is_scale(name):
                continue
            scales = header.tensors.get(name.removesuffix(".weight") + _SCALE)
            kind = stored.type.group_kind if self._has_groups(stored) else None
            for theirs, given in self._place(name, stored):
                named = self._tensors[theirs] = given._replace(scales=scales)
                groups = kind if named.keeps_groups else None
                own_type = stored.type
                self._found[theirs] = TensorInfo(
                    named.shape, own_type.dtype, groups, quantized=own_type.is_quantized
                )
        self._found |= {name: TensorInfo((1,), "float32") for name in self._numbers}

    def describe(self) -> Mapping[str, TensorInfo]:
        return self._found

    def pieces(
        self, name: str, max_bytes: int, region: Sequence[range] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield a tensor in slices along its first dimension, in order, as (first index, slice).

        For `region`, see `TensorSource.pieces`. A transposed matrix or a vector is a single slice.
        """
        if name in self._numbers:
            yield 0, torch.tensor([self._numbers[name]], dtype=torch.float32)
            return
        named = self._tensors[name]
        ranges = list(region or map(range, named.shape))
        if named.transposed:
            inputs, outputs = ranges
            yield 0, self._rows(named, outputs)[:, inputs.start : inputs.stop].t()
            return
        if len(named.shape) == 1:
            yield 0, self._vector(named, ranges[0])
            return
        rows, *middle, columns = ranges
        row_bytes = named.shape[-1] * _FLOAT_BYTES * _TEMPORARIES
        step = max(1, max_bytes // row_bytes)
        for start in range(rows.start, rows.stop, step):
            own = range(start, min(start + step, rows.stop))
            values = self._rows(named, own)[:, columns.start : columns.stop]
            yield start - rows.start, values[:, None] if middle else values

    def groups(self, name: str, max_bytes: int, rows: range) -> Iterator[tuple[int, Groups]]:
        """Yield `rows` of a matrix `[outputs, inputs]` in order, as (first index, 4-bit groups).

        Raises ConfigError for a scale or a minimum that float16 cannot hold.
        """
        named = self._tensors[name]
        block = named.stored.type
        assert block.groups is not None
        columns = named.stored.shape[-1]
        step = max(1, max_bytes // (columns * _TEMPORARIES))
        for start in range(rows.start, rows.stop, step):
            own = range(start, min(start + step, rows.stop))
            blocks = self._packed(named, own).reshape(-1, block.num_bytes)
            found = block.groups(blocks).joined(len(own), named.group_order)
            self._forget_pages()
            scales, minima = found.scales, found.minima
            if block.rounds_scales and not _all_finite(scales, minima):
                raise ConfigError(
                    f"{quoted_path(named.stored.path)}: tensor {tensor_name(name)} of {block.name} "
                    "has a scale or a minimum that is not finite in float16 (at most 65504); load "
                    "the matrices in 8 bits (weights_dtype='int8') or in floats"
                )
            yield start - rows.start, found

    def close(self) -> None:
        """Unmap the files. The next read maps them again."""
        self._mappings.clear()

    def _has_groups(self, stored: StoredTensor) -> bool:
        """Return whether a tensor consists of groups of 4-bit values.

        Their scales are float16 numbers. If they must be rounded, the largest scale has to be a
        normal float16 number, so that the smallest ones are rounded by little of a step. Only
        the first row is read.
        """
        block = stored.type
        if block.groups is None or not block.rounds_scales:
            return block.groups is not None
        scales = block.groups(self._bytes(stored)[0].view(-1, block.num_bytes)).scales
        return bool(scales.abs().max() >= torch.finfo(torch.float16).smallest_normal)

    def _is_scale(self, name: str) -> bool:
        """Return whether a tensor has scales of another, or of activations, which are not used.

        Raises ConfigError if the scales do not fit the other tensor.
        """
        own = self._header.tensors[name]
        scaled = self._header.tensors.get(f"{name.removesuffix(_SCALE)}.weight")
        if not name.endswith(_SCALE) or scaled is None or len(scaled.shape) == 1:
            return name.endswith(".input_scale")
        count = scaled.shape[0] if len(scaled.shape) == 3 else 1
        if own.type.name != "F32" or own.shape != (count,):
            raise ConfigError(
                f"{quoted_path(self._header.path)}: tensor {tensor_name(name)} of {own.type.name}, "
                f"shape {list(own.shape)}: must be F32 {[count]}, a scale for each matrix"
            )
        return True

    def _place(self, name: str, stored: StoredTensor) -> Iterator[tuple[str, _Named]]:
        """Yield a tensor's name in a checkpoint, and how to read it.

        If the tensor has the weights of all experts or heads of a layer, yield one pair for each.
        """
        own = self._own
        if match := _IN_LAYER.fullmatch(name):
            layer, module, kind = match.groups()
            is_vector = kind == "bias" or module.endswith("_norm")
            parts = _JOINED.get(module, (module,))
            if {*parts} <= own.stacked.keys() and len(stored.shape) == (2 if is_vector else 3):
                yield from self._place_stacked(own.layer.format(layer), parts, kind, stored)
                return
            known = own.modules.get(f"{module}.{kind}" if kind else module)
            if known is None and module in own.modules:
                known = f"{own.modules[module]}.{kind}"
            theirs = None if known is None else own.layer.format(layer) + known
        elif match := _OUTSIDE.fullmatch(name):
            module, kind = match.groups()
            known, layer = own.outside.get(module), ""
            theirs = None if known is None else f"{known}.{kind}"
        else:
            theirs = None
        if theirs is None or len(stored.shape) > 2:
            raise ConfigError(
                f"{quoted_path(self._header.path)}: tensor {tensor_name(name)} of shape "
                f"{list(stored.shape)} is unknown in the architecture {own.model_type}"
            )
        if module in _FLAT:
            stored = stored._replace(shape=(math.prod(stored.shape),))
        shape = stored.shape
        if module in own.single_rows and len(shape) == 1:
            shape = (1, *shape)
        is_matrix = len(shape) == 2
        transposed = own.transposed and is_matrix and bool(layer)
        if module in _CONVOLUTIONS and is_matrix:
            shape = (shape[0], 1, shape[1])
        in_rows, in_columns = self._orders(name, module, stored)
        named = _Named(
            stored,
            shape[::-1] if transposed else shape,
            transposed=transposed,
            rows=in_rows,
            columns=in_columns,
            plus_one=own.plus_one and kind == "weight" and _PLUS_ONE.fullmatch(module) is not None,
            is_decay=module == "ssm_a",
        )
        yield theirs, named

    def _place_stacked(
        self, layer: str, modules: Sequence[str], kind: str, stored: StoredTensor
    ) -> Iterator[tuple[str, _Named]]:
        """Yield `modules` of each expert or head, which share the rows of its matrix equally."""
        count, *shape = stored.shape
        height = shape[0] if len(shape) == 2 else 1
        rows, rest = divmod(height, len(modules))
        where = f"{quoted_path(self._header.path)}: {' and '.join(modules)}"
        if count > _MAX_EXPERTS:
            raise ConfigError(
                f"{where} has {count} matrices or vectors: at most {_MAX_EXPERTS} are supported"
            )
        if rest:
            raise ConfigError(f"{where} have {height} rows together, which must be an even number")
        for expert, (part, module) in itertools.product(range(count), enumerate(modules)):
            own = tuple([rows, *shape[1:]] if len(shape) == 2 else shape)
            named = _Named(stored, own, first_row=expert * height + part * rows)
            yield f"{layer}{self._own.stacked[module].format(expert)}.{kind}", named

    def _orders(
        self, name: str, module: str, stored: StoredTensor
    ) -> tuple[Order | None, Order | None]:
        """Return the orders of a tensor's rows and columns in which the file differs."""
        path = quoted_path(self._header.path)
        if self._own.permuted and module in self._heads:
            rows, heads = stored.shape[0], self._heads[module]
            if rows % (2 * heads):
                raise ConfigError(
                    f"{path}: tensor {tensor_name(name)} has {rows} rows, which must be a multiple "
                    f"of 2 x {heads} heads"
                )
            return pairs_to_halves(rows // heads), None
        places = {} if self._value_heads is None else self._value_heads.places()
        if self._value_heads is None or module not in places:
            return None, None
        first, size = places[module]
        needed, found = first + self._value_heads.value_heads * size, stored.shape
        if found[-1 if module == "ssm_out" else 0] != needed:
            raise ConfigError(
                f"{path}: tensor {tensor_name(name)} has shape {list(found)}: it needs {needed}"
            )
        order = self._value_heads.order(first, size)
        return (None, order) if module == "ssm_out" else (order, None)

    def _vector(self, named: _Named, elements: range) -> Tensor:
        stored = self._bytes(named.stored)
        if len(named.stored.shape) == 2:  # one of several vectors
            stored = stored[named.first_row]
        values = self._unpacked(named, stored)
        if named.rows is not None:
            values = values[named.rows(range(len(values)))]
        if named.plus_one:
            values = values.float() - 1
        if named.is_decay:
            values = values.float().neg().log()
        return values[elements.start : elements.stop]

    def _rows(self, named: _Named, rows: range) -> Tensor:
        """Return `rows` of a matrix as floats, `[rows, columns]`, in the order of a checkpoint."""
        values = self._unpacked(named, self._packed(named, rows))
        self._forget_pages()
        values = values.view(len(rows), -1)
        if named.scales is not None:
            numbers = self._bytes(named.scales).view(torch.float32).flatten()
            values = values.float() * numbers[named.first_row // named.stored.shape[-2]]
        return values if named.columns is None else values[:, named.columns(range(named.shape[1]))]

    def _packed(self, named: _Named, rows: range) -> Tensor:
        stored = self._bytes(named.stored)
        if named.rows is None:
            return stored[named.first_row + rows.start : named.first_row + rows.stop]
        return stored[named.rows(rows)]

    def _unpacked(self, named: _Named, packed: Tensor) -> Tensor:
        block = named.stored.type
        return block.unpack(packed.reshape(-1, block.num_bytes)).flatten()

    def _bytes(self, stored: StoredTensor) -> Tensor:
        """Return the mapped bytes of a tensor, uint8 `[rows, bytes per row]`."""
        if stored.path not in self._mappings:
            with stored.path.open("rb") as file:
                # a private mapping, because torch has no read-only tensors
                own = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._mappings[stored.path] = own
        mapping = self._mappings[stored.path]
        end = stored.offset + stored.num_rows * stored.row_bytes
        if end > len(mapping):
            raise ConfigError(f"{quoted_path(stored.path)} has become shorter")
        count = stored.num_rows * stored.row_bytes
        mapped = torch.frombuffer(mapping, dtype=torch.uint8, count=count, offset=stored.offset)
        return mapped.view(stored.num_rows, stored.row_bytes)

    def _forget_pages(self) -> None:
        """Release the pages that were read. Otherwise they would stay resident until `close`."""
        for mapping in self._mappings.values():
            mapping.madvise(mmap.MADV_DONTNEED)


def _all_finite(*tensors: Tensor | None) -> bool:
    return all(it is None or bool(it.isfinite().all()) for it in tensors)


def _numbers(header: Header, own: Architecture) -> dict[str, float]:
    """Return tensor name -> value, for the tensors that are numbers in the metadata."""
    metadata, found = Metadata(header.path, header.metadata), {}
    num_layers = metadata.integer(f"{metadata.text('general.architecture')}.block_count") or 0
    for key, theirs in own.numbers.items():
        for layer, value in enumerate(metadata.numbers(key, num_layers)):
            found[own.layer.format(layer) + theirs] = float(value)
    return found
