"""`Adapter`: the low-rank matrices (LoRA, Hu et al. 2021, arXiv:2106.09685) of one task.

This module decides whether `lora_weights` and `lora_config` are an adapter that fits a model. Other
modules cache adapters, and use them in a model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gptmanager.errors import AdapterError, InvalidRequestError
from gptmanager.request.adapter_modules import (
    LORA_MODULE_NAMES,
    AdapterLimits,
    AdapterMatrices,
    LoraVariant,
)
from gptmanager.request.pieces import PIECE, Pieces, whole
from gptmanager.request.read_tensors import as_float_rows, read_int, read_int_rows, read_start


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
