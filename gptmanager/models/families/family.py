"""`Family`: the properties in which one `model_type` differs from the others."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gptmanager.kernels.activations.activation_kinds import Activation
from gptmanager.models.families.layer_types import Concerned
from gptmanager.models.families.names import LLAMA, Tensors
from gptmanager.models.fields import Decision, Fields, Spellings
from gptmanager.models.spec import Experts, Norms

ROTARY_BUFFERS = re.compile(r"(^|\.)rotary_emb\.(\w+_)?inv_freq$")


def _nothing(*_: Any) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class Family:
    """A model family: the names of its config fields and tensors, and their meaning.

    A `bool | str` property is either the value or the name of the config field that has the value.
    A `Decision` may also be a function that reads the value.

    `title`: the name shown to users. `tensors`: tensor names, see `names`. `prefix`: the start of
    these names that a checkpoint may omit. `prefixes`: other starts of names -> the start in
    `tensors`. `other_tensors`: further names of the same parameters,
    for example in GGUF files, or in a model of transformers 5. `ignored`: names of tensors that are
    not used.
    `spellings`: our name of a config field -> the name, or the names, in this family. `defaults`:
    our name of a config field -> its value if the config does not have the field. `norms`: the
    norms, except their epsilon, which the config has. `qk_norm`: whether `norms.query_key` applies.
    `interleaved`: the checkpoint stores the two rows of a RoPE pair next to each other. `backward`:
    RoPE rotates pairs in the other direction.
    `position_offset`: the row of the learned position embeddings for position 0; None if the family
    has no such embeddings. `activation`: overrides `hidden_act`. `xielu`: `hidden_act` may be
    "xielu". `one_norm`: attention and MLP read the output of the same norm. `neutral`: config field
    -> the only value, besides null, that the field may have. `transposed`: layers store their
    matrices as [in, out]. `scaled`: see `Layer`. `parallel`: see `ModelSpec`.

    `windows`: which layers have a sliding window.
    - "none": no layer.
    - "all": each layer. If the family has a default for `use_sliding_window`, this field must be
      true.
    - "some": the layers that the field `layer_types` marks. Without this field, the layers from
      `max_window_layers` on. The field `use_sliding_window` must be true.
    - An integer n: the layers that `layer_types` marks. Without this field, all but the last of
      every n layers; if n is negative, all but the first of every -n layers; if n is 0, all layers.
    - "pattern": as with an integer, which is the field `sliding_window_pattern`.
    - "chunks": the layers with attention in chunks. Their windows begin at multiples of the size of
      a chunk.
    - "linear", "conv", "mamba", "blocks": no layer has a window, and some layers have linear
      attention, a short convolution, or a state space. With "blocks", a layer has an attention, a
      state space, or an MLP alone.

    `network` returns further fields of the `ModelSpec`. The other three functions also get the
    index of a layer. `attention` returns further fields of the layer's `Attention`, `rope_dim` if
    RoPE rotates only a part of each head, and `rope_theta` if layers have bases of their own.
    `mlp` returns further fields of the layer's `Mlp`, or None if the layer has no MLP. `experts`
    returns the layer's mixture of experts and the width of an expert, or None.
    """

    title: str
    tensors: Tensors = field(default_factory=lambda: LLAMA)
    other_tensors: Tensors = field(default_factory=dict)
    prefix: str = "model."
    prefixes: Mapping[str, str] = field(default_factory=dict)
    ignored: re.Pattern[str] = ROTARY_BUFFERS
    spellings: Spellings = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    norms: Norms = field(default_factory=Norms)
    qk_norm: bool | str = True
    rotary: bool = True
    interleaved: bool | str = False
    backward: bool = False
    position_offset: int | None = None
    activation: Activation | None = None
    gated: bool = True
    xielu: bool = False
    parallel: Decision = False
    one_norm: Decision = False
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
    mlp: Callable[[Fields, int], Mapping[str, Any] | None] = _nothing
    experts: Callable[[Fields, int], tuple[Experts, int] | None] | None = None
