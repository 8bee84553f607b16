"""Kernel benchmark cases for the gated delta rule, at the sizes of Qwen3-Next."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gptmanager.bench.kernels.cases import (
    Case,
    Contender,
    Goal,
    Prepared,
    Rig,
    Sizes,
    largest_error,
    tolerance,
)
from gptmanager.cuda.delta_rule import gated_delta
from gptmanager.kernels.attention.attention_arguments import RowSpans
from gptmanager.kernels.recurrent.delta_formulas import DeltaShape, DeltaState, DeltaTensors
from gptmanager.kernels.reference import Kernels

_EPS = 1e-6
# The goal for steps with several rows of one token each, as a multiple of the roofline. Such a step
# spends most of its time on reading and writing the states.
_TIMES_ROOFLINE = 1.3


def delta_cases(sizes: Sizes) -> list[Case]:
    """Return the cases for generation steps, and for a chunk of one context."""
    generation = [_case(sizes, rows, 1) for rows in (1, sizes.batch, sizes.rows)]
    return [*generation, _case(sizes, 1, sizes.chunk)]


def _case(sizes: Sizes, rows: int, tokens: int) -> Case:
    """Return the case of `rows` rows with `tokens` tokens each."""
    shape, itemsize = sizes.others.delta, sizes.dtype.itemsize
    memory = 4 * shape.value_heads * shape.key_dim * shape.value_dim
    inputs = (shape.width - 1) * shape.channels * itemsize
    of_token = (shape.channels + 2 * shape.values) * itemsize + 4 * 2 * shape.value_heads
    num_bytes = rows * 2 * (memory + inputs) + rows * tokens * of_token
    text = f"{rows} x {tokens}, {shape.value_heads} heads of {shape.key_dim} x {shape.value_dim}"
    goals = (Goal("roofline", _TIMES_ROOFLINE),) if tokens == 1 and rows > 1 else ()
    return Case(
        "delta_rule",
        text,
        num_bytes,
        partial(_prepare, rows, tokens, num_bytes),
        7 * rows * tokens * (memory // 4),
        (*goals, Goal("peer", 1.0, "torch")),
    )


def _prepare(num_rows: int, num_tokens: int, num_bytes: int, rig: Rig) -> Prepared:
    """Prepare one state per input set (see `Rig.num_sets`).

    Each call changes the state of its set, so only the first result of set 0 is checked.
    """
    shape, dtype, count = rig.sizes.others.delta, rig.sizes.dtype, num_rows * num_tokens
    projected = rig.randn(count, shape.channels + shape.values)
    gates = rig.randn(count, 2 * shape.value_heads, dtype=torch.float32)
    tensors = DeltaTensors(
        rig.randn(shape.width, shape.channels, scale=0.5),
        rig.randn(shape.value_heads, dtype=torch.float32),
        rig.randn(shape.value_heads, dtype=torch.float32),
        1 + rig.randn(shape.value_dim, scale=0.1),
    )
    states = [_state(rig, shape, num_rows) for _ in range(rig.num_sets(num_bytes))]
    others = [_cloned(it) for it in states]  # torch changes its own copies
    bounds = rig.ints([row * num_tokens for row in range(num_rows + 1)])
    slots = rig.ints(range(num_rows))
    rows = RowSpans(bounds, bounds.diff(), slots, slots[:, None])
    out = projected.new_empty(count, shape.values)
    given = projected, gates, shape, tensors, _EPS

    def ours(number: int) -> Tensor:
        gated_delta(rig.launcher, out, *given, states[number], rows)
        return out

    def by_torch() -> Contender:
        kernels = Kernels()
        return lambda number: kernels.gated_delta(*given, others[number], rows)

    wide = DeltaTensors(*(it.float() for it in tensors))
    state = DeltaState(*(it.float() for it in _cloned(states[0])))
    expected = Kernels().gated_delta(projected.float(), gates, shape, wide, _EPS, state, rows)
    error, peers = largest_error(expected), {"torch": by_torch}
    return Prepared(len(states), ours, error, tolerance(dtype), peers)


def _state(rig: Rig, shape: DeltaShape, num_rows: int) -> DeltaState:
    inputs = rig.randn(num_rows, shape.width - 1, shape.channels)
    size = num_rows, shape.value_heads, shape.key_dim, shape.value_dim
    return DeltaState(inputs, rig.randn(*size, dtype=torch.float32, scale=shape.key_dim**-0.5))


def _cloned(state: DeltaState) -> DeltaState:
    return DeltaState(*(it.clone() for it in state))
