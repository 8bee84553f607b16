"""Random adapters for checkpoints: as PEFT saves them, and merged into the base model's weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

_PREFIX = "base_model.model."
LLAMA = {
    "self_attn.q_proj": 1,
    "self_attn.k_proj": 2,
    "self_attn.v_proj": 3,
    "self_attn.o_proj": 4,
    "mlp.gate_proj": 5,
    "mlp.down_proj": 6,
    "mlp.up_proj": 7,
}
GPT2 = {"attn.c_attn": 0, "attn.c_proj": 4, "mlp.c_fc": 5, "mlp.c_proj": 6}


def module_name(family: str, layer: int, module_id: int) -> str:
    """What transformers calls a module."""
    names, layers = (GPT2, "transformer.h") if family == "gpt2" else (LLAMA, "model.layers")
    return f"{layers}.{layer}." + next(name for name, i in names.items() if i == module_id)


def random_pair(weight: Tensor, rank: int, generator: torch.Generator, transposed: bool) -> Any:
    """A `[rank, inputs]` and B `[outputs, rank]` for a base matrix."""
    outputs, inputs = weight.shape[::-1] if transposed else weight.shape
    a = torch.randn(rank, inputs, generator=generator)
    return a, torch.randn(outputs, rank, generator=generator) / 5


def save_adapter(
    folder: Path, pairs: Mapping[str, tuple[Tensor, Tensor]], **fields: Any
) -> dict[str, Tensor]:
    """A folder as PEFT saves it: module name -> (A, B); the tensors of its file."""
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "auto_mapping": None,
        "base_model_name_or_path": "somewhere",
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "loftq_config": {},
        "lora_dropout": 0.05,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "qalora_group_size": 16,
        "r": 8,
        "lora_alpha": 16,
        "target_modules": sorted({name.rpartition(".")[2] for name in pairs}),
        "use_dora": False,
        **fields,
    }
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {
        f"{_PREFIX}{name}.lora_{part}.weight": tensor.contiguous()
        for name, pair in pairs.items()
        for part, tensor in zip("AB", pair, strict=True)
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    return tensors


def save_small_adapter(folder: Path) -> None:
    """One of rank 2 for a matrix of examples/tiny_llama."""
    generator = torch.Generator().manual_seed(3)
    pair = random_pair(torch.zeros(128, 128), 2, generator, False)
    save_adapter(folder, {module_name("llama", 1, 1): pair}, r=2)


def merge(
    state: Mapping[str, Tensor],
    pairs: Mapping[str, tuple[Tensor, Tensor]],
    scales: Mapping[str, float],
    transposed: bool,
) -> dict[str, Tensor]:
    """The base model's tensors with scale * B A added; `transposed`: they lie as [in, out]."""
    merged = dict(state)
    for name, (a, b) in pairs.items():
        change = scales[name] * (b.double() @ a.double())
        weight = merged[f"{name}.weight"]
        merged[f"{name}.weight"] = (weight.double() + (change.T if transposed else change)).to(
            weight
        )
    return merged


def scale(alpha: float, rank: int, root: bool) -> float:
    return alpha / (math.sqrt(rank) if root else rank)


def save_output_adapter(folder: Path, seed: int = 0, width: int = 128, **fields: Any) -> Path:
    """An adapter of the tiny Llama, for `o_proj` of its first two layers."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.zeros(width, width)
    modules = [module_name("llama", layer, LLAMA["self_attn.o_proj"]) for layer in range(2)]
    pairs = {name: random_pair(base, 8, generator, transposed=False) for name in modules}
    save_adapter(folder, {name: (10 * a, 10 * b) for name, (a, b) in pairs.items()}, **fields)
    return folder
