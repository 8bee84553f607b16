"""Reads configs and tensors of a checkpoint: a Hugging Face folder or a GGUF file.

A path refers to a Hugging Face folder, to a GGUF file (the first one of a split model), or to a
folder without `config.json` that has one GGUF file or all files of one split model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptmanager.errors import ConfigError, quoted, quoted_path
from gptmanager.memory.checkpoint.safetensors_reader import SafetensorsFolder
from gptmanager.memory.checkpoint.tensor_sources import TensorSource
from gptmanager.memory.checkpoint.untrusted_files import read_object
from gptmanager.models.converted_tensors import ConvertedTensors, is_own_layout
from gptmanager.models.gguf.checkpoint import GgufCheckpoint
from gptmanager.models.gguf.split_files import first_of_split
from gptmanager.models.other_folders import describe_other, describe_other_weights
from gptmanager.models.other_layouts import in_family_layout
from gptmanager.models.quantized.scheme import (
    MODELOPT_FILE,
    read_scheme,
    with_modelopt,
    without_quantization,
)
from gptmanager.models.quantized.source import QuantizedSource

# Fields of the config of a multimodal model that also apply to its text model.
OF_WRAPPER = ("dtype", "torch_dtype", "quantization_config")
_MAGIC = b"GGUF"
_LLM = ("internvl_chat", "NemotronH_Nano_VL_V2")
_THINKING = ("qwen2_5_omni", "qwen3_omni_moe")


def gguf_checkpoint(path: str | os.PathLike[str]) -> GgufCheckpoint | None:
    """Open the GGUF file that `path` refers to; None if `path` refers to a Hugging Face folder."""
    file = _gguf_file(Path(path))
    return None if file is None else GgufCheckpoint(file)


def read_part(path: str | os.PathLike[str], name: str) -> dict[str, Any] | None:
    """Return the JSON object in the file `name` of a checkpoint, such as generation_config.json.

    Returns None if the checkpoint has no such file. Raises ConfigError if the file cannot be read.
    """
    if (gguf := gguf_checkpoint(path)) is not None:
        return gguf.part(name)
    folder = Path(path)
    found = read_object(folder / name) if os.path.lexists(folder / name) else None
    if name != "config.json" or found is None:
        return found
    found = dict(in_usual_form(found))
    if os.path.lexists(folder / MODELOPT_FILE):
        return with_modelopt(found, read_object(folder / MODELOPT_FILE))
    return found


def in_usual_form(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of a multimodal model with the config of its text model as `text_config`.

    A model of Qwen-Omni has it in the config of its thinker, the part that writes text.
    """
    name, thinker, inner = (config.get(it) for it in ("model_type", "thinker_config", "llm_config"))
    if name in _THINKING and isinstance(thinker, Mapping):
        outer = {field: config[field] for field in OF_WRAPPER if config.get(field) is not None}
        return {**outer, **thinker, "model_type": f"{name}_thinker"}
    if name in _LLM and inner is not None and "text_config" not in config:
        rest = {field: value for field, value in config.items() if field != "llm_config"}
        return {**rest, "text_config": inner}
    return config


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the config of a checkpoint, without the field that describes its quantization.

    Raises ConfigError if the config is missing or cannot be read.
    """
    config, folder = read_part(path, "config.json"), Path(path)
    why = describe_other(folder) if config is None else describe_other_weights(folder)
    if config is None or why:
        raise ConfigError(
            f"model_path = {quoted(os.fspath(path))}: must be a checkpoint folder with a "
            f"config.json or a GGUF file, but {why}"
        )
    return without_quantization(config)


def open_tensors(path: str | os.PathLike[str]) -> TensorSource:
    """Open the tensors of a checkpoint. Raises ConfigError for files that cannot be read."""
    if (gguf := gguf_checkpoint(path)) is not None:
        return gguf.tensors()
    config, folder = read_part(path, "config.json") or {}, SafetensorsFolder(Path(path))
    return ConvertedTensors(folder) if is_own_layout(config) else as_floats(config, folder)


def as_floats(config: Mapping[str, Any], tensors: TensorSource) -> TensorSource:
    """Return a source that dequantizes `tensors`, and has them in the layout of their family.

    `config` is the checkpoint's config.json. Returns `tensors` itself if nothing differs.
    """
    scheme = read_scheme(config)
    found = tensors if scheme is None else QuantizedSource(tensors, scheme)
    return in_family_layout(config, found)


def is_quantized(path: str | os.PathLike[str]) -> bool:
    """Return whether a checkpoint is quantized, by its config or the types of its GGUF tensors."""
    gguf = gguf_checkpoint(path)
    if gguf is not None:
        return gguf.is_quantized
    config = read_part(path, "config.json") or {}
    return is_own_layout(config) or read_scheme(config) is not None


def _gguf_file(path: Path) -> Path | None:
    if _is_gguf(path):
        return path
    if not os.path.isdir(path) or os.path.lexists(path / "config.json"):
        return None
    found = sorted(file for file in path.glob("*.gguf"))
    if len(found) > 1 and (first := first_of_split(found)) is not None:
        return first
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:8])
        raise ConfigError(
            f"{quoted_path(path)} holds {len(found)} GGUF files: pass one of them ({names})"
        )
    return found[0] if found else None


def _is_gguf(path: Path) -> bool:
    """Return whether a file is a GGUF file, by its name or its first bytes."""
    try:
        if not path.is_file():
            return False
        if path.suffix.lower() == ".gguf":
            return True
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except (OSError, ValueError):  # ValueError: not a valid file name
        return False
