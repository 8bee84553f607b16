"""Kernel benchmark cases for recurrent layers: those of Qwen3-Next and Granite 4.0-H Small."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

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
from gptmanager.cuda.kernels import CudaKernels
from gptmanager.kernels.attention.attention_arguments import RowSpans
from gptmanager.kernels.recurrent.convolution import Filter
from gptmanager.kernels.recurrent.delta_formulas import DeltaShape, DeltaState, DeltaTensors
from gptmanager.kernels.recurrent.state_space_formulas import (
    StateSpaceShape,
    StateSpaceState,
    StateSpaceTensors,
)
from gptmanager.kernels.reference import Kernels

_EPS = 1e-6
# The goal for steps with several rows of one token each, as a multiple of the roofline. Such a step
# spends most of its time on reading and writing the states.
_TIMES_ROOFLINE = 1.3
_States = tuple[Tensor, Tensor]  # the last inputs of the convolution, the memories
_Run = Callable[[Kernels, _States, RowSpans], Tensor]


class _Kind(NamedTuple):
    """A kind of layer: the sizes of its heads and states, and what a token costs.

    `new` makes a layer with inputs for a number of tokens, in a dtype: it returns a function that
    computes them. `token_bytes`: bytes of a token's inputs and outputs. `flops`: of a token for
    each element of a memory.
    """

    part: str
    heads: int
    memory: tuple[int, int]
    inputs: tuple[int, int]
    token_bytes: int
    flops: int
    new: Callable[[Rig, int], Callable[[torch.dtype], _Run]]


def recurrent_cases(sizes: Sizes) -> list[Case]:
    """Return the cases of each kind for generation steps, and for a chunk of one context."""
    spans = [*((rows, 1) for rows in (1, sizes.batch, sizes.rows)), (1, sizes.chunk)]
    itemsize, others = sizes.dtype.itemsize, sizes.others
    kinds = _delta(others.delta, itemsize), _state_space(others.state_space, itemsize)
    return [_case(sizes, kind, *span) for kind in kinds for span in spans]


def _delta(shape: DeltaShape, itemsize: int) -> _Kind:
    def new(rig: Rig, count: int) -> Callable[[torch.dtype], _Run]:
        projected = rig.randn(count, shape.channels + shape.values)
        gates = rig.randn(count, 2 * shape.value_heads, dtype=torch.float32)
        conv = rig.randn(shape.width, shape.channels, scale=0.5)
        decay, step = rig.randn(2, shape.value_heads, dtype=torch.float32).unbind()
        norm = 1 + rig.randn(shape.value_dim, scale=0.1)

        def run_in(dtype: torch.dtype) -> _Run:
            tensors = DeltaTensors(conv.to(dtype), decay, step, norm.to(dtype))
            given = projected.to(dtype), gates, shape, tensors, _EPS
            return lambda kernels, states, rows: kernels.gated_delta(
                *given, DeltaState(*states), rows
            )

        return run_in

    token_bytes = (shape.channels + 2 * shape.values) * itemsize + 4 * 2 * shape.value_heads
    memory, inputs = (shape.key_dim, shape.value_dim), (shape.width - 1, shape.channels)
    return _Kind("delta_rule", shape.value_heads, memory, inputs, token_bytes, 7, new)


def _state_space(shape: StateSpaceShape, itemsize: int) -> _Kind:
    def new(rig: Rig, count: int) -> Callable[[torch.dtype], _Run]:
        projected = rig.randn(count, shape.projected)
        conv = rig.randn(shape.width, shape.channels, scale=0.5), rig.randn(shape.channels)
        decay, step, skip = rig.randn(3, shape.heads, dtype=torch.float32).unbind()
        norm = 1 + rig.randn(shape.inner, scale=0.1)

        def run_in(dtype: torch.dtype) -> _Run:
            own = Filter(*(it.to(dtype) for it in conv))
            tensors = StateSpaceTensors(own, decay, step, skip, norm.to(dtype))
            given = projected.to(dtype), shape, tensors, _EPS
            return lambda kernels, states, rows: kernels.state_space(
                *given, StateSpaceState(*states), rows
            )

        return run_in

    token_bytes = (shape.projected + shape.inner) * itemsize
    memory, inputs = (shape.state, shape.head_dim), (shape.width - 1, shape.channels)
    return _Kind("state_space", shape.heads, memory, inputs, token_bytes, 5, new)


def _case(sizes: Sizes, kind: _Kind, rows: int, tokens: int) -> Case:
    """Return the case of `rows` rows with `tokens` tokens each."""
    num_elements = kind.heads * kind.memory[0] * kind.memory[1]
    state_bytes = 4 * num_elements + kind.inputs[0] * kind.inputs[1] * sizes.dtype.itemsize
    num_bytes = rows * 2 * state_bytes + rows * tokens * kind.token_bytes
    goals = (Goal("roofline", _TIMES_ROOFLINE),) if tokens == 1 and rows > 1 else ()
    return Case(
        kind.part,
        f"{rows} x {tokens}, {kind.heads} heads of {kind.memory[0]} x {kind.memory[1]}",
        num_bytes,
        partial(_prepare, kind, rows, tokens, num_bytes),
        kind.flops * rows * tokens * num_elements,
        (*goals, Goal("peer", 1.0, "torch")),
    )


def _prepare(kind: _Kind, num_rows: int, num_tokens: int, num_bytes: int, rig: Rig) -> Prepared:
    """Prepare one state per input set (see `Rig.num_sets`).

    Each call changes the state of its set, so only the first result of set 0 is checked.
    """
    run_in, dtype = kind.new(rig, num_rows * num_tokens), rig.sizes.dtype
    states = [_states(rig, kind, num_rows) for _ in range(rig.num_sets(num_bytes))]
    others = [_cloned(it) for it in states]  # torch changes its own copies
    bounds = rig.ints([row * num_tokens for row in range(num_rows + 1)])
    slots = rig.ints(range(num_rows))
    rows = RowSpans(bounds, bounds.diff(), slots, slots[:, None])

    def contender(kernels: Kernels, states: Sequence[_States]) -> Contender:
        run = run_in(dtype)
        return lambda number: run(kernels, states[number], rows)

    inputs, memory = _cloned(states[0])
    expected = run_in(torch.float32)(Kernels(), (inputs.float(), memory), rows)
    return Prepared(
        len(states),
        contender(CudaKernels(rig.launcher), states),
        largest_error(expected),
        tolerance(dtype),
        {"torch": lambda: contender(Kernels(), others)},
    )


def _states(rig: Rig, kind: _Kind, num_rows: int) -> _States:
    memory, scale = (num_rows, kind.heads, *kind.memory), kind.memory[0] ** -0.5
    inputs = rig.randn(num_rows, *kind.inputs)
    return inputs, rig.randn(*memory, dtype=torch.float32, scale=scale)


def _cloned(states: _States) -> _States:
    return states[0].clone(), states[1].clone()
