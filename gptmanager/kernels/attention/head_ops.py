"""`HeadOps`: ops on the heads of tokens in torch, which all kernels inherit."""

from __future__ import annotations

import torch
from torch import Tensor


class HeadOps:
    """Ops on the heads of tokens. `deterministic` is as in `Kernels`."""

    deterministic: bool

    def linear_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        """`x [T, H, I] @ weight [H, I, O]`, head by head -> `[T, H, O]`, all of one dtype."""
        by_head = x.transpose(0, 1)
        if not self.deterministic:
            return torch.bmm(by_head, weight).transpose(0, 1)
        # one token at a time, so that a token's result does not depend on the batch
        each = [torch.bmm(own, weight) for own in torch.split(by_head, 1, dim=1)]
        return torch.cat(each, dim=1).transpose(0, 1)

    def joined(self, *parts: Tensor) -> Tensor:
        """`parts`, joined along their last dimension. They have the same dtype."""
        return torch.cat(parts, dim=-1)
