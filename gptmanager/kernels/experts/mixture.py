"""`ExpertMatrices`, the matrices of a layer's experts, and their matmuls, one expert at a time.

Tokens are sorted by expert: each expert multiplies all of its tokens at once, and reads its
matrices once. Experts that no token has chosen are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from gptmanager.kernels.activations.activation_kinds import Activation
from gptmanager.kernels.attention.paged_formulas import widened
from gptmanager.kernels.experts.routing import Routing, choose_experts
from gptmanager.kernels.gemm.packed_matrix import Matrix, PackedMatrix, Quantized


class ExpertOps(Protocol):
    """The ops of `Kernels` that compute experts."""

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor: ...

    def linear_silu_mul(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor: ...

    def activate(self, x: Tensor, activation: Activation, gated: bool) -> Tensor: ...

    def elementwise(self, op: Callable[[Tensor], Tensor], x: Tensor) -> Tensor: ...


class ExpertMatrices(NamedTuple):
    """The `count` experts of this rank, from number `first` on, one below another in each matrix.

    `up` is `[count * U, C]` and `down` is `[count * C, F]`. U is F, or 2F if `gated`: the rows of
    an expert's gate, then the rows of its up projection. `up_bias [count * U]` and
    `down_bias [count * C]` are None if experts have no biases. `factors [E]` has a factor for the
    routing weights of each of the E experts of all ranks; None means no factors.
    """

    up: Matrix
    up_bias: Tensor | None
    down: Matrix
    down_bias: Tensor | None
    activation: Activation
    gated: bool
    first: int
    count: int  # type: ignore[assignment]  # not the method of tuples
    factors: Tensor | None = None

    def choose(
        self,
        x: Tensor,
        logits: Tensor,
        routing: Routing,
        correction: Tensor | None,
        sigmoid: Callable[[Tensor], Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose k experts per token by `logits [T, E]`; return inputs, numbers and weights.

        The inputs of experts are `x [T, C]`, or `[T * k, C]` if `routing.scales_inputs`. The
        numbers of the chosen experts and their weights are `[T, k]`. `sigmoid`: see
        `choose_experts`.
        """
        bias = None if correction is None else widened(correction)
        return self.prepared(x, routing, *choose_experts(widened(logits), routing, bias, sigmoid))

    def prepared(
        self, x: Tensor, routing: Routing, chosen: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same as `choose`, for the numbers and weights that the router has chosen."""
        if self.factors is not None:
            weights = weights * self.factors[chosen]
        if routing.scales_inputs:
            x = (x.unsqueeze(1) * weights.unsqueeze(-1)).to(x.dtype).flatten(0, 1)
            weights = torch.ones_like(weights)
        return x, chosen, weights


class MixtureOps(ExpertOps, Protocol):
    """The experts of a layer in torch, which all kernels inherit."""

    def new_expert_matrix(
        self,
        count: int,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        quantized: Quantized | None = None,
        device: torch.device | str = "cpu",
    ) -> Matrix | None:
        """Return storage for `count` matrices `[rows, columns]` of experts, one below another.

        The result is None if the matmuls of all chosen experts cannot run as one operation, and a
        tensor if the kernels multiply by plain tensors. `quantized` is as in `new_matrix`, and must
        be in `expert_kinds`.
        """
        return None

    def experts(
        self,
        x: Tensor,
        logits: Tensor,
        correction: Tensor | None,
        routing: Routing,
        experts: ExpertMatrices,
    ) -> Tensor:
        """Choose experts by `logits [T, E]`; return their weighted sums `[T, C]` for `x [T, C]`."""
        sigmoid = partial(self.elementwise, torch.sigmoid)
        chosen = experts.choose(x, logits, routing, correction, sigmoid)
        return self.mix_experts(*chosen, experts)

    def mix_experts(
        self, x: Tensor, chosen: Tensor, weights: Tensor, experts: ExpertMatrices
    ) -> Tensor:
        """Return the weighted sums `[T, C]` of given experts `[T, k]` for `x [T, C]`.

        The function `mix_experts` explains `chosen` and `weights`. `experts.factors` is not used.
        """
        return mix_experts(self, x, chosen, weights, experts)


def mix_experts(
    ops: ExpertOps, x: Tensor, chosen: Tensor, weights: Tensor, experts: ExpertMatrices
) -> Tensor:
    """Return the weighted sums `[T, C]` of the outputs of each token's experts for `x [T, C]`.

    `chosen [T, k]` are numbers of experts, `weights [T, k]` their weights; experts of other ranks
    add nothing. `x` may also be `[T * k, C]`, with an input for each of a token's experts. Sums
    have the dtype of the weights, and the result has the dtype of `x`.
    """
    if not len(x):
        return x
    per_row = chosen.numel() // len(x)
    numbers = (chosen - experts.first).flatten()
    # experts of other ranks are sorted last
    numbers = torch.where((numbers >= 0) & (numbers < experts.count), numbers, experts.count)
    order = numbers.argsort(stable=True)
    counts = torch.bincount(numbers, minlength=experts.count).tolist()[: experts.count]
    rows = x.index_select(0, order // per_row)
    outputs = _outputs(ops, rows, counts, experts)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    by_token = outputs.index_select(0, place).view(*chosen.shape, -1)
    return (by_token * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def _outputs(
    ops: ExpertOps, rows: Tensor, counts: Sequence[int], experts: ExpertMatrices
) -> Tensor:
    """Return the outputs of sorted rows, and zeros for the rows of other ranks' experts."""
    ups, downs = _parts(experts.up, experts.count), _parts(experts.down, experts.count)
    up_biases, down_biases = (
        (None,) * experts.count if bias is None else bias.chunk(experts.count)
        for bias in (experts.up_bias, experts.down_bias)
    )
    found, start = [], 0
    for number, count in enumerate(counts):
        if not count:
            continue
        own = rows[start : start + count]
        start += count
        if experts.gated and experts.activation == "silu":
            hidden = ops.linear_silu_mul(own, ups[number], up_biases[number])
        else:
            hidden = ops.linear(own, ups[number], up_biases[number])
            hidden = ops.activate(hidden, experts.activation, experts.gated)
        found.append(ops.linear(hidden, downs[number], down_biases[number]))
    if start < len(rows):
        found.append(torch.zeros_like(rows[start:]))
    return torch.cat(found) if found else torch.zeros_like(rows)


def _parts(matrix: Matrix, count: int) -> Sequence[Matrix]:
    """Return the matrix of each expert: a view, or a copy if experts share a panel."""
    return matrix.parts(count) if isinstance(matrix, PackedMatrix) else matrix.chunk(count)
