"""Checkpoints as MLX writes them: in floats, or with matrices quantized in its mode "affine"."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from family_runs import family_folder
from safetensors.torch import load_file, save_file
from torch import Tensor

_PLUS_ONE = ("layernorm.weight", "model.norm.weight", ".q_norm.weight", ".k_norm.weight")
_LEFT_OUT = "moe_statics.e_score_correction_bias"  # the correction of ERNIE 4.5
_STACK = {"llama4_text": ".", "gemma4_text": ".switch_glu."}
_CONVOLUTIONS = ("conv1d.weight", "conv.conv.weight")
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_NEMOTRON = {"up_proj": "fc1", "down_proj": "fc2"}
_GRANITE = {
    "experts.gate_up_proj": "input_linear.weight",
    "experts.down_proj": "output_linear.weight",
}


def mlx_folder(name: str, target: Path) -> Path:
    """Write the checkpoint of a family as MLX does."""
    source = family_folder(name)
    config = json.loads((source / "config.json").read_text())
    state = load_file(source / "model.safetensors")
    if config.get("tie_word_embeddings"):
        state.pop("lm_head.weight", None)
    if name == "gpt2":
        matrices = re.compile(r"h\.\d+\..*c_\w+\.weight")
        state = {key.removeprefix("transformer."): it for key, it in state.items()}
        state = {k: it.T if matrices.fullmatch(k) else it for k, it in state.items()}
        state = {f"model.{key}": it for key, it in state.items()}
    if any("linear_attn.conv1d" in key for key in state):
        state = {k: it + 1 if k.endswith(_PLUS_ONE) else it for k, it in state.items()}
    state = {k: it.movedim(2, 1) if k.endswith(_CONVOLUTIONS) else it for k, it in state.items()}
    if config["model_type"] == "lfm2_moe":
        state = {re.sub(r"\bw[123]\b", lambda it: _MIXTRAL[it[0]], k): state[k] for k in state}
    if config["model_type"] == "granitemoe_swa":
        names = re.compile("|".join(_GRANITE))
        state = {names.sub(lambda it: _GRANITE[it[0]], key): state[key] for key in state}
    if config["model_type"] == "nemotron_h":
        expert = re.compile(r"(?<=\d\.)(up|down)_proj\b")
        state = {expert.sub(lambda it: _NEMOTRON[it[0]], key): state[key] for key in state}
    state = {key: it for key, it in state.items() if not key.endswith(_LEFT_OUT)}
    state = _apart(state, config)
    state = separated(state) if name == "gpt_oss" else stacked(state, module_of(name))
    target.mkdir(exist_ok=True)
    save_file(
        {key: it.contiguous() for key, it in state.items()},
        target / "model.safetensors",
        {"format": "mlx"},
    )
    shutil.copy(source / "config.json", target)
    return target


def _stack(module: str, config: Mapping[str, Any]) -> str:
    """Return the prefix of the tensors with all experts of a module."""
    ending = _STACK.get(config["model_type"])
    return module.removesuffix("experts") + "switch_mlp." if ending is None else module + ending


def _apart(state: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Split the gates of Granite from their other halves, and keys of DeepSeek V3 from values."""
    found: dict[str, Tensor] = {}
    for key, tensor in state.items():
        module = key.rpartition(".")[0]
        if key.endswith("self_attn.kv_b_proj.weight") and config["model_type"] == "deepseek_v3":
            own = module.removesuffix("kv_b_proj")
            heads = tensor.unflatten(0, (config["num_attention_heads"], -1))
            keys = heads[:, : config["qk_nope_head_dim"]]
            found[f"{own}embed_q.weight"] = keys.mT
            found[f"{own}unembed_out.weight"] = heads[:, config["qk_nope_head_dim"] :]
        elif key.endswith("experts.gate_up_proj") and config["model_type"] != "gpt_oss":
            # Llama 4 stores [in, out]
            whole = tensor if tensor.shape[2] == config["hidden_size"] else tensor.mT
            own = _stack(module, config)
            gate, up = whole.chunk(2, dim=-2)
            found |= {f"{own}gate_proj.weight": gate, f"{own}up_proj.weight": up}
        elif key.endswith("experts.down_proj") and config["model_type"] != "gpt_oss":
            own = _stack(module, config)
            whole = tensor if tensor.shape[1] == config["hidden_size"] else tensor.mT
            found[f"{own}down_proj.weight"] = whole
        elif "shared_mlp" in key and config.get("num_local_experts"):
            found[key] = tensor
        elif key.endswith("input_linear.weight"):
            own = module.removesuffix("input_linear").replace("shared_mlp", "mlp")
            own += "switch_mlp." if tensor.dim() == 3 else ""
            gate, up = tensor.chunk(2, dim=-2)
            found |= {f"{own}gate_proj.weight": gate, f"{own}up_proj.weight": up}
        elif key.endswith("output_linear.weight"):
            own = module.removesuffix("output_linear").replace("shared_mlp", "mlp")
            own += "switch_mlp." if tensor.dim() == 3 else ""
            found[f"{own}down_proj.weight"] = tensor
        else:
            found[key] = tensor
    return found


def separated(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Write the experts of gpt-oss as MLX does: gate and up apart, each `[experts, out, in]`."""
    found: dict[str, Tensor] = {}
    for key, tensor in state.items():
        match = re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj(_bias)?", key)
        if match is None:
            found[key] = tensor
            continue
        own, kind = (tensor, "bias") if match[3] else (tensor.mT, "weight")
        halves = {"gate": own[:, ::2], "up": own[:, 1::2]}
        for name, part in ({"down": own} if match[2] == "down" else halves).items():
            found[f"{match[1]}.{name}_proj.{kind}"] = part
    return found


def stacked(state: dict[str, Tensor], module: str = "switch_mlp") -> dict[str, Tensor]:
    """Join the experts of a layer under the name that MLX gives them."""
    found: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = {}
    for key, tensor in state.items():
        match = re.fullmatch(r"(.*)\.experts\.\d+\.(\w+)\.(\w+)", key)
        if match is None:
            found[key] = tensor
        else:
            own = f"{match[1]}.{module}.{_MIXTRAL.get(match[2], match[2])}.{match[3]}"
            experts.setdefault(own, []).append(tensor)
    return found | {key: torch.stack(tensors) for key, tensors in experts.items()}


def module_of(name: str) -> str:
    """The name that MLX gives to the stacked experts of a family."""
    return "experts" if name.startswith("dots1") else "switch_mlp"


def quantize(matrix: Tensor, bits: int, size: int) -> dict[str, Tensor]:
    """Quantize each `size` columns of the rows of a matrix, with bfloat16 scales and biases."""
    groups = matrix.unflatten(-1, (-1, size))
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low) / ((1 << bits) - 1)).clamp(min=1e-7).bfloat16()
    biases = low.bfloat16()
    steps = (groups - biases.float()[..., None]) / scales.float()[..., None]
    integers = steps.round().clamp(0, (1 << bits) - 1).long().flatten(-2)
    words = integers.unflatten(-1, (-1, 32 // bits)) << torch.arange(0, 32, bits)
    return {"weight": words.sum(-1).to(torch.uint32), "scales": scales, "biases": biases}


def dequantize(packed: Mapping[str, Tensor], bits: int, size: int) -> Tensor:
    words, shifts = packed["weight"].long(), torch.arange(0, 32, bits)
    integers = (words[..., None] >> shifts & (1 << bits) - 1).flatten(-2)
    scales, biases = (packed[it].float()[..., None] for it in ("scales", "biases"))
    return (integers.unflatten(-1, (-1, size)) * scales + biases).flatten(-2)


def quantized_folders(name: str, target: Path) -> tuple[Path, Path]:
    """Write a family in 4 bits as MLX does, and the same numbers in floats as transformers does.

    Routers, and every third other matrix, have 8 bits; a matrix whose rows are not whole groups
    stays in floats.
    """
    source, (packed, floats) = family_folder(name), (target / "packed", target / "floats")
    config = json.loads((source / "config.json").read_text())
    quantization: dict[str, Any] = {"group_size": 32, "bits": 4, "mode": "affine"}
    state = load_file(source / "model.safetensors")
    theirs, ours = {}, {}
    if config.get("tie_word_embeddings"):
        state.pop("lm_head.weight", None)
    for number, (key, tensor) in enumerate(state.items()):
        theirs[key] = ours[key] = tensor
        if tensor.dim() != 2 or tensor.shape[1] % 32:
            continue
        module = key.removesuffix(".weight")
        is_expert = ".experts." in key
        bits = 8 if not is_expert and (module.endswith("gate") or number % 3 == 0) else 4
        own = quantize(tensor, bits, 32)
        ours[key] = dequantize(own, bits, 32)
        del theirs[key]
        theirs |= {f"{module}.{ending}": part for ending, part in own.items()}
        if bits != 4:
            quantization[module] = {"group_size": 32, "bits": bits}
    fields = {"quantization": quantization, "quantization_config": quantization}
    for folder, tensors, own_fields, kind in (
        (packed, stacked(theirs, module_of(name)), fields, "mlx"),
        (floats, ours, {}, "pt"),
    ):
        folder.mkdir()
        whole = {key: it.contiguous() for key, it in tensors.items()}
        save_file(whole, folder / "model.safetensors", {"format": kind})
        (folder / "config.json").write_text(json.dumps({**config, **own_fields}))
    return packed, floats
