"""Models whose tokens have adapters, beside transformers on merged weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CONFIGS, PagedDriver, checkpoint, is_greedy, random_model
from packed_adapters import RANKS, adapter_of, packed

from gptmanager.kernels import CpuKernels
from gptmanager.kernels.gemm.packed_matrix import PackedMatrix
from gptmanager.kernels.lora.adapter_arguments import AdapterModule, StepAdapters
from gptmanager.models.model import load_model


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_each_row_has_the_tokens_of_its_merged_model(
    family: str, chunk: int | None, tmp_path: Path
) -> None:
    base = random_model(CONFIGS[family])
    model = load_model(checkpoint(base))
    every = (0, 4, 5, 6) if family == "gpt2" else (1, 2, 3, 4, 5, 6, 7)
    merged, adapters = [], []
    for index, rank in enumerate(RANKS):
        own = every if index else every[:2]  # one has a part of the modules
        adapter, state = adapter_of(base, family, own, rank, model.spec, tmp_path / str(index))
        network = copy.deepcopy(base)
        network.load_state_dict(state)
        merged.append(network)
        adapters.append(adapter)
    driver = PagedDriver(model, num_slots=8)
    slots = [-1, 0, 1, 2, 2, 0, -1, 1]
    step = packed(model.spec, adapters)
    driver.adapters = replace(step, rows=torch.tensor(slots, dtype=torch.int32))
    prompts = [[5, 6, 7, 8 + n % 3] * (1 + n % 2) for n in range(8)]
    generated = driver.greedy(prompts, 6, chunk)
    for slot, prompt, tokens in zip(slots, prompts, generated, strict=True):
        assert is_greedy(base if slot < 0 else merged[slot], prompt, tokens)
    assert len({tuple(tokens) for tokens in generated}) > 4


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.every(2)
def test_adapters_are_added_to_quantized_matrices(kind: Any, tmp_path: Path) -> None:
    base = random_model(CONFIGS["llama"])
    exact = load_model(checkpoint(base), kernels=CpuKernels(deterministic=True))
    adapters = [
        adapter_of(base, "llama", (1, 2, 3, 4, 5, 6, 7), rank, exact.spec, tmp_path / str(rank))[0]
        for rank in RANKS
    ]
    slots = torch.tensor([-1, 0, 1, 2], dtype=torch.int32)

    def logits(model: Any, rows_of: torch.Tensor) -> torch.Tensor:
        driver = PagedDriver(model, num_slots=4)
        driver.adapters = replace(packed(model.spec, adapters), rows=rows_of)
        prompts = [(n, [5, 6, 7, 8 + n]) for n in range(4)]
        return torch.cat([driver.forward(prompts), driver.forward([(n, [9]) for n in range(4)])])

    quantized, fast = (
        load_model(checkpoint(base), weights_dtype=kind, kernels=CpuKernels(deterministic=own))
        for own in (True, False)
    )
    for name in exact.weights:
        own, given = exact.weights[name], quantized.weights[name]
        own.copy_(given.unpacked() if isinstance(given, PackedMatrix) else given)
    wanted = logits(exact, slots)
    torch.testing.assert_close(logits(quantized, slots), wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits(fast, slots), wanted, atol=0.3, rtol=0.05)
    assert not torch.allclose(logits(quantized, slots.flip(0)), wanted, atol=0.3)


def test_a_step_with_unused_adapters_has_the_bits_of_one_without() -> None:
    model = load_model(checkpoint(random_model(CONFIGS["gpt2"])))
    rows = [(0, [1, 2, 3]), (1, [4])]
    logits = []
    for slots in (None, [-1, -1]):
        driver = PagedDriver(model, num_slots=2)
        if slots is not None:
            layout: Mapping[str, tuple[AdapterModule, ...]] = {
                it: () for it in ("qkv", "out", "up", "down")
            }
            table = torch.zeros(1, model.spec.num_layers, 1, 2, dtype=torch.int64)
            own = torch.tensor(slots, dtype=torch.int32)
            driver.adapters = StepAdapters(torch.zeros(1), own, table, layout, 1)
        logits.append(driver.forward(rows))
    assert torch.equal(*logits)
