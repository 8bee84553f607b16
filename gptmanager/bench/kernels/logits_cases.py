"""The cases around sampling in the kernel benchmark: adjustments, masks, log
probabilities, continuations of beams. All read or write rows of logits in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from gptmanager.bench.kernels.cases import (
    Bed,
    Case,
    Contender,
    Prepared,
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
_SECTOR = 32  # bytes: the least that the cache holds of what is read here and there
_ALLOWED = 64  # tokens that a mask leaves
_BEAMS = 4


def logits_cases(sizes: Sizes) -> list[Case]:
    vocab_size = sizes.vocab_size
    history, biases = min(sizes.context // 4, vocab_size), min(_NUM_BIASES, vocab_size)
    allowed, most = min(_ALLOWED, vocab_size // 2), min(2 * _BEAMS, vocab_size)
    mask_bytes = 4 * (-(-vocab_size // 32) + vocab_size - allowed)
    case = partial(_case, sizes)
    # of each row: ids and their logits read and written; those of a bias with its values
    touched = history * (4 + 8) + biases * (8 + 8)
    name = f"penalties over {history} tokens, {biases} biases"
    return [
        case("adjustments", name, touched, partial(_prepare_adjustments, history, biases)),
        case("token_masks", f"{allowed} allowed", mask_bytes, partial(_prepare_masks, allowed)),
        case("log_probs", "of one token", 4 * vocab_size + 3 * 4, _prepare_log_probs),
        case("beam_step", f"{most} best", 4 * vocab_size + 8 * most, partial(_prepare_beams, most)),
    ]


def _case(
    sizes: Sizes, part: str, name: str, row_bytes: int, prepare: Callable[[Bed], Prepared]
) -> Case:
    name = f"{name}, {sizes.rows} x {sizes.vocab_size}"
    return Case(part, name, sizes.rows * row_bytes, prepare)


def _prepare_adjustments(length: int, num_biases: int, bed: Bed) -> Prepared:
    """Each row of its own slot; tokens of a history are distinct, the later half was generated."""
    rows, vocab_size = bed.sizes.rows, bed.sizes.vocab_size
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
    sets = _logits(bed, rows * length * (_SECTOR + 4))
    packed = bed.records(records, adjustments.PARAMS)
    lists, histories = bed.ints(np.tile(own, rows)), bed.ints(texts)
    seen = torch.zeros(rows, vocab_size, dtype=torch.int32, device=bed.device)
    slots, positions = _slots(bed), torch.full((rows,), length, device=bed.device)
    tokens, ids = histories.long(), torch.from_numpy(biased).to(bed.device)

    def by_torch(logits: Tensor) -> Tensor:
        logits[:, ids] += _BIAS
        found = logits.gather(1, tokens)
        found = torch.where(found > 0, found / _REPETITION, found * _REPETITION)
        found[:, length // 2 :] -= _FREQUENCY + _PRESENCE
        return logits.scatter_(1, tokens, found)

    def by_kernel(logits: Tensor) -> Tensor:
        adjustments.adjust(bed.launcher, logits, packed, lists, histories, seen, slots, positions)
        return logits

    error = largest_error(by_torch(sets[0].clone()))
    ours, peers = _on_copies(sets, by_kernel), {"torch": lambda: _on_copies(sets, by_torch)}
    return Prepared(len(sets), ours, error, tolerance(torch.float32), peers)


def _prepare_masks(num_allowed: int, bed: Bed) -> Prepared:
    """A few tokens of each row are allowed, as a grammar does it."""
    rows, vocab_size = bed.sizes.rows, bed.sizes.vocab_size
    random = np.random.default_rng(0)
    allowed = np.zeros((rows, -(-vocab_size // 32) * 32), dtype=np.uint8)
    for row in allowed:
        row[random.permutation(vocab_size)[:num_allowed]] = 1
    masks = torch.from_numpy(np.packbits(allowed, axis=1, bitorder="little").view("<i4"))
    masks = masks.to(bed.device)
    banned = torch.from_numpy(allowed[:, :vocab_size] == 0).to(bed.device)
    sets, slots = _logits(bed, rows * vocab_size * 4), _slots(bed)
    expected = sets[0].masked_fill(banned, -torch.inf)

    def by_kernel(logits: Tensor) -> Tensor:
        mask_logits(bed.launcher, logits, slots, masks)
        return logits

    def by_torch(logits: Tensor) -> Tensor:
        return logits.masked_fill_(banned, -torch.inf)

    def error(result: Tensor) -> float:
        return float((result != expected).float().mean().item())

    ours, peers = _on_copies(sets, by_kernel), {"torch": lambda: _on_copies(sets, by_torch)}
    return Prepared(len(sets), ours, error, 0.0, peers)


def _prepare_log_probs(bed: Bed) -> Prepared:
    rows, vocab_size = bed.sizes.rows, bed.sizes.vocab_size
    sets = _logits(bed, rows * vocab_size * 4)
    chosen = torch.arange(rows, device=bed.device) * 7919 % vocab_size
    tokens, places = chosen.int(), chosen[:, None]
    values = torch.empty(rows, device=bed.device)
    wanted = torch.full((rows,), LOG_PROB, dtype=torch.uint8, device=bed.device)
    packed, slots = _sampling_params(bed), _slots(bed)

    def ours(number: int) -> Tensor:
        log_probs(bed.launcher, values, sets[number], tokens, packed, wanted, slots)
        return values[:, None]

    def by_torch(number: int) -> Tensor:
        return sets[number].log_softmax(-1).gather(1, places)

    error, peers = largest_error(by_torch(0)), {"torch": lambda: by_torch}
    return Prepared(len(sets), ours, error, tolerance(torch.float32), peers)


def _prepare_beams(most: int, bed: Bed) -> Prepared:
    """A contender tells tokens; their log probabilities are compared, so that ties do no harm."""
    rows, vocab_size = bed.sizes.rows, bed.sizes.vocab_size
    sets = _logits(bed, rows * vocab_size * 4)
    tokens = torch.empty(rows, most, dtype=torch.int32, device=bed.device)
    found = torch.empty(rows, most, device=bed.device)
    packed, slots, counts = _sampling_params(bed), _slots(bed), bed.ints([most] * rows)
    scores = sets[0].log_softmax(-1)
    of_scores = largest_error(scores.topk(most).values)

    def ours(number: int) -> Tensor:
        best_of_rows(bed.launcher, tokens, found, sets[number], packed, slots, counts)
        return tokens

    def error(result: Tensor) -> float:
        if not ((result >= 0) & (result < vocab_size)).all():
            return float("inf")
        written = of_scores(found) if result is tokens else 0.0
        return max(of_scores(scores.gather(1, result.long())), written)

    def by_torch(number: int) -> Tensor:
        return sets[number].log_softmax(-1).topk(most).indices

    peers = {"torch": lambda: by_torch}
    return Prepared(len(sets), ours, error, tolerance(torch.float32), peers)


def _on_copies(sets: list[Tensor], work: Callable[[Tensor], Tensor]) -> Contender:
    """A contender that writes to its logits."""
    own = [logits.clone() for logits in sets]
    return lambda number: work(own[number])


def _logits(bed: Bed, set_bytes: int) -> list[Tensor]:
    return bed.sets(set_bytes, bed.sizes.rows, bed.sizes.vocab_size, dtype=torch.float32)


def _sampling_params(bed: Bed) -> Tensor:
    """Return the sampling parameters, one slot for each row."""
    record = sampling.pack(SamplingParams(), bed.sizes.vocab_size)
    return bed.records([record] * bed.sizes.rows, sampling.PARAMS)


def _slots(bed: Bed) -> Tensor:
    return bed.ints(np.arange(bed.sizes.rows))
