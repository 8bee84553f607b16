"""GGUF files written byte by byte, and models of transformers as llama.cpp's converter has them."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

F32 = 0
_KINDS = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "u8": 10, "i8": 11}
# the tensors of a layer: their names there -> here
_LLAMA = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
}
_SANDWICH = {
    **_LLAMA,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_GPT2 = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
_OUTSIDE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
}
_KEYS = {
    "hidden_size": "embedding_length",
    "n_embd": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "n_layer": "block_count",
    "num_attention_heads": "attention.head_count",
    "n_head": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "n_positions": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_epsilon": "attention.layer_norm_epsilon",
    "head_dim": "attention.key_length",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
Stored = tuple[int, np.ndarray]  # the number of a type; bytes or floats, rows along the last axis


def text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def value_bytes(value: Any) -> bytes:
    """A value with its type in front of it."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    kind = _KINDS[value.dtype.str[1:]]
    return struct.pack("<IIQ", 9, kind, len(value)) + value.tobytes()


def gguf_bytes(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Stored],
    *,
    version: int = 3,
    sizes: Mapping[int, tuple[int, int]] | None = None,
) -> bytes:
    """A file. `sizes`: type -> elements and bytes of a block, of those that are not F32."""
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    header += b"".join(text(key) + value_bytes(value) for key, value in metadata.items())
    data = b""
    for name, (kind, values) in tensors.items():
        shape = list(values.shape)
        if kind != F32:
            elements, num_bytes = (sizes or {})[kind]
            shape[-1] = shape[-1] // num_bytes * elements
        header += text(name) + struct.pack("<I", len(shape))
        header += struct.pack(f"<{len(shape)}Q", *shape[::-1])
        header += struct.pack("<IQ", kind, len(data))
        data += values.tobytes()
        data += bytes(-len(data) % 32)
    return header + bytes(-len(header) % 32) + data


def write_gguf(path: Path, *content: Any, **options: Any) -> Path:
    path.write_bytes(gguf_bytes(*content, **options))
    return path


def model_metadata(architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What llama.cpp's converter writes of a config."""
    found: dict[str, Any] = {"general.architecture": architecture}
    for field, key in _KEYS.items():
        if config.get(field) is not None:
            found[f"{architecture}.{key}"] = config[field]
    rope = config.get("rope_parameters") or {}
    theta = rope.get("rope_theta", rope.get("full_attention", {}).get("rope_theta"))
    if theta is not None:
        found[f"{architecture}.rope.freq_base"] = float(theta)
    if architecture == "gpt2":
        found["gpt2.feed_forward_length"] = config.get("n_inner") or 4 * config["n_embd"]
    return found


def model_tensors(
    architecture: str, config: Mapping[str, Any], state: Mapping[str, Tensor]
) -> dict[str, Stored]:
    """The tensors of a model in float32, as llama.cpp's converter writes them."""
    table = {"gpt2": _GPT2, "gemma2": _SANDWICH, "gemma3": _SANDWICH}.get(architecture, _LLAMA)
    found: dict[str, Stored] = {}
    for name, tensor in state.items():
        module, _, kind = name.rpartition(".")
        if module == "lm_head" and config.get("tie_word_embeddings"):
            continue
        theirs = _OUTSIDE.get(module)
        if theirs is None:
            layer, inner = (
                module.removeprefix("transformer.h.").removeprefix("model.layers.").split(".", 1)
            )
            theirs = f"blk.{layer}.{table[inner]}"
        tensor = tensor.detach().float()
        if architecture == "gpt2" and theirs.startswith("blk.") and tensor.dim() == 2:
            tensor = tensor.t()
        if architecture == "llama" and theirs.endswith(("attn_q", "attn_k")):
            heads = "num_attention_heads" if theirs.endswith("q") else "num_key_value_heads"
            tensor = _permuted(tensor, config[heads])
        if architecture.startswith("gemma") and module.endswith("norm"):
            tensor = tensor + 1
        found[f"{theirs}.{kind}"] = F32, np.ascontiguousarray(tensor.numpy())
    return found


def _permuted(tensor: Tensor, heads: int) -> Tensor:
    """Return a tensor with its rows in the order of llama.cpp's converter."""
    split = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return split.swapaxes(1, 2).reshape(tensor.shape)


def save_gguf(path: Path, architecture: str, model: Any, **metadata: Any) -> Path:
    """Write a model of transformers, with further metadata."""
    config = model.config.to_dict()
    keys = {**model_metadata(architecture, config), **metadata}
    return write_gguf(path, keys, model_tensors(architecture, config, model.state_dict()))


def random_blocks(generator: torch.Generator, rows: int, num_bytes: int) -> np.ndarray:
    """Rows of random bytes."""
    drawn = torch.randint(0, 256, (rows, num_bytes), generator=generator, dtype=torch.uint8)
    return drawn.numpy()
