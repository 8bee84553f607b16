"""Random LoRA adapters for a model's attention, and their assignment to the requests of a load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptmanager.models.decoder.lora_modules import lora_modules
from gptmanager.models.read_spec import read_spec
from gptmanager.request.adapter_modules import LORA_MODULE_IDS

_MODULES = [LORA_MODULE_IDS[name] for name in ("attn_q", "attn_k", "attn_v", "attn_dense")]
_DEVIATION = 0.01


class AdapterLoad(NamedTuple):
    """Adapters, and the requests that use them.

    `adapters`: the (lora_weights, lora_config) pair of each task id. `tasks`: the task id of each
    request, or None for a request without an adapter.
    """

    adapters: Sequence[tuple[Tensor, Tensor]]
    tasks: Sequence[int | None]

    def only_first(self) -> AdapterLoad:
        """Return a load in which only the first request has an adapter.

        A run of this load measures how much one adapter slows down the requests that have none.
        """
        return self._replace(tasks=[self.tasks[0], *[None] * (len(self.tasks) - 1)])


def adapter_load(
    config: Mapping[str, Any], num_adapters: int, size: int, num_requests: int, seed: int
) -> AdapterLoad:
    """Draw random adapters of rank `size` for the attention projections of each layer.

    Request i uses adapter `i % num_adapters`.
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
