"""Kernel benchmark cases for sampling. A token is correct if top-k and top-p allow it.

Models with random weights produce flat logits: top-p keeps most tokens, which is the worst case.
Trained models produce peaked logits: top-p keeps few tokens.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gptmanager.bench.kernels.attention_peers import flashinfer
from gptmanager.bench.kernels.cases import Case, Contender, Goal, Prepared, Rig, Sizes
from gptmanager.cuda.sampling.sampling import PARAMS, pack, sample
from gptmanager.request.sampling_params import SamplingParams

_TOP_K, _TOP_P, _TEMPERATURE = 50, 0.9, 0.8
_WIDE = 1000  # a top-k larger than the number of threads of a block
_PEAKED = 6.0  # flat logits times this factor are peaked
_SLACK = 1e-4  # added to top-p: rounding may decide whether top-p excludes a token


def sampling_cases(sizes: Sizes) -> list[Case]:
    """Return the cases for several sampling parameters, with flat and with peaked logits."""
    drawn = SamplingParams(greedy=False, temperature=_TEMPERATURE, seed=1)
    nucleus, wide = replace(drawn, top_p=_TOP_P), replace(drawn, top_k=_WIDE)
    limited = replace(nucleus, top_k=_TOP_K)
    goals = (Goal("roofline", 3),)
    case = functools.partial(_case, sizes)
    return [
        case(f"top-k {_TOP_K}, top-p {_TOP_P}, peaked", limited, _PEAKED, goals=goals),
        case(f"top-p {_TOP_P}, peaked", nucleus, _PEAKED, goals=goals),
        case(f"top-p {_TOP_P}, flat", nucleus, 1.0, goals=goals),
        case(f"top-k {_WIDE}, flat", wide, 1.0, goals=goals, quick=False),
        case("greedy", SamplingParams(), 1.0, quick=False),
    ]


def _case(
    sizes: Sizes,
    name: str,
    params: SamplingParams,
    scale: float,
    *,
    goals: tuple[Goal, ...] = (),
    quick: bool = True,
) -> Case:
    num_bytes = sizes.rows * sizes.vocab_size * 4
    name = f"{name}, {sizes.rows} x {sizes.vocab_size}"
    prepare = functools.partial(_prepare, params, scale, num_bytes)
    return Case("sampling", name, num_bytes, prepare, goals=goals, quick=quick)


def _prepare(params: SamplingParams, scale: float, num_bytes: int, rig: Rig) -> Prepared:
    rows, vocab_size = rig.sizes.rows, rig.sizes.vocab_size
    sets = rig.sets(num_bytes, rows, vocab_size, dtype=torch.float32, scale=scale)
    packed = rig.records([pack(params, vocab_size)] * rows, PARAMS)
    slots = rig.ints(np.arange(rows))
    positions = torch.arange(8, 8 + rows, device=rig.device)
    tokens = torch.empty(rows, dtype=torch.int32, device=rig.device)
    inputs = torch.empty_like(tokens)

    def ours(number: int) -> Tensor:
        sample(rig.launcher, tokens, inputs, sets[number], packed, slots, positions)
        return tokens

    peers = {} if params.greedy else {
        "flashinfer": lambda: _flashinfer(sets, params),
        "torch sort": lambda: _torch_sort(sets, params),
    }  # fmt: skip
    return Prepared(len(sets), ours, functools.partial(refused_share, sets[0], params), 0.0, peers)


def refused_share(logits: Tensor, params: SamplingParams, tokens: Tensor) -> float:
    """Return the share of rows for which top-k or top-p excludes the sampled token."""
    in_range = (tokens >= 0) & (tokens < logits.shape[1])
    chosen = logits.gather(1, tokens.long().clamp(0, logits.shape[1] - 1)[:, None])
    higher = logits > chosen
    if params.greedy:
        is_allowed = ~higher.any(1)
    else:
        is_allowed = torch.ones_like(in_range)
        if params.top_k:
            is_allowed &= higher.sum(1) < params.top_k
            kth = logits.topk(min(params.top_k, logits.shape[1]), dim=1).values[:, -1:]
            logits = logits.masked_fill(logits < kth, -torch.inf)
        weights = (logits / params.temperature).softmax(-1)
        above = torch.where(higher, weights, 0.0).sum(1)
        is_allowed &= above < params.top_p + _SLACK
    return 1 - (is_allowed & in_range).float().mean().item()


def _flashinfer(sets: list[Tensor], params: SamplingParams) -> Contender:
    """Return FlashInfer's sampling: a softmax, then rejection with a moving pivot."""
    sampling = flashinfer().sampling

    def run(number: int) -> Any:
        probs = torch.softmax(sets[number] / params.temperature, dim=-1)
        place = {"seed": params.seed, "offset": number}  # avoids a wait for torch's generator
        if params.top_k:
            return sampling.top_k_top_p_sampling_from_probs(
                probs, params.top_k, params.top_p, filter_apply_order="top_k_first", **place
            )
        return sampling.top_p_sampling_from_probs(probs, params.top_p, **place)

    return run


def _torch_sort(sets: list[Tensor], params: SamplingParams) -> Contender:
    """Return sampling as it is commonly written in torch: it sorts each row."""

    def run(number: int) -> Tensor:
        logits, order = (sets[number] / params.temperature).sort(dim=-1, descending=True)
        if params.top_k:
            logits, order = logits[:, : params.top_k], order[:, : params.top_k]
        probs = logits.softmax(-1)
        probs = probs.masked_fill(probs.cumsum(-1) - probs >= params.top_p, 0.0)
        # exponential race: the argmax of `probs / noise` is a sample, without synchronization
        place = (probs / torch.empty_like(probs).exponential_()).argmax(-1, keepdim=True)
        return order.gather(1, place)[:, 0]

    return run
