"""`write_gguf`: writes a Llama or Qwen2 model as a GGUF file in bfloat16, for llama.cpp."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptmanager.errors import ConfigError
from gptmanager.models.gguf.architecture import Architecture
from gptmanager.models.gguf.architectures import ARCHITECTURES

_F32, _BF16 = 0, 30  # GGUF's numbers of these tensor types
_ALIGNMENT = 32
_FAMILIES = ("llama", "qwen2")


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    tokenizer: Mapping[str, Any] | None = None,
) -> None:
    """Write a model, its matrices as bfloat16 and its vectors as float32.

    `tokenizer` maps the metadata keys `tokenizer.ggml.*` to their values. Without these keys, the
    file has no tokenizer. Raises ConfigError unless the model is a Llama or Qwen2 model.
    """
    name = config["model_type"]
    if name not in _FAMILIES:
        raise ConfigError(
            f"--peer llama-cpp: a model of type {name} cannot be written as GGUF; pass a GGUF file "
            "as --model"
        )
    own = ARCHITECTURES[name]
    stored = {_gguf_name(key, own): _stored(key, it, own, config) for key, it in tensors.items()}
    keys = _keys(name, own, config)
    keys |= {key: _value(value) for key, value in (tokenizer or {}).items()}
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(stored), len(keys)) + b"".join(
        _text(key) + value for key, value in keys.items()
    )
    offset = 0
    for key, tensor in stored.items():
        shape = tensor.shape[::-1]
        kind = _F32 if tensor.dtype is torch.float32 else _BF16
        head += _text(key) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
        offset += tensor.nbytes + -tensor.nbytes % _ALIGNMENT
    with path.open("wb") as file:
        file.write(head + bytes(-len(head) % _ALIGNMENT))
        for tensor in stored.values():
            file.write(tensor.flatten().view(torch.uint8).numpy().data)
            file.write(bytes(-tensor.nbytes % _ALIGNMENT))


def _keys(name: str, own: Architecture, config: Mapping[str, Any]) -> dict[str, bytes]:
    keys = {"general.architecture": _value(name), "tokenizer.ggml.model": _value("no_vocab")}
    for field, key in own.fields.items():
        if config.get(field) is not None:
            keys[f"{name}.{key}"] = _value(config[field])
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    keys[f"{name}.rope.dimension_count"] = _value(config.get("head_dim") or head_dim)
    keys[f"{name}.vocab_size"] = _value(config["vocab_size"])
    return keys


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, list):  # a list of strings
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    return struct.pack("<II", 4, value)


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _gguf_name(name: str, own: Architecture) -> str:
    module, _, kind = name.rpartition(".")
    theirs = {value: key for key, value in own.outside.items()}.get(module)
    if theirs is None:
        _, _, index, *parts = module.split(".")
        modules = {value: key for key, value in own.modules.items()}
        theirs = f"blk.{index}.{modules['.'.join(parts)]}"
    return f"{theirs}.{kind}"


def _stored(name: str, tensor: Tensor, own: Architecture, config: Mapping[str, Any]) -> Tensor:
    """Return a tensor as a GGUF file stores it.

    In the query and key matrices of a Llama file, the two rows of each RoPE pair are adjacent.
    """
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    field = heads.get(name.split(".")[-2])
    if own.permuted and field is not None:
        halves = tensor.reshape(config[field], 2, -1, *tensor.shape[1:])
        tensor = halves.transpose(1, 2).reshape(tensor.shape)
    return tensor.to(torch.float32 if tensor.dim() == 1 else torch.bfloat16).contiguous()
