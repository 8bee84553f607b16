"""Changes to the inputs of attention in some layers: normed heads, fewer pages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gptmanager.kernels.attention.attention_arguments import Pages
from gptmanager.kernels.reference import Kernels
from gptmanager.models.decoder.layer_tensors import HeadNorm
from gptmanager.models.spec import Norms


def norm_heads(kernels: Kernels, qkv: Tensor, given: Sequence[HeadNorm], norms: Norms) -> None:
    """Apply the norms `given` to heads of `qkv [T, N]`, in place."""
    kind = {"centered": norms.query_key_kind == "layer", "plus_one": norms.plus_one}
    for columns, width, weight, bias in given:
        if bias is None:
            kernels.norm_heads(qkv, columns, width, weight, norms.eps, **kind)
        else:
            kernels.layer_norm_heads(qkv, columns, width, weight, bias, norms.eps)


def without_heads(pages: Pages) -> Pages:
    """Return `pages` with zero KV heads, so that a layer writes no keys and values.

    This is for a layer that uses the keys and values of another layer.
    """
    scales = None if pages.cache_scales is None else pages.cache_scales[:, :0].contiguous()
    return Pages(pages.keys[:, :0], pages.values[:, :0], scales)
