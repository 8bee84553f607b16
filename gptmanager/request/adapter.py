"""`Adapter`: the low-rank matrices (LoRA, Hu et al. 2021, arXiv:2106.09685) of one task.

This module decides whether `lora_weights` and `lora_config` are an adapter that fits a model. Other
modules cache adapters, and use them in a model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gptmanager.errors import AdapterError, InvalidRequestError
from gptmanager.request.pieces import PIECE, Pieces, whole
from gptmanager.request.read_tensors import as_float_rows, read_int, read_int_rows, read_start

# the names of the modules of layers that adapters may change, by module id
LORA_MODULE_NAMES = (
    *("attn_qkv", "attn_q", "attn_k", "attn_v", "attn_dense"),
    *("mlp_h_to_4h", "mlp_4h_to_h", "mlp_gate"),
    *("cross_attn_qkv", "cross_attn_q", "cross_attn_k", "cross_attn_v", "cross_attn_dense"),
    *("moe_h_to_4h", "moe_4h_to_h", "moe_gate", "moe_router", "mlp_router"),
    *("linear_attn_z", "linear_attn_ba", "linear_attn_b", "linear_attn_a"),  # not in TensorRT-LLM
)
LORA_MODULE_IDS: Mapping[str, int] = {name: i for i, name in enumerate(LORA_MODULE_NAMES)}


class LoraVariant(NamedTuple):
    """The matrix and the sizes of a `LoraModule` in `layers`. `LoraModule` describes the fields."""

    matrix: str
    first_column: int
    num_columns: int
    input_width: int
    order: tuple[tuple[int, int, int], ...]
    layers: tuple[int, ...]

    @property
    def width(self) -> int:
        """Number of elements of an adapter's row, divided by its LoRA rank."""
        return self.input_width + self.num_columns


class LoraModule(NamedTuple):
    """A part of a model's layer that adapters may change.

    The module's input is the input of the model's matrix `matrix`, with `input_width` elements. The
    module's output is added to `num_columns` outputs of this matrix, from `first_column` on.
    `order` has the rows of the adapter's B for these columns, as (start, stop, step) of ranges; if
    `order` is empty, all rows are used in their order. The fields hold for the layers in `layers`,
    or for all layers if `layers` is empty. `variants` describe the module in the other layers.
    """

    matrix: str
    first_column: int
    num_columns: int
    input_width: int
    order: tuple[tuple[int, int, int], ...] = ()
    layers: tuple[int, ...] = ()
    variants: tuple[LoraVariant, ...] = ()

    @property
    def width(self) -> int:
        """Number of elements of an adapter's row, divided by its LoRA rank, in the widest layer."""
        return max(own.width for own in self.all_variants)

    @property
    def all_variants(self) -> tuple[LoraVariant, ...]:
        """Return this module, as a variant for its own layers, and then its variants."""
        first = LoraVariant(
            self.matrix,
            self.first_column,
            self.num_columns,
            self.input_width,
            self.order,
            self.layers,
        )
        return first, *self.variants

    def of(self, layer: int) -> LoraVariant | None:
        """Return the module in a layer, or None if the layer does not have it."""
        own = (it for it in self.all_variants if not it.layers or layer in it.layers)
        return next(own, None)


class LoraCut(NamedTuple):
    """The part of a module that one of several processes keeps.

    `inputs` is a range of the module's inputs. `columns` are ranges of the module's columns, which
    are concatenated.
    """

    inputs: range
    columns: tuple[range, ...]

    @property
    def width(self) -> int:
        """The width of the part that is kept; see `LoraModule.width`."""
        return len(self.inputs) + sum(map(len, self.columns))

    def of(self, row: AdapterMatrices) -> Tensor:
        """Return a copy of the values that are kept: A and then B, flattened."""
        a = row.a[:, self.inputs.start : self.inputs.stop]
        parts = [row.b[own.start : own.stop] for own in self.columns]
        return torch.cat([part.reshape(-1) for part in (a, *parts)])


class AdapterShare(NamedTuple):
    """The part of a model, and of its adapters, that one of several processes has.

    `modules` has the modules by id, with this process's widths. `cuts` has the part of each whole
    module that this process keeps, by layer and id. `layers` are the layers of the whole model that
    this process has. `num_layers` counts the layers of the whole model. `first_layers` has the
    first layer of each pipeline stage except the first stage.
    """

    modules: Mapping[int, LoraModule]
    cuts: Mapping[tuple[int, int], LoraCut]
    layers: range
    num_layers: int
    first_layers: tuple[int, ...] = ()


class AdapterLimits(NamedTuple):
    """The limits of the adapters that a model accepts.

    `modules` has the modules that adapters may change, by id. `max_adapter_size` is the largest
    LoRA rank. If this process keeps only parts of modules, `widths` has the kept width by module
    id, and `layer_widths` has the kept widths of layers that differ, by layer and module id.
    """

    modules: Mapping[int, LoraModule]
    num_layers: int
    dtype: torch.dtype
    max_adapter_size: int
    widths: Mapping[int, int] = MappingProxyType({})
    layer_widths: Mapping[tuple[int, int], int] = MappingProxyType({})

    def module(self, layer: int, module_id: int) -> LoraVariant:
        """Return a module in a layer, which must have it."""
        found = self.modules[module_id].of(layer)
        assert found is not None
        return found

    def kept_width(self, layer: int, module_id: int) -> int:
        """Return the kept width of a module in a layer, which must have it."""
        own = self.layer_widths.get((layer, module_id), self.widths.get(module_id))
        return self.module(layer, module_id).width if own is None else own


class AdapterMatrices(NamedTuple):
    """An adapter's matrices for one module of one layer; `values` has A and then B, flattened."""

    layer: int
    module_id: int
    rank: int
    input_width: int
    values: Tensor

    @property
    def a(self) -> Tensor:
        """`[rank, input_width]`, a view."""
        return self.values[: self.rank * self.input_width].view(self.rank, self.input_width)

    @property
    def b(self) -> Tensor:
        """`[num_columns, rank]`, a view. It contains the scale: the module adds B (A x)."""
        return self.values[self.rank * self.input_width :].view(-1, self.rank)

    @property
    def num_elements(self) -> int:
        return self.values.numel()


class Adapter:
    """The rows of an adapter, by (layer, module id) in ascending order.

    Their values are contiguous CPU tensors of the model's dtype, which are never changed.
    `digest` is the blake2b hash of the values and their layout; the order of the host's rows and
    their padding do not change it. `num_elements` is the total of all rows.
    """

    __slots__ = ("digest", "num_elements", "rows")

    def __init__(self, rows: Sequence[AdapterMatrices], digest: str) -> None:
        self.rows: Mapping[tuple[int, int], AdapterMatrices] = {
            (row.layer, row.module_id): row for row in rows
        }
        self.num_elements = sum(row.num_elements for row in rows)
        self.digest = digest

    def __repr__(self) -> str:
        return f"Adapter({len(self.rows)} rows, {self.digest[:12]})"


class AdapterTensors:
    """`lora_weights` and `lora_config` that fit a model; the weights are not copied yet.

    The constructor is fast. `read` copies the weights, and may run on any thread.
    """

    __slots__ = ("_limits", "_rows", "_weights")

    def __init__(self, weights: Any, config: Any, limits: AdapterLimits) -> None:
        """Check the tensors.

        Raise InvalidRequestError if they are invalid, AdapterError if they do not fit the model.
        """
        self._rows = _read_config(config, limits)
        self._weights = as_float_rows("lora_weights", weights)
        self._limits = limits
        count, width = self._weights.shape
        if count != len(self._rows):
            raise InvalidRequestError(
                f"lora_weights has {count} rows, lora_config {len(self._rows)}: they must have the "
                "same number of rows"
            )
        for row, (module_id, layer, rank) in enumerate(self._rows):
            module = limits.module(layer, module_id)
            if width < rank * module.width:
                raise AdapterError(
                    f"lora_weights[{row}] has {width} elements: {_module(module_id)} of layer "
                    f"{layer} needs at least {rank} * {module.input_width} + {module.num_columns} "
                    f"* {rank} = {rank * module.width}"
                )

    def row_sizes(self) -> list[tuple[int, int, int, int]]:
        """Return the layer, module id, rank and number of elements of each row of the `Adapter`.

        Only elements that this process keeps are counted. The list is sorted.
        """
        return sorted(
            (layer, module_id, rank, rank * self._limits.kept_width(layer, module_id))
            for module_id, layer, rank in self._rows
        )

    @property
    def is_plain(self) -> bool:
        """Whether reading neither runs code of the host nor waits for a device."""
        given = self._weights
        if isinstance(given, np.ndarray):
            return True
        return type(given) in (torch.Tensor, torch.nn.Parameter) and given.is_cpu

    def read(self) -> Adapter:
        """Read the adapter at once; see `read_in_pieces`."""
        return whole(self.read_in_pieces())

    def read_in_pieces(self) -> Pieces[Adapter]:
        """Copy the adapter to the model's dtype, with rounding, and return it after the last piece.

        Raise InvalidRequestError for a number that is not finite, before or after rounding.
        """
        rows = []
        for row, (module_id, layer, rank) in enumerate(self._rows):
            module = self._limits.module(layer, module_id)
            values = yield from read_start(
                "lora_weights", self._weights, row, rank * module.width, self._limits.dtype
            )
            if module.order:
                values = _reordered(values, rank, module)
            rows.append(AdapterMatrices(layer, module_id, rank, module.input_width, values))
        rows.sort(key=lambda row: (row.layer, row.module_id))
        return Adapter(rows, (yield from _digest(rows)))


class LoraInputs(NamedTuple):
    """A request's adapter. `tensors` is None if the request has only the id of an adapter."""

    task_id: int
    tensors: AdapterTensors | None


def read_lora(tensors: Mapping[str, Any], limits: AdapterLimits) -> LoraInputs | None:
    """Read `lora_task_id [1]`, `lora_weights` and `lora_config`; None without an adapter.

    `lora_weights` is `[n, width]` or `[1, n, width]`, of any float dtype. Each row has A `[D, Hi]`
    and then B `[Ho, D]`, flattened, followed by padding. D is the LoRA rank, Hi and Ho are the
    numbers of the module's inputs and outputs, and B contains the scale. `lora_config` is `[n, 3]`
    or `[1, n, 3]`, of any integer dtype, and has the module id, the layer and D of each row.
    Weights and config must be passed together and with an id; an id may be passed alone. Raise the
    errors of `AdapterTensors`.
    """
    given = [name for name in ("lora_weights", "lora_config") if name in tensors]
    if len(given) == 1:
        missing = "lora_config" if given == ["lora_weights"] else "lora_weights"
        raise InvalidRequestError(f"Undefined tensor: {missing}, but {given[0]} is given")
    if "lora_task_id" not in tensors:
        if given:
            raise InvalidRequestError(
                "Undefined tensor: lora_task_id, but lora_weights and lora_config are given"
            )
        return None
    task_id = read_int("lora_task_id", tensors["lora_task_id"], 0, 2**64 - 1)
    if not given:
        return LoraInputs(task_id, None)
    return LoraInputs(
        task_id, AdapterTensors(tensors["lora_weights"], tensors["lora_config"], limits)
    )


def _read_config(config: Any, limits: AdapterLimits) -> list[tuple[int, int, int]]:
    """Return (module id, layer, rank) of each row."""
    array = read_int_rows("lora_config", config, 3)
    most = limits.num_layers * len(limits.modules)
    if len(array) > most:
        raise AdapterError(
            f"lora_config has {len(array)} rows, expected at most {most}: {limits.num_layers} "
            f"layers of {len(limits.modules)} modules"
        )
    rows: list[tuple[int, int, int]] = []
    first: dict[tuple[int, int], int] = {}
    for row, (module_id, layer, rank) in enumerate(array.tolist()):
        _check_row(row, module_id, layer, rank, limits)
        before = first.setdefault((layer, module_id), row)
        if before != row:
            raise InvalidRequestError(
                f"lora_config[{row}] = {[module_id, layer, rank]}: {_module(module_id)} of layer "
                f"{layer} is in row {before} already"
            )
        rows.append((module_id, layer, rank))
    return rows


def _check_row(row: int, module_id: int, layer: int, rank: int, limits: AdapterLimits) -> None:
    if not 0 <= module_id < len(LORA_MODULE_NAMES):
        raise InvalidRequestError(
            f"lora_config[{row}]: module_id = {module_id} is outside "
            f"0..{len(LORA_MODULE_NAMES) - 1}"
        )
    if module_id not in limits.modules:
        raise AdapterError(
            f"lora_config[{row}]: module_id = {_module(module_id)}: the model has only "
            f"{', '.join(map(_module, sorted(limits.modules)))}"
        )
    if 0 <= layer < limits.num_layers and limits.modules[module_id].of(layer) is None:
        raise AdapterError(
            f"lora_config[{row}]: module_id = {_module(module_id)}: layer {layer} of the model "
            "does not have it"
        )
    if layer < 0 or rank < 1:
        field, value, least = ("layer_idx", layer, 0) if layer < 0 else ("adapter_size", rank, 1)
        raise InvalidRequestError(f"lora_config[{row}]: {field} = {value} is less than {least}")
    if layer >= limits.num_layers:
        raise AdapterError(
            f"lora_config[{row}]: layer_idx = {layer} is outside 0..{limits.num_layers - 1}"
        )
    if rank > limits.max_adapter_size:
        raise AdapterError(
            f"lora_config[{row}]: adapter_size = {rank} is more than max_adapter_size = "
            f"{limits.max_adapter_size}"
        )


def _module(module_id: int) -> str:
    return f"{module_id} ({LORA_MODULE_NAMES[module_id]})"


def _reordered(values: Tensor, rank: int, module: LoraVariant) -> Tensor:
    """Return A and B, with the rows of B in the order of the model's own rows."""
    a, b = torch.split(values, [rank * module.input_width, rank * module.num_columns])
    order = torch.cat([torch.arange(*run) for run in module.order])
    return torch.cat((a, b.view(module.num_columns, rank)[order].flatten()))


def _digest(rows: Sequence[AdapterMatrices]) -> Pieces[str]:
    digest = hashlib.blake2b(digest_size=32)
    for row in rows:
        facts = (*row[:4], row.num_elements, str(row.values.dtype))
        digest.update(f"{facts}".encode())
        numbers = row.values.view(torch.uint8).numpy().data
        for first in range(0, len(numbers), 4 * PIECE):
            digest.update(numbers[first : first + 4 * PIECE])
            yield
    return digest.hexdigest()
