"""The config of the checkpoints under tests/models/quantized."""

from __future__ import annotations

from typing import Any

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}


def field_of(name: str) -> str:
    """The field of config.json that describes how the fixture `name` is quantized."""
    return "quantization" if name.startswith("mlx") else "quantization_config"
