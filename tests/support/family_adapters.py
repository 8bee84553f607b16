"""Adapters for all modules of a family's checkpoint that may have one, and their merged models."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from adapter_folders import merge, random_pair, save_adapter
from checkpoints import PagedDriver
from family_runs import family_folder, tokens
from safetensors.torch import load_file
from torch import Tensor

from gptmanager.assembly.adapter_sizing import adapter_sizes
from gptmanager.config import PeftCacheManagerConfig
from gptmanager.memory import AdapterPool
from gptmanager.peft_cache import AdapterRow, PageCopy
from gptmanager.peft_cache.layout import pack
from gptmanager.request.adapter import AdapterTensors

_RANK = 3
_OTHER = (
    r"norm|\.experts\.|router|gate\.(weight|wg)|attn\.gate_proj|expert_gate|embed|lm_head|wte|wpe"
    r"|correction|latent_proj|per_layer|[qk]v?_[ab]_proj"
)
_STEPS = (
    [(0, tokens(9, 1)), (1, tokens(12, 2))],
    [(0, [5]), (1, [6])],
)


def save_family_adapter(name: str, folder: Path) -> dict[str, Tensor]:
    """Save an adapter in PEFT's form; return the checkpoint's tensors merged with it."""
    generator = torch.Generator().manual_seed(7)
    state, transposed = load_file(family_folder(name) / "model.safetensors"), name == "gpt2"
    other = re.compile(_OTHER + (r"|q_proj" if name.startswith(("deepseek", "sarvam_mla")) else ""))
    modules = [
        key.removesuffix(".weight")
        for key, tensor in state.items()
        if tensor.ndim == 2 and re.search(r"\.\d+\.", key) and not other.search(key)
    ]
    assert len(modules) >= 4 * 4 - 8  # of four layers, and fused ones have fewer
    pairs = {it: random_pair(state[f"{it}.weight"], _RANK, generator, transposed) for it in modules}
    pairs = {it: (a, 0.2 * b) for it, (a, b) in pairs.items()}
    save_adapter(folder, pairs, r=_RANK, lora_alpha=2 * _RANK)
    return merge(state, pairs, dict.fromkeys(pairs, 2.0), transposed)


def plain_logits(model: Any) -> Tensor:
    driver = PagedDriver(model, 2, dtype=model.spec.dtype)
    return torch.cat([driver.forward(rows) for rows in _STEPS])


def adapted_logits(model: Any, weights: Any, config: Any) -> Tensor:
    """The same where both sequences have the adapter, which goes through the pages of its cache."""
    limits = PeftCacheManagerConfig(
        optimal_adapter_size=4, max_adapter_size=8, host_cache_size=1 << 24
    )
    sizes = adapter_sizes(limits, model, 1 << 24)
    assert sizes is not None
    pool = AdapterPool(
        *(sizes.cache, 8, sizes.torch_dtype),
        modules=dict(sizes.modules),
        num_layers=sizes.num_layers,
        share=model.adapter_share,
    )
    given = AdapterTensors(weights, config, sizes.limits)
    rows = [AdapterRow(*row) for row in given.row_sizes()]
    packing = pack(rows, sizes.cache.page_size, sizes.cache.first_layers)
    pages = range(len(packing.lengths))
    pool.put(pages, rows, packing, pool.kept(given.read()))
    pool.copy(PageCopy(*it) for it in zip(pages, pages, packing.lengths, strict=True))
    pool.place(0, rows, packing, pages)
    driver = PagedDriver(model, 2, dtype=model.spec.dtype)
    driver.adapters = pool.step(torch.tensor([0, 0], dtype=torch.int32))
    return torch.cat([driver.forward(rows) for rows in _STEPS])
