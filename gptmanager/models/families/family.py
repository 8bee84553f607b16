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
    """A model family: the names of its config fields and tensors, and their meaning.

    `title`: the name for users. `tensors`: tensor names, see `names`. `prefix`: the start of these
    names that a checkpoint may omit. `other_tensors`: further names of the same parameters, for
    example in GGUF files or for stacked experts. `ignored`: names of tensors that are not used.
    `spellings`: our name of a config field -> the family's. `defaults`: values of absent fields, by
    our names. A `bool | str` property is either the value or the name of the config field that has
    the value. `norms`: the norms; the config has their epsilon. `qk_norm`: whether
    `norms.query_key` applies. `interleaved`: the checkpoint stores the two rows of a RoPE pair next
    to each other. `position_offset`: added to a position to index the learned position embeddings;
    None without them. `activation`: overrides `hidden_act`. `one_norm`: attention and MLP read the
    output of the same norm. `neutral`: config field -> the only value, besides null, that it may
    have. `transposed`: layers store their matrices as [in, out]. `scaled`: see `Layer`. `parallel`:
    see `ModelSpec`.

    `windows`: which layers have a sliding window. "none" and "all": no layer or each layer. "some":
    the layers that the field `layer_types` marks; without this field, the layers from
    `max_window_layers` on. An integer n: the layers that `layer_types` marks; without this field,
    all but the last of every n layers, all but the first of every -n layers if n is negative, and
    all layers if n is 0. The config's `sliding_window_pattern` replaces n. "chunks": attention in
    chunks, with windows that begin at multiples of their size. "linear": no layer has a window, and
    some have linear attention.

    `network` returns further fields of the `ModelSpec`. For a layer, `attention` returns further
    fields of its `Attention` (and `rope_dim`, if RoPE rotates only a part of each head), `mlp`
    further fields of its `Mlp`, and `experts` its mixture of experts and the width of an expert, or
    None.
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
