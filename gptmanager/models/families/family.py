"""`Family`: the properties that set one `model_type` apart."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gptmanager.kernels.activation_kinds import Activation
from gptmanager.models.families.names import LLAMA, Tensors
from gptmanager.models.fields import Fields
from gptmanager.models.spec import Experts, Norms

ROTARY_BUFFERS = re.compile(r"(^|\.)rotary_emb\.(\w+_)?inv_freq$")


def _nothing(*_: Any) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class Family:
    """A row of the table: what a family's config and tensors are called, and what they mean.

    `title`: for people. `tensors`: see `names`; a checkpoint may leave out `prefix`. `ignored`:
    tensors that are not used. `spellings`: our name of a config field -> theirs. `defaults`: of
    absent fields, by our names. Where a property may be a string, it is the field that decides.
    `norms` has its epsilon from the config; `qk_norm`: whether `norms.query_key` applies.
    `interleaved`: rotated pairs are neighbors in a checkpoint. `position_offset`: of learned
    positions. `activation`: the one that the family has whatever `hidden_act` says.
    `windows`: no layer has a sliding window, or all have, or those from `max_window_layers` on
    ("some"), or those that `layer_types` names; a number n: without that field the last of each n
    layers sees everything, of -n the first, of 0 none. `one_norm`: attention and MLP read the same
    norm. `neutral`: fields that must have one value. `transposed`: layers store their matrices as
    [in, out].
    `network` returns further fields of the `ModelSpec`, `attention` those of a layer's
    `Attention`, and `experts` the mixture of experts of a layer and the width of each.
    """

    title: str
    tensors: Tensors = field(default_factory=lambda: LLAMA)
    prefix: str = "model."
    ignored: re.Pattern[str] = ROTARY_BUFFERS
    spellings: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    norms: Norms = field(default_factory=Norms)
    qk_norm: bool | str = True
    rotary: bool = True
    interleaved: bool | str = False
    position_offset: int | None = None
    activation: Activation | None = None
    gated: bool = True
    parallel: bool | str = False
    one_norm: bool | str = False
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    mlp_bias: bool | str = False
    head_bias: bool | str = False
    windows: Literal["none", "all", "some"] | int = "none"
    transposed: bool = False
    neutral: Mapping[str, Any] = field(default_factory=dict)
    network: Callable[[Fields], Mapping[str, Any]] = _nothing
    attention: Callable[[Fields, int], Mapping[str, Any]] = _nothing
    experts: Callable[[Fields, int], tuple[Experts, int] | None] | None = None
