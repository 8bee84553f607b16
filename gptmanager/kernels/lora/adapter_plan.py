"""`AdapterPlan`: the plan of a step's adapters, which `CpuKernels` makes once for all layers.

The plan says which tokens are computed together, and which matrices of which layers are skipped.
Compiled code makes the plan. Torch and NumPy would be slower: between steps, their code drops out
of the CPU caches, and their first call in a step takes ten times as long as later calls.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]

from gptmanager.kernels.lora.adapter_arguments import AdapterModule, StepAdapters
from gptmanager.kernels.lora.adapter_intrinsics import RANKS_OF_ONE, ROWS
from gptmanager.kernels.lora.adapters import BLOCK, AdapterTask, scratch_floats
from gptmanager.kernels.simd.dtypes import DTYPES
from gptmanager.kernels.simd.lanes import LANES, get_int, get_long, pointer_to, task_at
from gptmanager.kernels.simd.machine_code import compiled
from gptmanager.kernels.simd.pairs import has_fast_pairs
from gptmanager.kernels.simd.threads import Team, address_of, check_layout, task_fields, with_first

RUNS_PER_THREAD = 2
FEW_RANKS = 8  # the rank that an adapter is assumed to have, to estimate its work
NUM_TOKENS, NUM_RUNS, LAYERS = 0, 1, 2  # indices into `found`
MOST_BITS = 62  # in a bit mask, all modules from this number on share one bit


class PlanTask(ctypes.Structure):
    """Addresses and sizes. `found` is the result, an int64 array of `size` elements.

    `found` starts with the number of tokens that have an adapter, and the number of runs. One bit
    mask per layer follows, of the modules that at least one of the step's adapters has. Then comes
    another bit mask per layer, of the modules that all of the step's adapters have. The rest is
    `runs` and `order`, as in `AdapterTask`, and one element of scratch per slot.
    """

    _fields_ = task_fields("rows table num_tokens num_slots num_layers num_modules found size")


PLAN_TASK = np.dtype(PlanTask)


def plan_runs(address: int) -> None:
    """Sort the tokens with an adapter by slot, and cut each slot's tokens into runs.

    There are about RUNS_PER_THREAD runs for each of `num_parts` threads.
    """
    t = task_at(address, PLAN_TASK)
    num_tokens, num_slots, num_modules = t.num_tokens, t.num_slots, t.num_modules
    found = carray(pointer_to(t.found), t.size, np.int64)
    found[:] = 0
    common = LAYERS + t.num_layers
    runs = common + t.num_layers
    found[common:runs] = -1
    order = runs + 3 * num_tokens
    ends = order + num_tokens
    for token in range(num_tokens):
        slot = get_int(t.rows, token)
        if slot >= 0:
            found[ends + slot] += 1
            found[NUM_TOKENS] += 1
    share = -(-found[NUM_TOKENS] // (RUNS_PER_THREAD * t.num_parts))
    length, first, num_runs = min(BLOCK, -(-share // ROWS) * ROWS), 0, 0
    for slot in range(num_slots):
        stop = first + found[ends + slot]
        found[ends + slot] = first
        if first == stop:
            continue
        for layer in range(t.num_layers):
            modules = 0
            for module in range(num_modules):
                entry = ((slot * t.num_layers + layer) * num_modules + module) * 2
                if get_long(t.table, entry + 1) > 0:
                    modules |= 1 << min(module, MOST_BITS)
            found[LAYERS + layer] |= modules
            found[common + layer] &= modules
        for start in range(first, stop, length):
            run = runs + 3 * num_runs
            found[run], found[run + 1], found[run + 2] = start, min(start + length, stop), slot
            num_runs += 1
        first = stop
    found[NUM_RUNS] = num_runs
    for token in range(num_tokens):
        slot = get_int(t.rows, token)
        if slot >= 0:
            found[order + found[ends + slot]] = token
            found[ends + slot] += 1


class MatrixPlan(NamedTuple):
    """The plan for one matrix, such as "qkv", in all layers.

    Each part of the task computes one run of tokens. `modules` is a bit mask of the matrix's
    modules, `work` the estimated number of multiplications in one layer.
    """

    task: AdapterTask
    num_parts: int
    scratch_bytes: int
    modules: int
    work: int

    def begin(self, *values: int) -> AdapterTask:
        """Return the task for one layer, with `values` for the fields `result` to `columns`."""
        return with_first(self.task, self.num_parts, *values)


class AdapterPlan:
    """The plan of one step. The adapters' tensors must not change before the step has ended."""

    def __init__(self, adapters: StepAdapters, team: Team) -> None:
        """Make the plan. Raises TypeError if a tensor has an unsupported layout."""
        pool, rows, table = adapters.pool, adapters.rows, adapters.table
        check_layout(pool, pool.dtype)
        self._adapters = adapters
        self._matrices: dict[str, MatrixPlan | None] = {}
        (num_tokens,), (num_slots, num_layers, num_modules, _) = rows.shape, table.shape
        size = LAYERS + 2 * num_layers + 4 * num_tokens + num_slots
        self._found = (ctypes.c_int64 * size)()
        self._runs = ctypes.addressof(self._found) + 8 * (LAYERS + 2 * num_layers)
        task = PlanTask(
            rows=address_of(rows, torch.int32),
            table=address_of(table, torch.int64),
            num_tokens=num_tokens,
            num_slots=num_slots,
            num_layers=num_layers,
            num_modules=num_modules,
            found=ctypes.addressof(self._found),
            size=size,
            num_parts=team.max_size,
        )
        team.run(compiled(plan_runs), task, 1)
        self.is_empty = not any(self._found[LAYERS : LAYERS + num_layers])

    def of(self, matrix: str, layer: int) -> MatrixPlan | None:
        """Return the plan of a matrix; None if no adapter has a module of the matrix in this layer.

        Raises KeyError if the dtype of the pool is not in `DTYPES`.
        """
        if matrix not in self._matrices:
            self._matrices[matrix] = self._plan(matrix)
        own = self._matrices[matrix]
        return own if own and own.modules & self._found[LAYERS + layer] else None

    def _plan(self, matrix: str) -> MatrixPlan | None:
        modules = self._adapters.layout.get(matrix)
        if not modules:
            return None
        pool, table, max_rank = self._adapters.pool, self._adapters.table, self._adapters.max_rank
        fields, bits, work = _fields(modules)
        width = modules[0].width
        h_stride = -(-max_rank // RANKS_OF_ONE) * RANKS_OF_ONE
        scratch_bytes = 4 * scratch_floats(width, len(modules), h_stride)
        task = AdapterTask(
            order=self._runs + 8 * 3 * len(self._adapters.rows),
            runs=self._runs,
            pool=pool.data_ptr(),
            table=table.data_ptr(),
            modules=ctypes.addressof(fields),
            num_modules=len(modules),
            width=width,
            slot_stride=table.stride(0),
            layer_stride=table.stride(1),
            h_stride=h_stride,
            pool_dtype=DTYPES[pool.dtype],
            scratch_bytes=scratch_bytes,
            pairs=pool.dtype is torch.bfloat16 and width >= 2 * LANES and has_fast_pairs(),
        )
        num_tokens, num_runs = self._found[NUM_TOKENS], self._found[NUM_RUNS]
        return MatrixPlan(task, num_runs, scratch_bytes, bits, work * num_tokens)

    def tokens_of(self, matrix: str, layer: int) -> list[int]:
        """Return, in ascending order, the tokens that need a module of this matrix in this layer.

        These are the tokens for which the request's adapter has such a module.
        """
        modules, num_layers = self._adapters.layout[matrix], self._adapters.table.shape[1]
        bits = _fields(modules)[1] & ((1 << MOST_BITS) - 1)  # without the shared bit
        if bits & self._found[LAYERS + num_layers + layer]:
            return self._tokens
        ranks = self._adapters.table[:, layer, [it.number for it in modules], 1]
        has, rows = (ranks > 0).any(dim=1).tolist(), self._adapters.rows.tolist()
        return [token for token, slot in enumerate(rows) if slot >= 0 and has[slot]]

    @functools.cached_property
    def _tokens(self) -> list[int]:
        """The tokens that have an adapter."""
        return [token for token, slot in enumerate(self._adapters.rows.tolist()) if slot >= 0]


@functools.lru_cache(maxsize=256)
def _fields(modules: tuple[AdapterModule, ...]) -> tuple[ctypes.Array[ctypes.c_int64], int, int]:
    """Return the modules as an array for compiled code, their bit mask, and the work per token.

    The work is an estimated number of multiplications.
    """
    fields = (ctypes.c_int64 * (4 * len(modules)))(*(it for own in modules for it in own))
    bits, work = 0, 0
    for it in modules:
        bits |= 1 << min(it.number, MOST_BITS)
        work += FEW_RANKS * (it.width + it.num_columns)
    return fields, bits, work
