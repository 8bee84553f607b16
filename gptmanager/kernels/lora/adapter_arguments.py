"""`StepAdapters`: what `Kernels.add_adapters` takes in addition to its tensors.

Knows nothing of how anything is computed from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor


class AdapterModule(NamedTuple):
    """Where a module of an adapter adds: `num_columns` of a fused matrix's output, one after the
    other. `number`: of the module in the table. `width`: elements of the matrix's input.
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
    at least every rank of the table. Nothing else depends on what the tensors hold, so that a
    recorded step may find other adapters there; but `plan` does, which `Kernels.begin_adapters`
    makes of the others where it makes one, and finds again in a later step of the same tokens.
    """

    pool: Tensor
    rows: Tensor
    table: Tensor
    layout: Mapping[str, tuple[AdapterModule, ...]]
    max_rank: int
    plan: Any = field(default=None, init=False)
