"""`Routing`: how the experts of a token are chosen and weighed, with the formulas in torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Score = Literal["softmax", "sigmoid", "softmax_of_best", "sigmoid_of_best", "sparse_mixer"]


class Routing(NamedTuple):
    """The choice of `per_token` experts for each token, by a score of the router's logits.

    With the score "softmax_of_best" or "sigmoid_of_best", experts are chosen by their logits, and
    the softmax or sigmoid is computed from the logits of the chosen experts only. With
    "sparse_mixer" (arXiv:2409.12136), each chosen expert has the softmax of its logit among the
    logits that are not chosen yet and close to it, by the relative distance `tolerance`.
    With `renormalize`, the weights of a token's experts are divided by their sum plus `sum_eps`.
    Then the weights are multiplied by `factor`. The weights multiply the outputs of the experts or,
    with `scales_inputs`, their inputs (Llama 4). The experts form `groups` groups of equal size,
    and only the best `top_groups` of these groups are considered. A group is rated by the sum of
    its two best scores ("two_best"), or by its best score ("best").
    """

    per_token: int
    score: Score = "softmax"
    renormalize: bool = False
    factor: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: Literal["two_best", "best"] = "two_best"
    scales_inputs: bool = False
    sum_eps: float = 1e-20
    tolerance: float = 0.0


def choose_experts(
    logits: Tensor,
    routing: Routing,
    correction: Tensor | None,
    sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid,
) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, int64 `[T, k]`, and their weights `[T, k]`.

    The experts are in descending order of their scores; of equal scores, the first is better.
    `logits [T, E]` are float32 or float64, as are the weights. `correction [E]`, if given, is added
    to the scores to choose experts, but not to weigh them. `sigmoid` computes the sigmoid of each
    element of a tensor `[T, *]`.
    """
    if routing.score == "sparse_mixer":
        return _mix_sparsely(logits, routing)
    if routing.score == "softmax":
        scores = logits.softmax(-1)
    elif routing.score == "sigmoid":
        scores = sigmoid(logits)
    else:
        scores = logits
    ranked = scores if correction is None else scores + correction
    if routing.groups > 1:
        ranked = _keep_best_groups(ranked, routing)
    chosen = _best(ranked, routing.per_token)
    weights = scores.gather(1, chosen)
    if routing.score == "softmax_of_best":
        weights = weights.softmax(-1)
    elif routing.score == "sigmoid_of_best":
        weights = sigmoid(weights)
    if routing.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.sum_eps)
    return chosen, weights * routing.factor


def _mix_sparsely(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    left, chosen, weights = logits, [], []
    for _ in range(routing.per_token):
        own = _best(left, 1)
        best = left.gather(1, own)
        distance = (best - logits) / logits.abs().clamp(min=best)
        close = left.masked_fill(distance > routing.tolerance, -math.inf)
        weights.append(close.softmax(-1).gather(1, own))
        chosen.append(own)
        left = left.scatter(1, own, -math.inf)
    return torch.cat(chosen, 1), torch.cat(weights, 1)


def _best(scores: Tensor, count: int) -> Tensor:
    """Return the places of the `count` best scores of each row, the best first.

    Of equal scores, the first is better, as in compiled routing; `topk` returns any of them.
    """
    return scores.argsort(dim=-1, descending=True, stable=True)[:, :count].contiguous()


def _keep_best_groups(ranked: Tensor, routing: Routing) -> Tensor:
    """Return the scores with -inf in all groups except the best `top_groups`."""
    groups = ranked.view(len(ranked), routing.groups, ranked.shape[1] // routing.groups)
    if routing.group_score == "best":
        quality = groups.amax(-1)
    else:
        quality = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
    best = _best(quality, routing.top_groups)
    hidden = torch.ones_like(quality, dtype=torch.bool).scatter_(1, best, False)
    return groups.masked_fill(hidden.unsqueeze(-1), -math.inf).flatten(1)
