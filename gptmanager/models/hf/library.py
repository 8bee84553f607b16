"""Imports transformers when a model needs it, and registers our attention functions with it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from gptmanager.environment.distribution import install_command, too_old
from gptmanager.errors import ConfigError, error_summary

# The names of our attention functions in transformers: ATTENTION runs in steps, PROBE runs in the
# forward passes of `probe.py`. Only PROBE uses masks.
ATTENTION, PROBE = "gptmanager", "gptmanager_probe"


def load_transformers_library() -> Any:
    """Import and return transformers.

    Raise ConfigError if it is not installed, too old, or cannot be imported: it refuses other
    versions of its own dependencies.
    """
    if (old := too_old("hf")) is not None:
        raise ConfigError(f"model_backend = 'transformers' needs {old}")
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        need = f"needs transformers: {install_command('hf')}"
        if not isinstance(error, ModuleNotFoundError) or error.name != "transformers":
            need = f"needs transformers, which cannot be imported: {error_summary(error)}"
        raise ConfigError(f"model_backend = 'transformers' {need}") from error


def knows(model_type: Any) -> bool:
    """Return whether transformers is installed and has an architecture of this name."""
    if importlib.util.find_spec("transformers") is None:
        return False
    return isinstance(model_type, str) and model_type in load_transformers_library().CONFIG_MAPPING


def register(
    attend: Callable[..., Any], probe: Callable[..., Any], mask: Callable[..., Any]
) -> None:
    """Register our attention for steps, our attention for the probe, and the probe's masks."""
    library = load_transformers_library()
    library.AttentionInterface.register(ATTENTION, attend)
    library.AttentionInterface.register(PROBE, probe)
    library.AttentionMaskInterface.register(PROBE, mask)


def use_attention(network: Any, name: str) -> None:
    """Make all layers of a network use the attention registered as `name`."""
    for module in network.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation_internal = name
