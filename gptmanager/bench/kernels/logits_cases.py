"""Kernel benchmark cases for logits: adjustments, token masks, log probabilities, beam steps.

All of these kernels read or write float32 rows of logits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from gptmanager.bench.kernels.cases import (
    Case,
    Contender,
    Prepared,
    Rig,
    Sizes,
    largest_error,
    tolerance,
)
from gptmanager.cuda.sampling import adjustments, sampling
from gptmanager.cuda.sampling.beam_step import best_of_rows
from gptmanager.cuda.sampling.log_probs import LOG_PROB, log_probs
from gptmanager.cuda.sampling.token_masks import mask_logits
from gptmanager.request.input_rows import token_bias
from gptmanager.request.sampling_params import SamplingParams

_REPETITION, _PRESENCE, _FREQUENCY = 1.1, 0.2, 0.1
_NUM_BIASES, _BIAS = 64, 0.5
_SECTOR = 32  # bytes: the smallest unit that scattered reads load
_ALLOWED = 64  # tokens that a mask allows
_BEAMS = 4


def logits_cases(sizes: Sizes) -> list[Case]:
    """Return one case for each kernel."""
    vocab_size = sizes.vocab_size
    history, biases = min(sizes.context // 4, vocab_size), min(_NUM_BIASES, vocab_size)
    allowed, most = min(_ALLOWED, vocab_size // 2), min(2 * _BEAMS, vocab_size)
    mask_bytes = 4 * (-(-vocab_size // 32) + vocab_size - allowed)
    case = partial(_case, sizes)
    # Bytes per row: for each token, its id (4) and its logit, read and written (8); a bias also has
    # a value (4).
    touched = history * (4 + 8) + biases * (8 + 8)
    name = f"penalties over {history} tokens, {biases} biases"
    return [
        case("adjustments", name, touched, partial(_prepare_adjustments, history, biases)),
        case("token_masks", f"{allowed} allowed", mask_bytes, partial(_prepare_masks, allowed)),
        case("log_probs", "of one token", 4 * vocab_size + 3 * 4, _prepare_log_probs),
        case("beam_step", f"{most} best", 4 * vocab_size + 8 * most, partial(_prepare_beams, most)),
    ]


def _case(
    sizes: Sizes, part: str, name: str, row_bytes: int, prepare: Callable[[Rig], Prepared]
) -> Case:
    name = f"{name}, {sizes.rows} x {sizes.vocab_size}"
    return Case(part, name, sizes.rows * row_bytes, prepare)


def _prepare_adjustments(length: int, num_biases: int, rig: Rig) -> Prepared:
    """Prepare rows with one slot each and histories of distinct tokens, half of them generated."""
    rows, vocab_size = rig.sizes.rows, rig.sizes.vocab_size
    random = np.random.default_rng(0)
    texts = np.array([random.permutation(vocab_size)[:length] for _ in range(rows)], dtype=np.int32)
    biased = random.permutation(vocab_size)[:num_biases]
    params = SamplingParams(
        repetition_penalty=_REPETITION,
        presence_penalty=_PRESENCE,
        frequency_penalty=_FREQUENCY,
        embedding_bias=token_bias(biased, [_BIAS] * len(biased)),
    )
    own = adjustments.pack_lists(params)
    records = [
        adjustments.pack(params, length // 2, vocab_size, row * len(own)) for row in range(rows)
    ]
    sets = _logits(rig, rows * length * (_SECTOR + 4))
    packed = rig.records(records, adjustments.PARAMS)
    lists, histories = rig.ints(np.tile(own, rows)), rig.ints(texts)
    seen = torch.zeros(rows, vocab_size, dtype=torch.int32, device=rig.device)
    slots, positions = _slots(rig), torch.full((rows,), length, device=rig.device)
    tokens, ids = histories.long(), torch.from_numpy(biased).to(rig.device)

    def by_torch(logits: Tensor) -> Tensor:
        logits[:, ids] += _BIAS
        found = logits.gather(1, tokens)
        found = torch.where(found > 0, found / _REPETITION, found * _REPETITION)
        found[:, length // 2 :] -= _FREQUENCY + _PRESENCE
        return logits.scatter_(1, tokens, found)

    def by_kernel(logits: Tensor) -> Tensor:
        adjustments.adjust(rig.launcher, logits, packed, lists, histories, seen, slots, positions)
        return logits

    error = largest_error(by_torch(sets[0].clone()))
    ours, peers = _on_copies(sets, by_kernel), {"torch": lambda: _on_copies(sets, by_torch)}
    return Prepared(len(sets), ours, error, tolerance(torch.float32), peers)


def _prepare_masks(num_allowed: int, rig: Rig) -> Prepared:
    """Prepare masks that allow a few tokens of each row, as a grammar does."""
    rows, vocab_size = rig.sizes.rows, rig.sizes.vocab_size
    random = np.random.default_rng(0)
    allowed = np.zeros((rows, -(-vocab_size // 32) * 32), dtype=np.uint8)
    for row in allowed:
        row[random.permutation(vocab_size)[:num_allowed]] = 1
    masks = torch.from_numpy(np.packbits(allowed, axis=1, bitorder="little").view("<i4"))
    masks = masks.to(rig.device)
    banned = torch.from_numpy(allowed[:, :vocab_size] == 0).to(rig.device)
    sets, slots = _logits(rig, rows * vocab_size * 4), _slots(rig)
    expected = sets[0].masked_fill(banned, -torch.inf)

    def by_kernel(logits: Tensor) -> Tensor:
        mask_logits(rig.launcher, logits, slots, masks)
        return logits

    def by_torch(logits: Tensor) -> Tensor:
        return logits.masked_fill_(banned, -torch.inf)

    def error(result: Tensor) -> float:
        return float((result != expected).float().mean().item())

    ours, peers = _on_copies(sets, by_kernel), {"torch": lambda: _on_copies(sets, by_torch)}
    return Prepared(len(sets), ours, error, 0.0, peers)


def _prepare_log_probs(rig: Rig) -> Prepared:
    rows, vocab_size = rig.sizes.rows, rig.sizes.vocab_size
    sets = _logits(rig, rows * vocab_size * 4)
    chosen = torch.arange(rows, device=rig.device) * 7919 % vocab_size
    tokens, places = chosen.int(), chosen[:, None]
    values = torch.empty(rows, device=rig.device)
    wanted = torch.full((rows,), LOG_PROB, dtype=torch.uint8, device=rig.device)
    packed, slots = _sampling_params(rig), _slots(rig)

    def ours(number: int) -> Tensor:
        log_probs(rig.launcher, values, sets[number], tokens, packed, wanted, slots)
        return values[:, None]

    def by_torch(number: int) -> Tensor:
        return sets[number].log_softmax(-1).gather(1, places)

    error, peers = largest_error(by_torch(0)), {"torch": lambda: by_torch}
    return Prepared(len(sets), ours, error, tolerance(torch.float32), peers)


def _prepare_beams(most: int, rig: Rig) -> Prepared:
    """Prepare beam steps.

    The log probabilities of the tokens are compared, not the tokens, because tokens with equal
    logits may be in any order.
    """
    rows, vocab_size = rig.sizes.rows, rig.sizes.vocab_size
    sets = _logits(rig, rows * vocab_size * 4)
    tokens = torch.empty(rows, most, dtype=torch.int32, device=rig.device)
    found = torch.empty(rows, most, device=rig.device)
    packed, slots, counts = _sampling_params(rig), _slots(rig), rig.ints([most] * rows)
    scores = sets[0].log_softmax(-1)
    score_error = largest_error(scores.topk(most).values)

    def ours(number: int) -> Tensor:
        best_of_rows(rig.launcher, tokens, found, sets[number], packed, slots, counts)
        return tokens

    def error(result: Tensor) -> float:
        if not ((result >= 0) & (result < vocab_size)).all():
            return float("inf")
        written = score_error(found) if result is tokens else 0.0
        return max(score_error(scores.gather(1, result.long())), written)

    def by_torch(number: int) -> Tensor:
        return sets[number].log_softmax(-1).topk(most).indices

    peers = {"torch": lambda: by_torch}
    return Prepared(len(sets), ours, error, tolerance(torch.float32), peers)


def _on_copies(sets: list[Tensor], work: Callable[[Tensor], Tensor]) -> Contender:
    """Return a contender that runs `work`, which modifies its argument, on copies of `sets`."""
    own = [logits.clone() for logits in sets]
    return lambda number: work(own[number])


def _logits(rig: Rig, set_bytes: int) -> list[Tensor]:
    return rig.sets(set_bytes, rig.sizes.rows, rig.sizes.vocab_size, dtype=torch.float32)


def _sampling_params(rig: Rig) -> Tensor:
    """Return the sampling parameters, one slot for each row."""
    record = sampling.pack(SamplingParams(), rig.sizes.vocab_size)
    return rig.records([record] * rig.sizes.rows, sampling.PARAMS)


def _slots(rig: Rig) -> Tensor:
    return rig.ints(np.arange(rig.sizes.rows))
