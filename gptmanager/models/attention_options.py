"""`with_attention_options`: applies the arguments of `load_model` for windows and pages."""

from __future__ import annotations

from dataclasses import replace

import torch

from gptmanager.arguments import at_least
from gptmanager.errors import ConfigError, quoted
from gptmanager.models.spec import ModelSpec

_FLOAT8 = torch.float8_e4m3fn


def with_attention_options(
    spec: ModelSpec, window: int | None, sink: int, kv_cache_dtype: torch.dtype | None
) -> ModelSpec:
    """Return the spec with these arguments of `load_model`; `window` is its `attention_window`.

    Raises a ConfigError that names the argument that cannot be used.
    """
    sink = at_least(0, "sink", sink)
    if window is not None:
        spec = _narrowed(spec, at_least(1, "attention_window", window), sink)
    if kv_cache_dtype is not None and kv_cache_dtype is not _FLOAT8:
        raise ConfigError(f"kv_cache_dtype = {quoted(kv_cache_dtype)}: must be {_FLOAT8} or None")
    if kv_cache_dtype is not None and any(it.attention.latent for it in spec.layers):
        raise ConfigError(
            f"kv_cache_dtype = {kv_cache_dtype}: must be None, because latents have no scales"
        )
    return replace(spec, kv_cache_dtype=kv_cache_dtype)


def _narrowed(spec: ModelSpec, window: int, sink: int) -> ModelSpec:
    chunk = max((it.attention.window or 0 for it in spec.layers if it.attention.chunked), default=0)
    if window < chunk:
        raise ConfigError(
            f"KvCacheConfig.max_attention_window = {window}: must be at least the "
            f"attention_chunk_size {chunk} of this model"
        )
    layers = tuple(
        replace(
            layer,
            attention=replace(
                layer.attention, window=min(layer.attention.window or window, window)
            ),
        )
        for layer in spec.layers
    )
    return replace(spec, layers=layers, sink=sink)
