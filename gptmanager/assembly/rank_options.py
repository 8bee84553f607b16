"""The options and the checkpoint of a rank, which must be equal on all ranks."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from gptmanager.config import ModelType, OptionalParams, SchedulerConfig
from gptmanager.environment.distribution import VERSION
from gptmanager.errors import ConfigError
from gptmanager.memory.checkpoint.tensor_sources import StateDict
from gptmanager.models.checkpoint_parts import open_tensors, read_part
from gptmanager.ranks.links import Links

# options that may differ between ranks; all others are compared
_MAY_DIFFER = (
    *("black_box_path", "black_box_iterations", "black_box_bytes", "recording_path"),
    *("on_progress", "callback_budget_s", "logits_post_processor_budget_s", "idle_poll_s"),
    *("device", "restore_cb", "restore_processor_cb"),
)


def compared_options(
    params: OptionalParams,
    scheduler: SchedulerConfig,
    model_type: ModelType,
    max_beam_width: int,
    source: Any,
) -> dict[str, Any]:
    """Return the values by name that must be equal on all ranks.

    Raise ConfigError for a `source` that cannot be split among ranks.
    """
    return {
        **_versions(params),
        **_field_values("OptionalParams", params, _MAY_DIFFER),
        **_field_values("SchedulerConfig", scheduler, ()),
        "model_type": model_type.name,
        "max_beam_width": max_beam_width,
        **_checkpoint_digests(source),
    }


def check_options(links: Links, given: list[dict[str, Any]]) -> None:
    """Raise RankError if the values of a rank differ from rank 0's; `given` is in rank order."""
    first = given[0]
    for rank, own in enumerate(given):
        for name in dict.fromkeys((*first, *own)):
            here, there = own.get(name, "nothing"), first.get(name, "nothing")
            if here != there:
                links.blame(rank, f"differs from rank 0: {name} = {here!r}, not {there!r}")


def _versions(params: OptionalParams) -> dict[str, Any]:
    return {
        "version of gptmanager": VERSION,
        "version of torch": torch.__version__,
        "version of Python": platform.python_version(),
        "kind of OptionalParams.device": (params.device or "cpu").partition(":")[0],
    }


def _field_values(name: str, config: Any, left_out: Iterable[str]) -> dict[str, Any]:
    """Return the fields of a configuration and of nested configurations, as JSON values.

    Enums and functions become their names, other objects the names of their types.
    """
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in left_out:
            continue
        if dataclasses.is_dataclass(value):
            found |= _field_values(type(value).__name__, value, left_out)
        elif isinstance(value, Enum):
            found[f"{name}.{field.name}"] = value.name
        elif value is None or isinstance(value, (bool, int, float, str)):
            found[f"{name}.{field.name}"] = value
        else:
            found[f"{name}.{field.name}"] = getattr(value, "__qualname__", type(value).__name__)
    return found


def _checkpoint_digests(source: Any) -> dict[str, str]:
    """Return digests of a checkpoint's config and of its tensors' headers."""
    if isinstance(source, tuple) and len(source) == 2:
        config, tensors = repr(sorted(source[0].items(), key=str)).encode(), StateDict(source[1])
        headers = tensors.describe()
    elif isinstance(source, (str, os.PathLike)):
        own = read_part(source, "config.json")
        if own is None:  # if it is missing on every rank, loading reports it
            file = Path(source, "config.json").absolute()
            return {"digest of config.json": f"none: the file {file} does not exist"}
        config = repr(own).encode()
        opened = open_tensors(source)
        headers = opened.describe()
        opened.close()
    else:
        raise ConfigError(
            f"model_path is a {type(source).__name__}, but must be a checkpoint: each of several "
            "ranks loads a part of it, and a Model object cannot be split"
        )
    named = repr(sorted((name, *info) for name, info in headers.items())).encode()
    return {
        "digest of config.json": hashlib.sha256(config).hexdigest()[:16],
        "digest of the checkpoint's tensor headers": hashlib.sha256(named).hexdigest()[:16],
    }
