"""Rejection sampling: accepts or replaces a draft, so that tokens have the model's distribution.

In speculative sampling (Leviathan et al. 2023; Chen et al. 2023), p is the distribution of the
model, and q is the distribution from which the draft was sampled. The draft is kept with
probability min(1, p / q); otherwise the token is sampled from max(p - q, 0), normalized. The module
works on distributions, and knows nothing of rows and requests.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gptmanager.decoding.sampling.random_numbers import uniform
from gptmanager.request.sampling_params import SamplingParams

Floats = npt.NDArray[np.float64]

# values of the argument `draw` that no other sampling of the same position uses
ACCEPTANCE_DRAW, REPLACEMENT_DRAW = 1 << 30, (1 << 30) + 1


def truncated(log_probs: npt.NDArray[np.float32], params: SamplingParams) -> Floats:
    """Truncate a distribution `[vocab]` by top-k, top-p and min-p, and normalize it.

    The temperature has been applied to `log_probs`. top_k keeps ties. top_p keeps the smallest set
    of best tokens with a total probability of at least top_p. min_p is relative to the best
    probability. The best token is always kept.
    """
    p: Floats = np.exp(log_probs.astype(np.float64))
    if 0 < params.top_k < len(p):
        kth = np.partition(p, len(p) - params.top_k)[len(p) - params.top_k]
        p = np.where(p >= kth, p, 0.0)
    p /= p.sum()
    if params.top_p < 1:
        ranking = np.argsort(-p, kind="stable")
        above = np.cumsum(p[ranking]) - p[ranking]
        p[ranking[(above >= params.top_p) & (above > 0)]] = 0.0
    if params.min_p > 0:
        p = np.where(p >= params.min_p * p.max(), p, 0.0)
    normalized: Floats = p / p.sum()
    return normalized


def verify_draft(p: Floats, q: Floats, draft: int, accept: float, replace: float) -> int:
    """Return `draft` if it is accepted, otherwise a token sampled from max(p - q, 0).

    `p` and `q` `[vocab]` are the distributions of the model and of the draft. `accept` and
    `replace` are random numbers in [0, 1).
    """
    if accept * q[draft] < p[draft]:
        return draft
    rest = np.maximum(p - q, 0.0)
    cumulative = np.cumsum(rest if rest.any() else p)  # all 0: p equals q except for rounding
    total = cumulative[-1]
    return int(np.searchsorted(cumulative, min(replace * total, np.nextafter(total, 0)), "right"))


def sample_draft(
    log_probs: npt.NDArray[np.float32],
    draft_logits: npt.NDArray[np.float32],
    draft: int,
    params: SamplingParams,
    position: int,
) -> int:
    """Return the token at `position`, given a `draft` sampled from softmax(`draft_logits`).

    `draft_logits` may be -inf, except for `draft`.
    """
    q: Floats = np.exp(draft_logits.astype(np.float64) - draft_logits.max())
    seed = np.uint64(params.seed)
    accept = float(uniform(seed, position, ACCEPTANCE_DRAW))
    replace = float(uniform(seed, position, REPLACEMENT_DRAW))
    return verify_draft(truncated(log_probs, params), q / q.sum(), draft, accept, replace)
