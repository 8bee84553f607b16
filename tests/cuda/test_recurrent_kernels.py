"""Recurrent layers on devices: the formula in float64, any chunks, and rows without tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoints import random_state
from devices import prompt
from family_configs import WIDE
from far_pages import FAR, far_pages
from kernel_values import DTYPES, randn
from recurrent_rows import in_steps

from gptmanager import (
    CapacitySchedulerPolicy,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.cuda import delta_rule, state_space
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
from gptmanager.testing import RecordingCallbacks

DELTA, SPACE = DeltaShape(2, 4, 12, 20, 4), StateSpaceShape(4, 20, 12, 2, 4)
SHAPES = [
    *(DELTA, DeltaShape(1, 2, 33, 40, 3), DeltaShape(1, 1, 128, 128, 4)),
    # a part of the columns for a second block, and more rows of a memory than the small kernel has
    *(SPACE, StateSpaceShape(2, 72, 132, 1, 3, norm_groups=2)),
    # more outputs to normalize than a block has threads
    StateSpaceShape(17, 64, 8, 1, 2),
]
LENGTHS, SLOTS, NUM_SLOTS = [19, 1, 0, 2], [2, 0, -1, 3], 4
WHOLE = [list(enumerate(LENGTHS))]
CHUNKS = [[(0, 1), (3, 1)], [(1, 1), (2, 0), (0, 9)], [(3, 1), (0, 9)]]
EPS = 1e-6
SIZES = (21, 2, 9)  # lengths of prompts


class Layer:
    """A layer with random parameters, tokens and states, which have numbers of `dtype`."""

    def __init__(self, shape: Any, dtype: torch.dtype) -> None:
        self.shape, self.dtype, tokens = shape, dtype, sum(LENGTHS)
        self.is_delta = isinstance(shape, DeltaShape)
        heads = shape.value_heads if self.is_delta else shape.heads
        conv = randn(shape.width, shape.channels, dtype=dtype, seed=3) / 2
        of_heads = [randn(heads, seed=seed) for seed in (5, 6, 9)]
        if self.is_delta:
            stride, memory = shape.channels + shape.values, (shape.key_dim, shape.value_dim)
            norm = 1 + randn(shape.value_dim, dtype=dtype, seed=4) / 4
            self.parameters = (conv, *of_heads[:2], norm)
        else:
            stride, memory = shape.projected, (shape.state, shape.head_dim)
            norm = 1 + randn(shape.inner, dtype=dtype, seed=4) / 4
            bias = randn(shape.channels, dtype=dtype, seed=10) if shape.width > 2 else None
            self.parameters = (conv, bias, *of_heads, norm)
        self.given = [randn(tokens, stride, dtype=dtype, seed=1)]
        if self.is_delta:
            self.given.append(2 * randn(tokens, 2 * heads, seed=2))
        self.inputs = randn(NUM_SLOTS, shape.width - 1, shape.channels, dtype=dtype, seed=7)
        self.memory = randn(NUM_SLOTS, heads, *memory, seed=8)

    def compute(self, kernels, given, parameters, state, rows):
        if self.is_delta:
            own = DeltaTensors(*parameters), EPS, DeltaState(*state), rows
            return kernels.gated_delta(*given, self.shape, *own)
        conv, bias, *others = parameters
        own = StateSpaceTensors(Filter(conv, bias), *others), EPS, StateSpaceState(*state), rows
        return kernels.state_space(*given, self.shape, *own)

    def run(self, machine, steps):
        """Run steps of (row, tokens); return the outputs and the states."""
        state = machine.tensor(self.inputs), machine.tensor(self.memory)
        found = self.run_on(machine, steps, state, SLOTS)
        return found, [it.cpu() for it in state]

    def run_on(self, machine, steps, state, slots):
        kernels = CudaKernels(machine.launcher)
        parameters = [None if it is None else machine.tensor(it) for it in self.parameters]

        def compute(places, rows):
            given = [machine.tensor(it[places]) for it in self.given]
            own = RowSpans(*(machine.tensor(it) for it in rows[:4]))
            return self.compute(kernels, given, parameters, state, own).cpu()

        return torch.cat(in_steps(steps, compute, LENGTHS, slots))

    def exact(self):
        """Return what the reference computes in float64."""
        parameters = [None if it is None else it.double() for it in self.parameters]
        state = self.inputs.double(), self.memory.double()

        def compute(places, rows):
            given = [it[places].double() for it in self.given]
            return self.compute(Kernels(True), given, parameters, state, rows)

        return torch.cat(in_steps(WHOLE, compute, LENGTHS, SLOTS)), state


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_those_of_the_formula(machine, shape, dtype: torch.dtype) -> None:
    layer = Layer(shape, dtype)
    found, (inputs, memory) = layer.run(machine, WHOLE)
    exact, last = layer.exact()

    relative = {torch.float32: 2e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(found.double(), exact, rtol=relative, atol=relative / 8)
    assert torch.equal(inputs.double(), last[0])
    assert (memory - last[1]).abs().max() < 2e-5 * last[1].std()


@pytest.mark.parametrize("shape", [DELTA, SPACE])
def test_a_token_has_its_bits_in_any_chunk(machine, shape) -> None:
    layer = Layer(shape, torch.bfloat16)
    (whole, last), (chunked, state) = layer.run(machine, WHOLE), layer.run(machine, CHUNKS)

    assert torch.equal(whole, chunked) and all(map(torch.equal, last, state))
    assert torch.equal(state[1][1], layer.memory[1])  # the slot of no row


@pytest.mark.parametrize("shape", [DELTA, SPACE])
def test_rows_have_no_race(checked_machine, shape) -> None:
    Layer(shape, torch.float32).run(checked_machine, WHOLE)


@pytest.mark.parametrize("shape", [DeltaShape(1, 1, 8, 8, 4), StateSpaceShape(1, 8, 8, 1, 4)])
def test_states_beyond_the_largest_int_are_found(machine, shape) -> None:
    layer = Layer(shape, torch.float32)
    near, last = layer.run(machine, WHOLE)
    own = layer.inputs, layer.memory
    num_far = max(FAR // it[0].numel() for it in own) + 1
    far = [far_pages(machine, it, num_far) for it in own]
    slots = [slot + num_far if slot >= 0 else slot for slot in SLOTS]
    assert torch.equal(layer.run_on(machine, WHOLE, far, slots), near)
    for state, expected in zip(far, last, strict=True):
        assert torch.equal(state[num_far:].cpu(), expected)


def test_larger_sizes_are_not_covered() -> None:
    assert delta_rule.covers(SHAPES[2]) and state_space.covers(StateSpaceShape(1, 16384, 256, 1, 8))
    for sizes in ((1, 1, 129, 64, 4), (1, 1, 64, 129, 4), (1, 1, 64, 64, 9)):
        assert not delta_rule.covers(DeltaShape(*sizes))
    others = (1, 64, 260, 1, 4), (1, 16388, 16, 1, 4), (1, 64, 16, 1, 9), (1, 18, 16, 1, 4)
    for sizes in (*others, (1, 64, 18, 1, 4)):
        assert not state_space.covers(StateSpaceShape(*sizes))


@pytest.mark.parametrize("name", ["qwen3_5_text wide", "bamba wide"])
def test_a_manager_answers_as_on_the_cpu(toolchain, name) -> None:
    """Chunks, pauses, and generation steps that are captured."""
    config = {**WIDE[name], "model_type": name.split()[0]}
    source, found = (config, random_state(config)), []
    for device in ("cpu", "emulator"):
        host = RecordingCallbacks(
            InferenceRequest.from_tokens(i, prompt(i, size), 10) for i, size in enumerate(SIZES)
        )
        params = OptionalParams(
            kv_cache_config=KvCacheConfig(max_tokens=48, tokens_per_block=8),
            enable_chunked_context=True,
            **{"max_num_tokens": 16, "max_batch_size": 3, "dtype": "float32", "device": device},
        )
        policy = SchedulerConfig(CapacitySchedulerPolicy.MAX_UTILIZATION)
        given = source, ModelType.INFLIGHT_FUSED_BATCHING, 1, policy
        with GptManager(*given, optional_params=params, **host.keywords()) as manager:
            assert manager.wait_idle(120), manager.exception
        found.append([host.output(i) for i in range(len(SIZES))])
    assert found[0] == found[1]
