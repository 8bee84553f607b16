"""`attend`: the attention function that transformers calls, over the pages of the KV cache.

`attend` finds the current step through the layer's attribute `paged_step`, a `StepHolder`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptmanager.errors import ConfigError
from gptmanager.kernels.attention.attention_arguments import AttentionShape, Pages, RowSpans
from gptmanager.kernels.reference import Kernels

HOLDER = "paged_step"  # the attribute of a network's modules that refers to the `StepHolder`
# Arguments of the attention interface that do not change the result of `attend`.
_KNOWN = frozenset(
    "position_ids output_attentions output_hidden_states use_cache output_router_logits "
    "return_dict cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k cache_position "
    "past_key_values logits_to_keep num_items_in_batch position_embeddings".split()
)


class Call(NamedTuple):
    """A layer's call of attention.

    `layer`: the index of the layer. `mask`: the attention mask, or None. `refused`: the arguments
    that attention over pages cannot apply. `module_window`: the `sliding_window` of the attention
    module, or else of its config, which the call may not pass on.
    """

    layer: int
    shape: AttentionShape
    mask: Any
    refused: tuple[str, ...]
    module_window: int | None = None


@dataclass
class PagedStep:
    """The current step, with T tokens.

    `positions` `[T]`: the position of each token in its sequence. `layers`: each layer's pages of
    keys and values.
    """

    kernels: Kernels
    rows: RowSpans
    positions: Tensor
    layers: Sequence[tuple[Tensor, Tensor]]


@dataclass
class StepHolder:
    """The state that all layers of a network share: the step, or the calls that a probe records.

    `windows`: the window of each layer that has one, for layers that pass only a mask to attention.
    """

    step: PagedStep | None = None
    windows: dict[int, int] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)

    @contextmanager
    def during(self, step: PagedStep) -> Iterator[None]:
        """Hold the step within the `with` block; later it would keep the pool alive."""
        self.step = step
        try:
            yield
        finally:
            self.step = None


def hold(network: nn.Module, holder: StepHolder) -> None:
    """Let all modules of a network refer to the same `holder`."""
    for module in network.modules():
        setattr(module, HOLDER, holder)


def _shape(
    query: Tensor,
    key: Tensor,
    head_dim: int,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
) -> AttentionShape:
    return AttentionShape(
        query.shape[1],
        key.shape[1],
        head_dim,
        scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
        window=window,
        softcap=softcap or 0.0,
        sinks=has_sinks,
    )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Write keys and values to the pages; return the output of attention `[1, T, H, D]`, and None.

    `query` `[1, H, T, D]`; `key` and `value` `[1, KV heads, T, D]`. `s_aux` `[H]`: the scores of
    sinks, or None. `attention_mask` is ignored.
    """
    holder: StepHolder = getattr(module, HOLDER)
    step: Any = holder.step
    layer: Any = module.layer_idx
    if sliding_window is None:
        sliding_window = holder.windows.get(layer)
    pages = Pages(*step.layers[layer])
    head_dim = pages.keys.shape[2]
    shape = _shape(query, key, head_dim, scaling, sliding_window, softcap, s_aux is not None)
    # For latent attention, transformers passes value heads that are smaller than key heads. Pages
    # have larger heads if the kernels do not support this head size. Zeros as padding change no
    # result. Without padding, `F.pad` would copy.
    heads = [
        it if it.shape[3] == head_dim else F.pad(it, (0, head_dim - it.shape[3]))
        for it in (query, key, value)
    ]
    by_token = torch.cat([it.transpose(1, 2) for it in heads], dim=2)
    packed = by_token[0].flatten(1).to(pages.keys.dtype)
    queries = step.kernels.rope_and_write(
        packed, step.positions, None, None, None, 0.0, pages, step.rows
    )
    sinks = None if s_aux is None else s_aux.to(queries.dtype)
    found = step.kernels.attention(queries, pages, step.rows, shape, sinks)
    found = found.view(1, len(found), shape.num_heads, head_dim)[..., : value.shape[3]]
    return found.to(query.dtype).contiguous(), None  # callers may use `view`


def note_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Record a layer's call instead of computing attention; return zeros."""
    refused = [name for name, it in others.items() if it is not None and name not in _KNOWN]
    if is_causal is False or getattr(module, "is_causal", True) is False:
        refused.append("is_causal = False")
    layer: Any = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ConfigError(f"{type(module).__name__} has no layer_idx")
    if key.shape[2] != query.shape[2]:
        refused.append("keys of other tokens than the step's")
    head_dim = max(query.shape[3], value.shape[3])
    shape = _shape(query, key, head_dim, scaling, sliding_window, softcap, s_aux is not None)
    config = getattr(module, "config", None)
    windows = (getattr(it, "sliding_window", None) for it in (module, config))
    own: Any = next((it for it in windows if it is not None), None)
    own = own if isinstance(own, int) and own > 0 else None
    call = Call(layer, shape, attention_mask, tuple(sorted(refused)), own)
    getattr(module, HOLDER).calls.append(call)
    batch, heads, tokens, _ = query.shape
    return value.new_zeros(batch, tokens, heads, value.shape[3]), None


def describe_mask(mask_function: Any, device: Any = None, **_: Any) -> Tensor:
    """Return a mask with the mask function as its attribute `shows`, for the probe."""
    mask = torch.zeros(1, 1, 1, 1, device=device)
    mask.shows = mask_function  # type: ignore[attr-defined]
    return mask
