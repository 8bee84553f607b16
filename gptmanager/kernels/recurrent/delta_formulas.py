"""The gated delta rule (Yang et al. 2024, arXiv:2412.06464) in torch, token by token or in chunks.

Letters: R sequences with n tokens each, H value heads, keys of K elements, values of V elements.
The memory of a head is a matrix `S [K, V]`. A token with query q, key k, value v, decay g <= 0 and
rate b changes S to `exp(g) * S + k * d`, where `d = b * (v - exp(g) * k @ S)`. The token then reads
`q @ S` from the new S.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64
L2_EPS = 1e-6


class DeltaShape(NamedTuple):
    """The sizes of a layer. Each key head serves `value_heads / key_heads` value heads.

    `width` is the number of tokens that the convolution of a channel reads.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def keys(self) -> int:
        """The number of elements of all keys of a token."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """The number of elements of all values of a token."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The number of elements that are convolved: queries, keys and values."""
        return 2 * self.keys + self.values


class DeltaTensors(NamedTuple):
    """The parameters of a layer apart from its projections.

    `conv` `[width, channels]` has the weights of the convolution. With `decay` `[H]` (`A_log` in
    checkpoints) and `step` `[H]` (`dt_bias`), a token's decay is
    `g = -exp(decay) * softplus(argument + step)`, where a projection of the token gives `argument`.
    `norm` `[V]` is the weight of the output's norm.
    """

    conv: Tensor
    decay: Tensor
    step: Tensor
    norm: Tensor


class DeltaState(NamedTuple):
    """The state of a layer for each slot.

    `inputs` `[slots, width - 1, channels]` has the last inputs of the convolution, `memory`
    `[slots, H, K, V]` the memories of the heads.
    """

    inputs: Tensor
    memory: Tensor


def heads_of(x: Tensor, shape: DeltaShape) -> tuple[Tensor, Tensor, Tensor]:
    """Split convolved channels into queries, keys `[R, n, H, K]` and values `[R, n, H, V]`.

    Queries and keys are normalized, and queries are scaled by `K ** -0.5`.
    """
    queries, keys, values = x.split((shape.keys, shape.keys, shape.values), dim=-1)
    group = shape.value_heads // shape.key_heads

    def normed(own: Tensor) -> Tensor:
        own = own.unflatten(-1, (shape.key_heads, shape.key_dim))
        own = own * torch.rsqrt(own.square().sum(-1, keepdim=True) + L2_EPS)
        return own.repeat_interleave(group, dim=2)

    values = values.unflatten(-1, (shape.value_heads, shape.value_dim))
    return normed(queries) * shape.key_dim**-0.5, normed(keys), values


def step_by_step(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the values that tokens read, `[R, n, H, V]`, and the new memory, `[R, H, K, V]`.

    `q` and `k` are `[R, n, H, K]`, `v` `[R, n, H, V]`, and `decay` and `rate` `[R, n, H]`.
    """
    found = torch.empty_like(v)
    for token in range(q.shape[1]):
        memory = memory * decay[:, token, :, None, None].exp()
        key = k[:, token, :, :, None]
        change = (v[:, token] - (key * memory).sum(-2)) * rate[:, token, :, None]
        memory = memory + key * change.unsqueeze(-2)
        found[:, token] = (q[:, token, :, :, None] * memory).sum(-2)
    return found, memory


def in_chunks(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, rate: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the same as `step_by_step`, by matmuls over the tokens of a chunk.

    The changes d of a chunk solve a triangular system: the change of a token subtracts what the
    changes of earlier tokens have added along the token's key.
    """
    q, k, v, decay, rate = (it.transpose(1, 2) for it in (q, k, v, decay, rate))
    pieces = []
    for start in range(0, q.shape[2], CHUNK):
        own = slice(start, start + CHUNK)
        queries, keys, sums = q[:, :, own], k[:, :, own], decay[:, :, own].cumsum(-1)
        between = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).tril().exp().tril()
        rated = keys * rate[:, :, own, None]
        system = (rated @ keys.mT) * between
        seen = (rated * sums.exp().unsqueeze(-1)) @ memory
        right = v[:, :, own] * rate[:, :, own, None] - seen
        changes = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        read = (queries * sums.exp().unsqueeze(-1)) @ memory
        pieces.append(read + ((queries @ keys.mT) * between) @ changes)
        last = sums[:, :, -1:]
        memory = memory * last.exp().unsqueeze(-1)
        memory = memory + (keys * (last - sums).exp().unsqueeze(-1)).mT @ changes
    return torch.cat(pieces, dim=2).transpose(1, 2), memory
