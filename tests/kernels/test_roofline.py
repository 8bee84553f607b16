"""Floors: those of Llama-3.1-8B on an H200 are known."""

from __future__ import annotations

import pytest
import torch

from gptmanager.bench.load import LLAMA_8B, uniform_requests
from gptmanager.bench.roofline import Ceilings, ModelShape, measure_ceilings
from gptmanager.bench.timing import Stopwatch

H200 = Ceilings(4.3e12, 790e12, "bfloat16")
SHAPE = ModelShape.of(LLAMA_8B, 2, 2)


def test_parameters():
    assert SHAPE.layer_params == pytest.approx(6.979e9, rel=1e-3)
    assert SHAPE.kv_bytes_per_token == 131072
    assert ModelShape.of({"model_type": "gpt2"}, 2, 2) is None
    assert ModelShape.of({**LLAMA_8B, "head_dim": 64}, 2, 4).kv_bytes_per_token == 131072


@pytest.mark.parametrize(
    ("batch", "context", "milliseconds"),
    [(1, 1024, 3.52), (32, 1024, 4.49), (128, 1024, 7.49), (256, 1024, 12.85), (64, 4096, 11.48)],
)
def test_a_generation_step(batch, context, milliseconds):
    assert SHAPE.step_s(H200, batch, context) * 1e3 == pytest.approx(milliseconds, abs=0.01)


@pytest.mark.parametrize(("tokens", "milliseconds"), [(128, 2.27), (512, 9.13), (4096, 77.9)])
def test_a_context_phase(tokens, milliseconds):
    assert SHAPE.context_s(H200, tokens) * 1e3 == pytest.approx(milliseconds, rel=2e-3)


def test_the_load_that_others_run():
    requests = uniform_requests(256, (100, 1024), (100, 1024), LLAMA_8B["vocab_size"])
    lengths = [(len(prompt), new_tokens) for prompt, new_tokens in requests]
    assert [sum(column) for column in zip(*lengths, strict=True)] == [142827, 133966]
    assert SHAPE.load_s(H200, lengths, 256) == pytest.approx(10.08, abs=0.01)
    assert SHAPE.load_s(H200, lengths, 128) > 11


def test_a_load_in_which_nothing_generates():
    seconds = SHAPE.load_s(H200, [(512, 1)] * 3, 2)
    assert seconds == pytest.approx(3 * SHAPE.context_s(H200, 512))


def test_ceilings_are_the_best_of_what_is_measured():
    class Timer:
        def prepare(self, run, num_sets):
            run(0)
            times = iter([4.0, 2.0, 3.0, 5.0, 4.0])
            return Stopwatch(lambda: next(times), "clock")

    ceilings = measure_ceilings(Timer(), torch.device("cpu"), torch.float32, 1000, 8)
    assert ceilings == Ceilings(1000.0, 8**3, "float32")
    assert ceilings.floor_s(3000, 512) == 3.0
    assert ceilings.floor_s(10, 2048) == 4.0
    assert ceilings.report()["matmul_dtype"] == "float32"
