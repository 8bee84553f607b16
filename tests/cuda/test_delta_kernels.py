"""The gated delta rule on devices: the formula in float64, any chunks, and rows without tokens."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from checkpoints import random_state
from devices import prompt
from family_configs import WIDE
from kernel_values import DTYPES, randn

from gptmanager import (
    CapacitySchedulerPolicy,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.cuda.delta_rule import covers, gated_delta
from gptmanager.kernels.attention.attention_arguments import RowSpans
from gptmanager.kernels.recurrent.delta_formulas import DeltaShape, DeltaState, DeltaTensors
from gptmanager.kernels.reference import Kernels
from gptmanager.testing import RecordingCallbacks

SHAPE = DeltaShape(2, 4, 12, 20, 4)
SHAPES = [SHAPE, DeltaShape(1, 2, 33, 40, 3), DeltaShape(1, 1, 128, 128, 4)]
LENGTHS, SLOTS, NUM_SLOTS = [11, 1, 0, 2], [2, 0, -1, 3], 4
EPS = 1e-6
SIZES = (21, 2, 9)  # of prompts


class Layer:
    """A layer with random parameters, tokens and states, which have numbers of `dtype`."""

    def __init__(self, shape: DeltaShape, dtype: torch.dtype) -> None:
        heads, tokens = shape.value_heads, sum(LENGTHS)
        self.shape, self.dtype = shape, dtype
        self.projected = randn(tokens, shape.channels + shape.values, dtype=dtype, seed=1)
        self.gates = 2 * randn(tokens, 2 * heads, seed=2)
        conv = randn(shape.width, shape.channels, dtype=dtype, seed=3) / 2
        norm = 1 + randn(shape.value_dim, dtype=dtype, seed=4) / 4
        self.tensors = DeltaTensors(conv, randn(heads, seed=5), randn(heads, seed=6), norm)
        self.inputs = randn(NUM_SLOTS, shape.width - 1, shape.channels, dtype=dtype, seed=7)
        self.memory = randn(NUM_SLOTS, heads, shape.key_dim, shape.value_dim, seed=8)

    def run(self, machine, steps):
        """Run steps of (row, first token, tokens), and return the outputs and the state."""
        starts = [0, *accumulate(LENGTHS)]
        state = DeltaState(machine.tensor(self.inputs), machine.tensor(self.memory))
        tensors = DeltaTensors(*map(machine.tensor, self.tensors))
        outputs = torch.empty(sum(LENGTHS), self.shape.values, dtype=self.dtype)
        for step in steps:
            places = [starts[row] + first + i for row, first, count in step for i in range(count)]
            bounds = [0, *accumulate(count for _, _, count in step)]
            rows = RowSpans(
                machine.tensor(torch.tensor(bounds, dtype=torch.int32)),
                machine.tensor(torch.tensor(bounds[1:], dtype=torch.int32)),
                machine.tensor(torch.tensor([SLOTS[row] for row, *_ in step], dtype=torch.int32)),
                machine.tensor(torch.zeros(1, 1, dtype=torch.int32)),
            )
            out = machine.empty((len(places), self.shape.values), self.dtype)
            given = (machine.tensor(it[places]) for it in (self.projected, self.gates))
            gated_delta(machine.launcher, out, *given, self.shape, tensors, EPS, state, rows)
            outputs[places] = out.cpu()
        return outputs, DeltaState(state.inputs.cpu(), state.memory.cpu())

    def exact(self):
        wide = DeltaTensors(*(it.double() for it in self.tensors))
        state = DeltaState(self.inputs.double(), self.memory.double())
        rows = [it for it, count in enumerate(LENGTHS) if count]
        starts = torch.tensor([0, *accumulate(LENGTHS[it] for it in rows)], dtype=torch.int32)
        slots = torch.tensor([SLOTS[it] for it in rows], dtype=torch.int32)
        spans = RowSpans(starts, starts[1:], slots, slots[:, None])
        given = self.projected.double(), self.gates.double(), self.shape, wide, EPS, state
        return Kernels(True).gated_delta(*given, spans), state


WHOLE = [[(row, 0, count) for row, count in enumerate(LENGTHS)]]
CHUNKS = [[(0, 0, 1), (3, 0, 1)], [(1, 0, 1), (2, 0, 0), (0, 1, 9)], [(3, 1, 1), (0, 10, 1)]]


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_those_of_the_formula(machine, shape: DeltaShape, dtype: torch.dtype) -> None:
    layer = Layer(shape, dtype)
    found, state = layer.run(machine, WHOLE)
    exact, last = layer.exact()

    relative = {torch.float32: 2e-5, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(found.double(), exact, rtol=relative, atol=relative / 8)
    assert torch.equal(state.inputs.double(), last.inputs)
    assert (state.memory - last.memory).abs().max() < 2e-5 * last.memory.std()


def test_a_token_has_its_bits_in_any_chunk(machine) -> None:
    layer = Layer(SHAPE, torch.bfloat16)
    (whole, last), (chunked, state) = layer.run(machine, WHOLE), layer.run(machine, CHUNKS)

    assert torch.equal(whole, chunked)
    assert torch.equal(last.inputs, state.inputs) and torch.equal(last.memory, state.memory)
    assert torch.equal(state.memory[1], layer.memory[1])  # the slot of no row


def test_rows_have_no_race(checked_machine) -> None:
    Layer(SHAPE, torch.float32).run(checked_machine, WHOLE)


def test_larger_sizes_are_not_covered() -> None:
    assert covers(SHAPES[-1])
    for sizes in ((1, 1, 129, 64, 4), (1, 1, 64, 129, 4), (1, 1, 64, 64, 9)):
        assert not covers(DeltaShape(*sizes))


def test_a_manager_answers_as_on_the_cpu(toolchain) -> None:
    """Chunks, pauses, and generation steps that are captured."""
    config = {**WIDE["qwen3_5_text wide"], "model_type": "qwen3_5_text"}
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
