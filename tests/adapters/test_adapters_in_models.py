"""Models whose tokens have adapters, beside transformers on merged weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import CONFIGS, PagedDriver, checkpoint, is_greedy, random_model
from packed_adapters import RANKS, adapter_of, packed

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


def test_a_step_whose_adapters_nobody_uses_has_the_bits_of_one_without() -> None:
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
