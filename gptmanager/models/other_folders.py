"""Describes paths and configs that are not usable checkpoints, for error messages."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from gptmanager.environment.machine.local_models import missing_hint

_ENCODERS = frozenset(
    "albert bert camembert clip deberta deberta-v2 distilbert electra ernie modernbert mpnet "
    "nomic_bert roberta siglip xlm-roberta".split()
)
_MEDIA_MODELS = frozenset(
    "beit clip_vision_model convnext deit detr dinov2 dinov3_vit hubert resnet sam segformer "
    "siglip_vision_model swin vit vit_mae wav2vec2 wavlm yolos".split()
)
# Models of text and images -> what their attention has that is not supported.
_OTHER_ATTENTION = {
    "mllama": "attention to the embeddings of images in some layers",
    "paligemma": "attention in both directions within a prompt",
}
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
# Pattern of a file name -> what a folder with such a file is. The first matching pattern counts.
_KINDS = {
    "adapter_config.json": "it holds a PEFT adapter: pass its base model here, and the adapter "
    "with --adapter or load_peft_adapter",
    "model_index.json": "it holds a diffusion pipeline, which generates images, not text",
    "diffusion_pytorch_model*": "it holds a part of a diffusion pipeline, which generates images, "
    "not text",
    "*.engine": "it holds an engine of TensorRT-LLM: pass the Hugging Face checkpoint from which "
    "it was built",
    "rank*.safetensors": "it holds a checkpoint of TensorRT-LLM: pass the Hugging Face checkpoint "
    "from which it was converted",
    "*.onnx": "it holds an ONNX model: pass the checkpoint from which it was exported",
    "onnx": "it holds an ONNX model: pass the checkpoint from which it was exported",
    "*.npz": "it holds a model of MLX in NumPy files: pass a version with safetensors",
    "*.h5": "it holds weights of TensorFlow: pass a version with safetensors",
    "*.msgpack": "it holds weights of Flax: pass a version with safetensors",
    "params.json": "it holds a checkpoint in its author's own format: pass the Hugging Face "
    "version",
    **{
        f"*.{suffix}": "its weights are pickles, which can run code: pass a version with "
        "safetensors"
        for suffix in ("bin", "pt", "pth", "ckpt")
    },
}
# More patterns like `_KINDS`, but only for folders without a config.json.
_WITHOUT_CONFIG = {
    "snapshots": "it is a folder of the Hugging Face cache: pass the folder in its snapshots/",
    "*.safetensors": "it holds safetensors without their config.json: add the config.json of the "
    "model",
    "tokenizer*": "it holds a tokenizer without a model",
}


def describe_other(path: Path) -> str:
    """Return what a path without a config.json is, and what to pass instead."""
    if not os.path.isdir(path):
        return _describe_file(path)
    try:
        names = sorted(os.listdir(path))
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    if not names:
        return "it is an empty folder"
    if kind := _kind(names, {**_KINDS, **_WITHOUT_CONFIG}):
        return kind
    inner = next((it for it in names if os.path.isfile(path / it / "config.json")), None)
    text = "it has no config.json"
    return text if inner is None else f"{text}: pass its folder {inner!r}, which has one"


def describe_other_weights(path: Path) -> str:
    """Return what a folder with a config.json is; "" if it may be a checkpoint."""
    if not os.path.lexists(path / "config.json"):  # the config is from a GGUF file
        return ""
    if any(os.path.lexists(path / name) for name in _WEIGHTS):
        return ""
    try:
        return _kind(os.listdir(path), _KINDS)
    except OSError:  # the folder can be entered, but not listed
        return ""


def describe_other_type(config: Mapping[str, Any]) -> str:
    """Return what a config of an unsupported family describes; "" if unknown."""
    name = config.get("model_type")
    if isinstance(name, str) and name in _ENCODERS:
        return "this is an encoder, which does not generate text"
    if isinstance(name, str) and name in _MEDIA_MODELS:
        return "this is a model of images or sounds, which does not generate text"
    if isinstance(name, str) and name in _OTHER_ATTENTION:
        return f"this model has {_OTHER_ATTENTION[name]}, which is not supported"
    if config.get("is_encoder_decoder") is True:
        return "this is an encoder-decoder, and only decoders are served"
    return ""


def _kind(names: Sequence[str], kinds: Mapping[str, str]) -> str:
    return next((kinds[it] for it in kinds if any(fnmatch(name, it) for name in names)), "")


def _describe_file(path: Path) -> str:
    """Describe a path that is not a folder."""
    if os.path.isfile(path):
        if os.path.isfile(path.parent / "config.json"):
            return "it is a file of a checkpoint: pass its folder"
        return "it is a file that does not begin with GGUF"
    if os.path.exists(path):
        return "it is neither a folder nor a file"
    return f"it does not exist{missing_hint(os.fspath(path))}"
