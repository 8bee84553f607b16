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
