"""`StepAdapters`: the arguments of `Kernels.add_adapters` in addition to its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor


class AdapterModule(NamedTuple):
    """The columns of a fused matrix's output to which a module of an adapter adds.

    `number`: the index of the module in the table. `width`: elements of the matrix's input.
    """

    number: int
    first_column: int
    num_columns: int
    width: int


@dataclass(eq=False)
class StepAdapters:
    """The low-rank adapters (LoRA) of a step's tokens: tensors of one device, and a static layout.

    `pool`: flat; of each adapter, layer and module it holds A `[rank, width]`, then B
    `[num_columns, rank]`, without a gap. Where they begin is free; multiples of 16 bytes are read
    fastest on a GPU. `table [slots, layers, modules, 2]` int64: the element of the pool at which A
    begins, and the rank; rank 0: the adapter has no such module. `rows [T]` int32: each token's
    slot in the table, -1 for none; several tokens of one slot are fast where they are neighbors.
    `layout`: the modules that add to a matrix, by its name; their columns may overlap. `max_rank`:
    at least every rank of the table. Only `plan` depends on the contents of the tensors: a
    captured step may be replayed with other adapters. Kernels may set `plan` in
    `Kernels.begin_adapters`, and reuse it in a later step of the same tokens.
    """

    pool: Tensor
    rows: Tensor
    table: Tensor
    layout: Mapping[str, tuple[AdapterModule, ...]]
    max_rank: int
    plan: Any = field(default=None, init=False)
