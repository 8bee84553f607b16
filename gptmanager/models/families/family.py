"""`Family`: the properties by which one `model_type` differs from others."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gptmanager.kernels.activation_kinds import Activation
from gptmanager.models.families.layer_types import Concerned
from gptmanager.models.families.names import LLAMA, Tensors
from gptmanager.models.fields import Fields
from gptmanager.models.spec import Experts, Norms

ROTARY_BUFFERS = re.compile(r"(^|\.)rotary_emb\.(\w+_)?inv_freq$")


def _nothing(*_: Any) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class Family:
    """A row of the table: the names of a family's config fields and tensors, and their meaning.

    `title`: the name for users. `tensors`: see `names`; in a checkpoint, `prefix` may be missing.
    `other_tensors`: other names for the same parameters, in GGUF files or of stacked experts.
    `ignored`: tensors that are not used. `spellings`: our name of a config field -> the family's.
    `defaults`: values of absent fields, by our names. A property that may be a string can name the
    config field that has its value. `norms`: their epsilon is read from the config; `qk_norm`:
    whether `norms.query_key` applies. `interleaved`: rotated pairs are neighbors in a checkpoint.
    `position_offset`: of learned positions. `activation`: overrides `hidden_act`.

    `windows`: which layers have a sliding window: none, all, "some" (from `max_window_layers` on),
    or those that `layer_types` names. With a number n, if that field is absent, the last of every n
    layers has no window; with -n the first; with 0 every layer has one. With "chunks" windows begin
    at multiples of their size. With "linear" no layer has one, and some have linear attention.
    `one_norm`: attention and MLP read the output of the same norm. `neutral`: fields that must have
    a certain value. `transposed`: layers store their matrices as [in, out].

    `network` returns further fields of the `ModelSpec`, `attention` further fields of a layer's
    `Attention` (and `rope_dim`, if less than a head rotates), `mlp` of its `Mlp`, and `experts` a
    layer's mixture of experts and the width of an expert. `scaled`: see `Layer`.
    """

    title: str
    tensors: Tensors = field(default_factory=lambda: LLAMA)
    other_tensors: Tensors = field(default_factory=dict)
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
    windows: Concerned = "none"
    transposed: bool = False
    scaled: bool = False
    neutral: Mapping[str, Any] = field(default_factory=dict)
    network: Callable[[Fields], Mapping[str, Any]] = _nothing
    attention: Callable[[Fields, int], Mapping[str, Any]] = _nothing
    mlp: Callable[[Fields, int], Mapping[str, Any]] = _nothing
    experts: Callable[[Fields, int], tuple[Experts, int] | None] | None = None
