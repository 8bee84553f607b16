"""Random LoRA adapters of a model's attention, and which requests of a load have which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptmanager.models.lora_modules import lora_modules
from gptmanager.models.read_spec import read_spec
from gptmanager.request.adapter import LORA_MODULE_IDS

_MODULES = [LORA_MODULE_IDS[name] for name in ("attn_q", "attn_k", "attn_v", "attn_dense")]
_DEVIATION = 0.01


class AdapterLoad(NamedTuple):
    """`adapters`: lora_weights and lora_config, by task id. `tasks`: of each request, or None."""

    adapters: Sequence[tuple[Tensor, Tensor]]
    tasks: Sequence[int | None]

    def of_first_alone(self) -> AdapterLoad:
        """Only the first request has an adapter: what the others pay for that."""
        return self._replace(tasks=[self.tasks[0], *[None] * (len(self.tasks) - 1)])


def adapter_load(
    config: Mapping[str, Any], num_adapters: int, size: int, num_requests: int, seed: int
) -> AdapterLoad:
    """`num_adapters` of rank `size`, for queries, keys, values and output of each layer; request i
    has adapter i modulo their number.
    """
    spec, generator = read_spec(config), torch.Generator().manual_seed(seed)
    modules = lora_modules(spec)
    width = size * max(modules[module_id].width for module_id in _MODULES)
    rows = [[module_id, layer, size] for layer in range(spec.num_layers) for module_id in _MODULES]
    adapters = [
        (_DEVIATION * torch.randn(len(rows), width, generator=generator), torch.tensor(rows))
        for _ in range(num_adapters)
    ]
    return AdapterLoad(adapters, [number % num_adapters for number in range(num_requests)])
