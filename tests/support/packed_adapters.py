"""Adapters of a small model, packed for a step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from adapter_folders import merge, module_name, random_pair, save_adapter

from gptmanager.callbacks import load_peft_adapter
from gptmanager.kernels.lora.adapter_arguments import AdapterModule, StepAdapters
from gptmanager.models.decoder.lora_modules import lora_modules
from gptmanager.models.spec import ModelSpec
from gptmanager.request.adapter import Adapter, AdapterTensors
from gptmanager.request.adapter_modules import AdapterLimits

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
