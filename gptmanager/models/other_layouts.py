"""`in_family_layout`: tensors that some programs store in another way, as their family stores them.

MLX adds 1 to the norms of Qwen3-Next and Qwen3.5, and moves the dimension of size 1 of convolutions
to the end, in all families. It leaves out a term of the routers of ERNIE 4.5, which is then zero.
transformers 5 has the experts of Qwen3-VL-MoE as [out, in], and reads both orders. Programs that
quantize GPT-2 store its matrices as [out, in], and GPT-2 itself stores them as [in, out].
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from gptmanager.kernels.gemm.panels.codes import Codes
from gptmanager.kernels.gemm.panels.words import PackedGroups
from gptmanager.memory.checkpoint.safetensors_reader import FLOATS, SafetensorsFolder
from gptmanager.memory.checkpoint.tensor_sources import (
    CodedSource,
    GroupedSource,
    TensorInfo,
    TensorSource,
)
from gptmanager.models.quantized.source import QuantizedSource

_DELTA = ".linear_attn.conv1d.weight"
_CONVOLUTIONS = (_DELTA, ".conv.conv.weight", ".mamba.conv1d.weight", ".mixer.conv1d.weight")
_NORMS = re.compile(
    r"(^|\.)(input_layernorm|post_attention_layernorm|q_norm|k_norm)\.weight$"
    r"|^((.+\.)?(language_)?model\.)?norm\.weight$"
)
_EXPERTS = ".mlp.switch_mlp.up_proj.weight"
_TRANSPOSED = ("qwen3_vl_moe", "qwen3_vl_moe_text")
_FUSED = re.compile(r"\.mlp\.experts\.(gate_up|down)_proj$")
_GPT2 = re.compile(r"\.c_(attn|proj|fc)\.weight$")
_CORRECTION = ".mlp.moe_statics.e_score_correction_bias"


def in_family_layout(config: Mapping[str, Any], tensors: TensorSource) -> TensorSource:
    """Return a source in the layout of the family, or `tensors` itself if nothing differs."""
    given = tensors.describe()
    if config.get("model_type") == "gpt2" and isinstance(tensors, QuantizedSource):
        own = {name for name in tensors.matrices if _GPT2.search(name)}
        return RearrangedTensors(tensors, own, (), {})
    convolutions = {name for name in given if name.endswith(_CONVOLUTIONS)}
    moved = {name for name in convolutions if _has_last_one(given[name].shape)}
    if moved != convolutions:
        return tensors
    floats = {name for name in given if given[name].dtype in FLOATS.values()}
    has_ones = any(name.endswith(_DELTA) for name in moved)
    norms = {name for name in floats if has_ones and _NORMS.search(name)}
    zeros: dict[str, tuple[int, ...]] = {}
    if config.get("model_type") == "ernie4_5_moe":
        layers = {name.removesuffix(_EXPERTS): name for name in given if name.endswith(_EXPERTS)}
        zeros = {it + _CORRECTION: (1, *given[name].shape[:1]) for it, name in layers.items()}
        zeros = {name: shape for name, shape in zeros.items() if name not in given}
    if moved or zeros:
        return RearrangedTensors(tensors, moved, norms, zeros)
    return in_expert_order(config, tensors)


def in_expert_order(config: Mapping[str, Any], tensors: TensorSource) -> TensorSource:
    """Return a source with the experts of Qwen3-VL-MoE as [in, out], or `tensors` itself."""
    if config.get("model_type") not in _TRANSPOSED:
        return tensors
    own = config.get("text_config")
    hidden = (own if isinstance(own, Mapping) else config).get("hidden_size")
    given = tensors.describe()
    experts = {name: _FUSED.search(name) for name in given if len(given[name].shape) == 3}
    parts = {name: part[1] for name, part in experts.items() if part is not None}
    # gate_up and down of a model are not both square, so one of them has only one of the orders
    squares = {name for name in parts if given[name].shape[1] == given[name].shape[2]}
    first = {"down": 1, "gate_up": 2}  # the dimension of the hidden size in [out, in]
    moved = {n for n in parts.keys() - squares if given[n].shape[first[parts[n]]] == hidden}
    if moved or squares == parts.keys():  # squares alone are [out, in], as in transformers
        moved |= squares
    return RearrangedTensors(tensors, moved, (), {}) if moved else tensors


def _has_last_one(shape: Sequence[int]) -> bool:
    return len(shape) == 3 and shape[2] == 1 != shape[1]


class RearrangedTensors:
    """A `GroupedSource` and `CodedSource` over the tensors of `source`.

    The last two dimensions of tensors in `moved` are exchanged, 1 is subtracted from tensors in
    `norms`, and tensors in `zeros`, which `source` does not have, are zero.
    """

    def __init__(
        self,
        source: TensorSource,
        moved: Collection[str],
        norms: Collection[str],
        zeros: Mapping[str, tuple[int, ...]],
    ) -> None:
        self._source, self._moved, self._norms, self._zeros = source, moved, norms, zeros
        given = source.describe()
        self._found = dict(given)
        for name in moved:
            *stack, rows, columns = given[name].shape
            self._found[name] = TensorInfo((*stack, columns, rows), given[name].dtype)
        # float32 holds the difference exactly where MLX has added 1 to a number of 16 bits
        self._found |= {name: TensorInfo(given[name].shape, "float32") for name in norms}
        self._found |= {name: TensorInfo(shape, "float32") for name, shape in zeros.items()}

    @property
    def formats(self) -> Collection[str]:
        """See `SafetensorsFolder`."""
        own = self._source
        return own.formats if isinstance(own, (SafetensorsFolder, QuantizedSource)) else ()

    def describe(self) -> Mapping[str, TensorInfo]:
        return self._found

    def pieces(
        self, name: str, max_bytes: int, region: Sequence[range] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        if name in self._zeros:
            yield 0, torch.zeros([len(it) for it in region] if region else self._zeros[name])
            return
        if name in self._moved and region is not None:
            *stack, rows, columns = region
            region = [*stack, columns, rows]
        if name in self._moved and len(self._found[name].shape) == 2:
            whole = [piece.clone() for _, piece in self._source.pieces(name, max_bytes, region)]
            yield 0, torch.cat(whole).t()
            return
        for start, piece in self._source.pieces(name, max_bytes, region):
            own = piece.mT if name in self._moved else piece
            yield start, own.float() - 1 if name in self._norms else own

    def groups(self, name: str, max_bytes: int, rows: range) -> Iterator[tuple[int, PackedGroups]]:
        source = cast(GroupedSource, self._source)
        return cast(Iterator[tuple[int, PackedGroups]], source.groups(name, max_bytes, rows))

    def codes(self, name: str, max_bytes: int, rows: range) -> Iterator[tuple[int, Codes]]:
        return cast(CodedSource, self._source).codes(name, max_bytes, rows)

    def close(self) -> None:
        self._source.close()
