"""Run a transformers network on a few tokens, and refuse what paged attention cannot compute.

`probe` finds each layer's call of attention. `check_forward` refuses a network if its forward
pass fails on a device, for example because a tensor was not moved to the device.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gptmanager.errors import ConfigError, error_summary
from gptmanager.models.fields import MAX_SIZE
from gptmanager.models.hf.attention import Call, StepHolder
from gptmanager.models.hf.library import ATTENTION, PROBE, use_attention

_TOKENS = 3
_TOLERANCE = 1e-2  # rounding of 16-bit floats, relative to the largest logit
# Masks are compared with causal masks at these positions: powers of two and their neighbors.
_POSITIONS = sorted({max(0, (1 << n) + d) for n in range(0, 18) for d in (-1, 0, 1)})


@torch.inference_mode()
def probe(network: nn.Module, holder: StepHolder, num_layers: int) -> list[Call]:
    """Return each layer's call of attention.

    If attention over pages cannot compute the network, raise a ConfigError that names the feature.
    """
    _check_arguments(network)
    use_attention(network, PROBE)
    try:
        logits = [_run(network, holder, first) for first in (1, 0)]
    except ConfigError as error:
        raise _refusal(network, str(error)) from None
    except Exception as error:  # the code of an architecture may raise any error
        why = f"its forward fails with our attention: {error_summary(error)}"
        raise _refusal(network, why) from error
    finally:
        use_attention(network, ATTENTION)
    calls, holder.calls = holder.calls, []
    _check_layers(network, calls, num_layers)
    calls = [_checked(network, call) for call in calls]
    holder.windows = {
        call.layer: call.shape.window for call in calls if call.shape.window is not None
    }
    # While attention returns zeros, the first token must not change the logits of the others.
    others, same = (it[0, 1:].float() for it in logits)
    if others.isnan().any() or same.isnan().any():
        raise _refusal(network, "its logits are NaN while attention returns zeros")
    largest = same.nan_to_num(0, 0, 0).abs().max().item()
    if not torch.allclose(others, same, rtol=0, atol=_TOLERANCE * largest):
        why = "tokens change each other outside of attention: a layer may have a state"
        raise _refusal(network, why)
    return calls


@torch.inference_mode()
def check_forward(network: nn.Module, holder: StepHolder, device: torch.device | str) -> None:
    """Raise ConfigError if the forward pass of a network fails on `device`."""
    use_attention(network, PROBE)
    try:
        _run(network, holder, 0, device)
    except Exception as error:  # the code of an architecture may raise any error
        why = f"its forward fails on the device {str(device)!r}: {error_summary(error)}"
        raise _refusal(network, why) from error
    finally:
        use_attention(network, ATTENTION)
        holder.calls = []


def _run(
    network: nn.Module, holder: StepHolder, first: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Return the logits `[1, T, vocab]` of T token ids, which are `first` and then zeros.

    During the run, attention returns zeros, and its calls are recorded in `holder`.
    """
    holder.calls = []
    found = network(
        input_ids=torch.tensor([[first, *[0] * (_TOKENS - 1)]]).to(device),
        position_ids=torch.arange(_TOKENS, device=device)[None],
        use_cache=False,
    )
    logits: Tensor = found.logits
    return logits


def _check_arguments(network: nn.Module) -> None:
    config: Any = network.config
    if getattr(config, "is_encoder_decoder", False):
        raise _refusal(network, "it is an encoder-decoder, and only decoders are served")
    if "position_ids" not in inspect.signature(network.forward).parameters:
        raise _refusal(network, "its forward takes no position_ids, which packed tokens need")


def _check_layers(network: nn.Module, calls: Sequence[Call], num_layers: int) -> None:
    layers = [call.layer for call in calls]
    missing = sorted({*range(num_layers)}.difference(layers))
    if not calls:
        why = "its layers do not call the attention interface"
    elif missing:
        first = ", ".join(map(str, missing[:8]))
        why = f"layers {first} do not call the attention interface: they may have a state"
    elif len(layers) != len({*layers}) or len(layers) != num_layers:
        why = "a layer calls the attention interface twice"
    else:
        return
    raise _refusal(
        network,
        f"{why}. Each layer must call transformers' AttentionInterface once, because attention "
        "over the pages of the KV cache is computed there",
    )


def _checked(network: nn.Module, call: Call) -> Call:
    """Return a call with the window that its mask shows.

    Raises ConfigError for a call that paged attention cannot compute. Some architectures, such as
    Qwen2-MoE, pass the mask of a window, but not the window itself.
    """
    layer = f"layer {call.layer}"
    if call.refused:
        raise _refusal(network, f"{layer} passes {', '.join(call.refused)} to attention")
    given = call.shape.window
    known = call.module_window if given is None else given
    if given is not None and given < 1:
        raise _refusal(network, f"{layer} has a window of {given} tokens: it must be at least 1")
    if known is not None and known > MAX_SIZE:
        raise _refusal(network, f"{layer} has a window of {known} tokens, more than {MAX_SIZE}")
    if not isinstance(call.mask, Tensor):
        return call
    shows = getattr(call.mask, "shows", None)
    for window in dict.fromkeys((given, known)):
        if shows is not None and _is_causal(shows, window, known):
            return call._replace(shape=call.shape._replace(window=window))
    raise _refusal(network, f"{layer} has a mask other than causal or its sliding window")


def _is_causal(shows: Any, window: int | None, known: int | None) -> bool:
    """Return whether a mask function allows the same positions as a causal mask with `window`.

    `known` is a window that the mask may have, so the masks are also compared at its end.
    """
    near = [known + it for it in (-1, 0, 1)] if known else []
    at = torch.tensor(sorted({*_POSITIONS, *near}))
    query, key = at[:, None], at[None, :]
    expected = key <= query
    if window is not None:
        expected &= key > query - window
    zero = torch.zeros((), dtype=torch.long)
    try:
        found = shows(zero, zero, query, key)
    except (IndexError, RuntimeError):  # the function reads a table of only this run's tokens
        return False
    return bool((torch.as_tensor(found).expand_as(expected) == expected).all())


def _refusal(network: nn.Module, why: str) -> ConfigError:
    return ConfigError(
        f"model_backend = 'transformers': {type(network).__name__}: {why}. docs/models.md lists "
        "the architectures that run, natively or through transformers"
    )
