"""`GgufCheckpoint`: the configs, tensors and tokenizer of a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gptmanager.models.gguf.config import architecture_of, config_of
from gptmanager.models.gguf.row_orders import VALUE_HEADS, ValueHeads
from gptmanager.models.gguf.split_files import read_model
from gptmanager.models.gguf.tensors import GgufTensors
from gptmanager.models.gguf.tokenizer import load_gguf_tokenizer
from gptmanager.models.gguf.tokens import generation_config_of, tokenizer_config_of


class GgufCheckpoint:
    """A GGUF model with the parts and tensor names of a Hugging Face checkpoint.

    `path` is the model's only file, or the first of its split files. The constructor reads the
    header; the data of tensors is read on demand. ConfigError is raised for an unusable file.
    """

    def __init__(self, path: Path) -> None:
        self._header = read_model(path)
        self._parts = {
            "config.json": config_of,
            "generation_config.json": generation_config_of,
            "tokenizer_config.json": tokenizer_config_of,
        }

    def part(self, name: str) -> dict[str, Any] | None:
        """Return the JSON object that a Hugging Face folder would have in the file `name`.

        Returns None unless `name` is "config.json", "generation_config.json" or
        "tokenizer_config.json".
        """
        return self._parts[name](self._header) if name in self._parts else None

    @property
    def path(self) -> Path:
        """The model's only file, or the first of its split files."""
        return self._header.path

    @property
    def is_quantized(self) -> bool:
        """Whether at least one tensor is quantized."""
        return any(tensor.type.is_quantized for tensor in self._header.tensors.values())

    def tensors(self) -> GgufTensors:
        """Return the tensors, by the names that they have in a Hugging Face checkpoint."""
        config = config_of(self._header)
        heads = config.get("num_attention_heads")
        kv_heads = config.get("num_key_value_heads", heads)
        counts = [max(n, 1) if isinstance(n, int) else 1 for n in (heads, kv_heads)]
        last = config["num_hidden_layers"] if "num_nextn_predict_layers" in config else None
        own = architecture_of(self._header)
        values = ValueHeads(*(config[it] for it in VALUE_HEADS)) if own.tiles_values else None
        return GgufTensors(self._header, own, *counts, num_layers=last, value_heads=values)

    def has_tokenizer(self) -> bool:
        """Return whether the metadata has a vocabulary."""
        return "tokenizer.ggml.tokens" in self._header.metadata

    def tokenizer(self) -> Tokenizer:
        """Create the tokenizer that the metadata describes."""
        return load_gguf_tokenizer(self._header)
