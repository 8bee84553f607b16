"""Finds the attention providers of other libraries for `OptionalParams.attention_provider`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from gptmanager.cuda.attention.flash_attention import FlashAttention
from gptmanager.cuda.attention.flashinfer_attention import FlashInferAttention
from gptmanager.errors import ConfigError, error_summary
from gptmanager.kernels.providers import AttentionProvider


class _Library(NamedTuple):
    """`new(module, device)` makes a provider; `command` installs the library."""

    command: str
    new: Callable[[Any, torch.device], AttentionProvider]


_LIBRARIES = {
    "flashinfer": _Library("pip install flashinfer-python", FlashInferAttention),
    "flash_attn": _Library(
        "pip install flash-attn --no-build-isolation", lambda module, _: FlashAttention(module)
    ),
}


def find_providers(choice: Any, device: torch.device) -> tuple[AttentionProvider, ...]:
    """Return the providers for a value of `OptionalParams.attention_provider`.

    `choice` may be "auto" (on a GPU: all installed libraries), the name of a library, or a
    provider. For any other string, and for "auto" on the CPU, the result is empty. Raises
    ConfigError if the named library cannot be imported.
    """
    if not isinstance(choice, str):
        return (choice,)
    if choice == "auto" and device.type == "cuda":
        return tuple(it for name in _LIBRARIES if (it := _find(name, device, True)) is not None)
    found = _find(choice, device, False) if choice in _LIBRARIES else None
    return () if found is None else (found,)


def _find(name: str, device: torch.device, may_lack: bool) -> AttentionProvider | None:
    command, new = _LIBRARIES[name]
    try:
        module = importlib.import_module(name)
    except Exception as error:  # a library built for another CUDA or torch may raise anything
        if may_lack:
            return None
        raise ConfigError(
            f"OptionalParams.attention_provider = {name!r} needs a library that cannot be "
            f"imported: {command} ({error_summary(error)})"
        ) from error
    return new(module, device)
