"""A tiny random model with adapters: as requests bring them, and merged into its weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from adapter_folders import GPT2, LLAMA, merge, module_name, random_pair
from checkpoints import CONFIGS, checkpoint, expected_logits, random_model
from torch import Tensor

from gptmanager import PeftCacheManagerConfig
from gptmanager.assembly.adapter_sizing import adapter_sizes
from gptmanager.models import load_model

RANKS = (1, 2, 3, 8, 16, 24, 33, 64)
_SIZES = {"num_hidden_layers": 2, "n_layer": 2}


@dataclass
class Tuned:
    """`source`: of the base model. By adapter, None: the base model: `networks` of transformers,
    with merged weights. `tensors`: what a request brings, `lora_weights` and `lora_config`.
    """

    source: Any
    networks: dict[int | None, Any]
    tensors: dict[int, tuple[Tensor, Tensor]]

    def lora(self, task: int | None, *, brings: bool = True) -> dict[str, Any]:
        """The tensors of a request for the adapter."""
        if task is None:
            return {}
        weights, config = self.tensors[task]
        more = {"lora_weights": weights, "lora_config": config} if brings else {}
        return {"lora_task_id": task, **more}

    def is_greedy(self, task: int | None, prompt: Sequence[int], generated: Sequence[int]) -> bool:
        """Whether transformers generates the same, up to ties of what no rounding tells apart."""
        logits = expected_logits(self.networks[task], [*prompt, *generated[:-1]])
        logits = logits[len(prompt) - 1 :]
        chosen = logits.gather(-1, torch.tensor(generated)[:, None])[:, 0]
        return bool((logits.amax(-1) - chosen <= 1e-5 * logits.abs().amax()).all())


@cache
def tuned(family: str, ranks: tuple[int, ...] = RANKS, **sizes: int) -> Tuned:
    """Adapter i has `ranks[i]`, of all modules or of some."""
    fields = {name: size for name, size in _SIZES.items() if name in CONFIGS[family]}
    base = random_model({**CONFIGS[family], **fields, **sizes})
    made = Tuned(checkpoint(base), {None: base}, {})
    state, is_gpt2 = base.state_dict(), family == "gpt2"
    ids = sorted((GPT2 if is_gpt2 else LLAMA).values())
    for task, rank in enumerate(ranks):
        generator = torch.Generator().manual_seed(task)
        pairs, rows = {}, []
        for layer in range(2):
            for module_id in ids[task % 3 :] if task % 2 else ids:
                name = module_name(family, layer, module_id)
                a, b = random_pair(state[f"{name}.weight"], rank, generator, is_gpt2)
                pairs[name] = a, b / math.sqrt(rank)
                values = torch.cat([part.reshape(-1) for part in pairs[name]])
                rows.append(((module_id, layer, rank), values))
        network = copy.deepcopy(base)
        network.load_state_dict(merge(state, pairs, dict.fromkeys(pairs, 1.0), is_gpt2))
        made.networks[task] = network
        made.tensors[task] = (
            torch.nn.utils.rnn.pad_sequence([values for _, values in rows], batch_first=True),
            torch.tensor([row for row, _ in rows], dtype=torch.int32),
        )
    return made


@cache
def cache_of(source_family: str, host_pages: int, device_pages: int) -> PeftCacheManagerConfig:
    """A cache of so many pages."""
    model = load_model(tuned(source_family).source)
    sizes = adapter_sizes(PeftCacheManagerConfig(), model, 1 << 30)
    assert sizes is not None
    widest = max(module.width for _, module in sizes.modules)
    per_page = sizes.cache.page_size // widest
    config = PeftCacheManagerConfig(
        num_host_module_layer=host_pages * per_page,
        num_device_module_layer=device_pages * per_page,
    )
    found = adapter_sizes(config, model, 0)
    assert found is not None
    assert found.cache[1:3] == (host_pages, device_pages)
    return config
