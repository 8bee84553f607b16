"""The state space of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060) in torch, by tokens or in chunks.

Letters: R sequences with n tokens each, H heads of P elements, states of N elements. The memory of
a head is a matrix `S [N, P]`. A token with input x `[P]`, input vector B and output vector C `[N]`,
step t > 0 and decay g < 0 changes S to `exp(g) * S + B * (t * x)`, and then reads `C @ S`.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gptmanager.kernels.recurrent.convolution import Filter

CHUNK = 64


class StateSpaceShape(NamedTuple):
    """The sizes of a layer. Heads in the same of `groups` share B and C.

    `width` is the number of tokens that the convolution of a channel reads. Outputs are normalized
    in `norm_groups` groups.
    """

    heads: int
    head_dim: int
    state: int
    groups: int
    width: int
    norm_groups: int = 1

    @property
    def inner(self) -> int:
        """The number of elements of all heads of a token."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """The number of elements that are convolved: inputs, B and C."""
        return self.inner + 2 * self.groups * self.state

    @property
    def projected(self) -> int:
        """The number of elements that are projected for a token: gates, channels and steps."""
        return self.inner + self.channels + self.heads


class StateSpaceTensors(NamedTuple):
    """The parameters of a layer apart from its projections.

    With `step` `[H]` (`dt_bias` in checkpoints) and `decay` `[H]` (`A_log`), a token's step is
    `t = softplus(argument + step)` and its decay `-exp(decay) * t`, where a projection of the token
    is `argument`. `skip` `[H]` (`D`) times its input is added to what a token reads. `norm`
    `[H * P]` is the weight of the output's norm.
    """

    conv: Filter
    decay: Tensor
    step: Tensor
    skip: Tensor
    norm: Tensor


class StateSpaceState(NamedTuple):
    """The state of a layer for each slot.

    `inputs` `[slots, width - 1, channels]` has the last inputs of the convolution, `memory`
    `[slots, H, N, P]` the memories of the heads.
    """

    inputs: Tensor
    memory: Tensor


def scan_tokens(
    c: Tensor, b: Tensor, v: Tensor, decay: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """Return what tokens read, `[R, n, H, P]`, and the new memory, `[R, H, N, P]`.

    `c` and `b` are `[R, n, H, N]`, `v` `[R, n, H, P]` has inputs times steps, `decay` is
    `[R, n, H]`.
    """
    found = torch.empty_like(v)
    for token in range(c.shape[1]):
        memory = memory * decay[:, token, :, None, None].exp()
        memory = memory + b[:, token, :, :, None] * v[:, token].unsqueeze(-2)
        found[:, token] = (c[:, token, :, :, None] * memory).sum(-2)
    return found, memory


def scan_chunks(
    c: Tensor, b: Tensor, v: Tensor, decay: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the same as `scan_tokens`, by matmuls over the tokens of a chunk."""
    c, b, v, decay = (it.transpose(1, 2) for it in (c, b, v, decay))
    pieces = []
    for start in range(0, c.shape[2], CHUNK):
        own = slice(start, start + CHUNK)
        outputs, inputs, values = c[:, :, own], b[:, :, own], v[:, :, own]
        sums = decay[:, :, own].cumsum(-1)
        between = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).tril().exp().tril()
        read = (outputs * sums.exp().unsqueeze(-1)) @ memory
        pieces.append(read + ((outputs @ inputs.mT) * between) @ values)
        last = sums[:, :, -1:]
        memory = memory * last.exp().unsqueeze(-1)
        memory = memory + (inputs * (last - sums).exp().unsqueeze(-1)).mT @ values
    return torch.cat(pieces, dim=2).transpose(1, 2), memory
