"""`norm_over_ranks`: the RMS norm of queries and keys over the heads of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gptmanager.kernels.attention.paged_formulas import widened
from gptmanager.models.decoder.layer_tensors import HeadNorm
from gptmanager.models.spec import Attention
from gptmanager.ranks.collectives import Collectives


def norm_over_ranks(
    qkv: Tensor,
    norms: Sequence[HeadNorm],
    eps: float,
    whole: Attention,
    collectives: Collectives,
) -> None:
    """Normalize this rank's queries and keys in `qkv [T, N]` in place.

    The mean square of a token's queries is taken over the heads of all ranks; likewise for keys.
    `norms`: the norm of queries, then the norm of keys. `whole`: the attention of all ranks.
    No family adds 1 to the weights of these norms.
    """
    parts = [qkv[:, it.columns.start : it.columns.stop] for it in norms]
    squares = torch.stack([widened(part).square().sum(-1) for part in parts], 1)
    # With more ranks than KV heads, the sum over ranks counts a head once per rank that has it.
    squares[:, 1] /= max(1, collectives.layout.tensor_parallel_size // whole.num_kv_heads)
    squares = collectives.all_reduce(squares)
    for number, (part, norm) in enumerate(zip(parts, norms, strict=True)):
        heads = (whole.num_heads, whole.num_kv_heads)[number]
        mean = squares[:, number : number + 1] / (heads * whole.head_dim)
        part.copy_(widened(part) * torch.rsqrt(mean + eps) * widened(norm.weight))
