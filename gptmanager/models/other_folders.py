"""Describes folders and configs that are not usable checkpoints, for error messages."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ENCODERS = frozenset(
    "albert bert camembert clip deberta deberta-v2 distilbert electra ernie modernbert mpnet "
    "nomic_bert roberta siglip vit wav2vec2 xlm-roberta".split()
)


def describe_other(path: Path) -> str:
    """Return what a folder without config.json holds, and what to pass instead; "" if unknown."""
    try:
        names = sorted(entry.name for entry in os.scandir(path))
    except OSError:
        return ""
    if "adapter_config.json" in names:
        return (
            "it holds a PEFT adapter: pass its base model here, and the adapter with --adapter or "
            "load_peft_adapter"
        )
    if "model_index.json" in names:
        return "it holds a diffusion pipeline, which generates images, not text"
    if "params.json" in names:
        return "it holds a checkpoint in its author's own format: pass the Hugging Face version"
    return ""


def describe_other_type(config: Mapping[str, Any]) -> str:
    """Return what an unsupported config describes, as the end of a message; "" if unknown."""
    name = config.get("model_type")
    if isinstance(name, str) and name in _ENCODERS:
        return "; this is an encoder, which does not generate text"
    if config.get("is_encoder_decoder") is True:
        return "; this is an encoder-decoder, and only decoders are served"
    return ""
