"""Checks the providers of attention and matmuls among the options of a manager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gptmanager.config import ATTENTION_PROVIDERS, OptionalParams
from gptmanager.errors import ConfigError, quoted
from gptmanager.lifecycle.callables import ordinary

_ATTENTION = ("refusal", "attend_generation", "attend_context")
_LINEAR = ("accepts", "__call__")


def is_foreign(provider: Any) -> bool:
    """Return whether a value of `attention_provider` demands attention that is not ours."""
    return not isinstance(provider, str) or provider not in ("own", "auto")


def settle_providers(params: OptionalParams) -> None:
    """Check both providers; "auto" becomes "own" where only our own kernels may run."""
    provider, linear = params.attention_provider, params.linear_provider
    on_gpu = (params.device or "cpu").startswith("cuda")
    if not isinstance(provider, str):
        words = f"one of {ATTENTION_PROVIDERS}, or "
        _check_calls("attention_provider", provider, _ATTENTION, words)
    elif provider not in ATTENTION_PROVIDERS:
        raise ConfigError(
            f"OptionalParams.attention_provider = {quoted(provider)} must be one of "
            f"{ATTENTION_PROVIDERS}, or an object of your own"
        )
    elif provider == "auto" and (params.deterministic or not on_gpu):
        provider = params.attention_provider = "own"
    elif provider in ("flashinfer", "flash_attn") and not on_gpu:
        raise ConfigError(
            f"OptionalParams.attention_provider = {provider!r} is refused with device = "
            f"{params.device!r}: the library needs device = 'cuda'"
        )
    if linear is not None:
        _check_calls("linear_provider", linear, _LINEAR)
    is_own = isinstance(provider, str) and provider == "own"
    for name, value, own in (
        ("attention_provider", None if is_own else provider, "own"),
        ("linear_provider", linear, None),
    ):
        if params.deterministic and value is not None:
            raise ConfigError(
                f"OptionalParams.{name} = {quoted(value)} is refused with deterministic = True: "
                f"only our own kernels give the same bits in any batch; leave it at {own!r}"
            )


def _check_calls(name: str, value: Any, methods: Sequence[str], others: str = "") -> None:
    """Raise ConfigError unless `value` has these methods, as ordinary functions."""
    missing = [it for it in methods if not callable(getattr(value, it, None))]
    if missing or isinstance(value, type):
        raise ConfigError(
            f"OptionalParams.{name} must be {others}an object with {', '.join(methods)}, got "
            f"{quoted(value)}"
        )
    for method in methods:
        ordinary(f"OptionalParams.{name}.{method}", getattr(value, method))
