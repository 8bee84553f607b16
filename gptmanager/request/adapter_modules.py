"""The modules of a model that LoRA adapters may change, and the limits of its adapters."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

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
