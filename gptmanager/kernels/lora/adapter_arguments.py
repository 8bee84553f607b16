"""`StepAdapters`: the adapters of a step's tokens, an argument of `Kernels.add_adapters`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor


class AdapterModule(NamedTuple):
    """The columns of a fused matrix's output to which a module of an adapter adds.

    `number` is the index of the module in the table, `width` the size of the matrix's input.
    """

    number: int
    first_column: int
    num_columns: int
    width: int


@dataclass(eq=False)
class StepAdapters:
    """The low-rank adapters (LoRA) of a step's tokens: tensors on one device, and a static layout.

    `pool` is flat. For each adapter, layer and module it has A `[rank, width]`, directly followed
    by B `[num_columns, rank]`. A and B may begin at any element; a GPU reads them fastest if they
    begin at multiples of 16 bytes. `table [slots, layers, modules, 2]` int64 has the element of the
    pool at which A begins, and the rank, which is 0 if the adapter does not have the module.
    `rows [T]` int32 is each token's slot in the table, or -1 for no adapter; adjacent tokens of one
    slot are computed faster. `layout` maps the name of a matrix to the modules that add to it; the
    modules' columns may overlap. No rank of the table is above `max_rank`. Only `plan` depends on
    the contents of the tensors, so a captured step may be replayed with other adapters. Kernels may
    set `plan` in `Kernels.begin_adapters`, and reuse it in a later step with the same object.
    """

    pool: Tensor
    rows: Tensor
    table: Tensor
    layout: Mapping[str, tuple[AdapterModule, ...]]
    max_rank: int
    plan: Any = field(default=None, init=False)
