"""Models whose tokens have adapters, beside transformers on merged weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_folders import merge, module_name, random_pair, save_adapter
from checkpoints import CONFIGS, PagedDriver, checkpoint, is_greedy, random_model

from gptmanager.callbacks import load_peft_adapter
from gptmanager.kernels.lora.adapter_arguments import AdapterModule, StepAdapters
from gptmanager.models.lora_modules import lora_modules
from gptmanager.models.model import load_model
from gptmanager.models.spec import ModelSpec
from gptmanager.request.adapter import Adapter, AdapterLimits, AdapterTensors

RANKS = (1, 4, 17)


def packed(spec: ModelSpec, adapters: list[Adapter]) -> StepAdapters:
    """The adapters one behind the other, each in the slot of its number."""
    modules = lora_modules(spec)
    number = {module_id: index for index, module_id in enumerate(modules)}
    table = torch.zeros(len(adapters), spec.num_layers, len(modules), 2, dtype=torch.int64)
    parts, end = [], 0
    for slot, adapter in enumerate(adapters):
        for (layer, module_id), row in adapter.rows.items():
            table[slot, layer, number[module_id]] = torch.tensor([end, row.rank])
            parts.append(row.values)
            end += row.num_elements
    layout: dict[str, tuple[AdapterModule, ...]] = {"qkv": (), "out": (), "up": (), "down": ()}
    for module_id, it in modules.items():
        own = AdapterModule(number[module_id], it.first_column, it.num_columns, it.input_width)
        layout[it.matrix] += (own,)
    rows = torch.empty(0, dtype=torch.int32)
    return StepAdapters(torch.cat(parts), rows, table, layout, max(RANKS))


def adapter_of(
    model: Any, family: str, module_ids: tuple[int, ...], rank: int, spec: ModelSpec, folder: Path
) -> tuple[Adapter, Mapping[str, torch.Tensor]]:
    """A random one, read from a folder, and the base model's weights merged with it."""
    generator = torch.Generator().manual_seed(rank)
    state, is_gpt2 = model.state_dict(), family == "gpt2"
    pairs = {}
    for layer in range(spec.num_layers):
        for module_id in module_ids:
            name = module_name(family, layer, module_id)
            weight = state[f"{name}.weight"]
            pairs[name] = random_pair(weight, rank, generator, transposed=is_gpt2)
    save_adapter(folder, pairs, r=rank, lora_alpha=2 * rank)
    limits = AdapterLimits(lora_modules(spec), spec.num_layers, spec.dtype, max(RANKS))
    adapter = AdapterTensors(*load_peft_adapter(folder), limits).read()
    return adapter, merge(state, pairs, dict.fromkeys(pairs, 2.0), transposed=is_gpt2)


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
