"""`Sampler`: chooses one token a row from a step's logits, each row by its own parameters.

The order on the logits is fixed (contract): post-processor, embedding bias, penalties, bad words
and n-grams change them before they come here; then min_length, temperature, top-k, top-p, min-p.
This module decides what those five keep and which kept token is drawn. It knows nothing of
requests, stop words, or the network.

A row's token depends on its logits, parameters, seed and position alone, bit for bit. Hence the
only operations here are ones whose result for a row cannot depend on its neighbors: correctly
rounded elementwise ones, and reductions that never cross or split a row.

Drawing inverts the cumulative distribution in the order of token ids, without a sort. Top-p needs
none either: a token is drawn from the whole distribution and accepted if the mass ranked above it
is below p; otherwise the next draw is from what ranks above it. That is the distribution over the
nucleus, and takes 1/p draws at most on average.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gptmanager.request import SamplingParams

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]

_BLOCK = 128  # tokens whose weights are summed before any cumulative sum
_MAX_NARROW = 1024  # rows with a smaller top_k are cut to their best tokens first
_PART = 1 << 20  # logits worked on at a time: the temporaries stay in cache
_LOW_32 = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_PHILOX_FACTORS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_PHILOX_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)


def philox4x32(counter: Words, key: Words, rounds: int = 10) -> Words:
    """Philox4x32 (Salmon et al. 2011) of `counter` `[4, n]` under `key` `[2, n]`: `[4, n]`.

    All are uint64 arrays of 32-bit words, the least significant word first.
    """
    even, odd = counter[0::2], counter[1::2]
    for _ in range(rounds):
        product = even * _PHILOX_FACTORS
        even = (product >> _HALF)[::-1] ^ odd ^ key
        odd = (product & _LOW_32)[::-1]
        key = (key + _PHILOX_KEY_STEPS) & _LOW_32
    return np.stack((even[0], odd[0], even[1], odd[1]))


def uniform(seeds: Words, positions: Ints, draw: int = 0) -> Floats:
    """Numbers in [0, 1) with 53 random bits, `[n]`: functions of (seed, position, draw) alone.

    `seeds` uint64 `[n]`; `positions` `[n]`, not negative; `draw` tells apart the numbers that one
    token needs.
    """
    places = positions.astype(np.uint64)
    counter = np.stack(
        (places & _LOW_32, places >> _HALF, np.full_like(places, draw), np.zeros_like(places))
    )
    words = philox4x32(counter, np.stack((seeds & _LOW_32, seeds >> _HALF)))
    high, low = words[0] >> np.uint64(5), words[1] >> np.uint64(6)
    return (high * 2.0**26 + low) * 2.0**-53


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """What governs n rows; every array has n entries."""

    temperature: npt.NDArray[np.float32]
    top_k: Ints
    top_p: Floats
    min_p: Floats
    seeds: Words
    positions: Ints


class Sampler:
    """Per-slot parameters, and the choice of tokens for any set of slots.

    top_k keeps all that tie with the k-th. top_p keeps the shortest ranking whose mass reaches p,
    in single precision; equal logits rank by descending id, as in transformers. min_p compares
    with the most likely token. The most likely token is always kept.

    Odd logits harm their own row only: NaN counts as -inf; +inf is taken (the lowest id of
    several), by sampling rows too; a row of nothing but -inf yields token 0.

    `device` is where the logits lie; from elsewhere than the CPU they are copied to it.
    """

    def __init__(
        self, num_slots: int, vocab_size: int, device: torch.device | str = "cpu"
    ) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._greedy = np.ones(num_slots, dtype=np.bool_)
        self._temperature = np.ones(num_slots, dtype=np.float32)
        self._top_k = np.zeros(num_slots, dtype=np.int64)  # 0: unlimited
        self._width = np.full(num_slots, vocab_size, dtype=np.int64)
        self._top_p = np.ones(num_slots, dtype=np.float64)
        self._min_p = np.zeros(num_slots, dtype=np.float64)
        self._seeds = np.zeros(num_slots, dtype=np.uint64)
        self._end_id = np.zeros(num_slots, dtype=np.int64)
        self._first_end = np.zeros(num_slots, dtype=np.int64)  # end_id's first lawful position

    def load(self, slot: int, params: SamplingParams, orig_prompt_len: int) -> None:
        """The sequence in `slot` is sampled by `params` from now on; these are valid values.

        `orig_prompt_len`: tokens that the host sent; min_length counts from there.
        """
        self._greedy[slot] = (
            params.greedy or params.top_k == 1 or params.top_p <= 0 or params.temperature <= 0
        )
        top_k = params.top_k if params.top_k < self.vocab_size else 0
        # The width follows from the request alone, and has room for one token beyond the k-th.
        width = max(64, 1 << top_k.bit_length())
        narrow = 0 < top_k and width <= _MAX_NARROW and width < self.vocab_size
        self._temperature[slot] = params.temperature
        self._top_k[slot] = top_k
        self._width[slot] = width if narrow else self.vocab_size
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seeds[slot] = params.seed & (2**64 - 1)
        has_end = 0 <= params.end_id < self.vocab_size
        self._end_id[slot] = params.end_id if has_end else 0
        self._first_end[slot] = orig_prompt_len + params.min_length if has_end else 0

    def sample(self, logits: Tensor, slots: Ints, positions: Ints) -> npt.NDArray[np.int32]:
        """The next token of each of S rows, int32 `[S]`.

        `logits` float32 `[S, vocab_size]`, may be changed; `slots` int64 `[S]`; `positions` int64
        `[S]`: the absolute position of the token to be chosen. Raises ValueError for other logits.
        """
        if logits.shape != (len(slots), self.vocab_size) or logits.dtype != torch.float32:
            raise ValueError(
                f"logits are {logits.dtype} {list(logits.shape)}, "
                f"expected torch.float32 {[len(slots), self.vocab_size]}"
            )
        early = np.flatnonzero(positions < self._first_end[slots])
        if early.size:
            logits[early, self._end_id[slots[early]]] = -torch.inf
        logits = logits.cpu()
        tokens, peaks = _best(logits)
        rows = np.flatnonzero(~self._greedy[slots])
        if rows.size:
            with np.errstate(over="ignore"):
                # An infinite quotient leaves nothing to draw: the best token has all the mass.
                rows = rows[np.isfinite(peaks[rows] / self._temperature[slots[rows]])]
            self._draw(logits, rows, slots, positions, tokens)
        return tokens.astype(np.int32)

    def _draw(
        self, logits: Tensor, rows: Ints, slots: Ints, positions: Ints, tokens: Ints
    ) -> None:
        """Put the tokens of `rows` in place, rows of one width together."""
        widths = self._width[slots[rows]]
        wide = [rows[widths == self.vocab_size]]
        for width in np.unique(widths[widths < self.vocab_size]).tolist():
            for part in self._parts(rows[widths == width]):
                governing = self._governing(slots[part], positions[part])
                tokens[part], overflowing = _choose_narrow(logits[part], width, governing)
                wide.append(part[overflowing])
        for part in self._parts(np.concatenate(wide)):
            governing = self._governing(slots[part], positions[part])
            tokens[part] = _choose_wide(logits[part], governing)

    def _parts(self, rows: Ints) -> Iterator[Ints]:
        step = max(1, _PART // self.vocab_size)
        return (rows[start : start + step] for start in range(0, len(rows), step))

    def _governing(self, slots: Ints, positions: Ints) -> _Rows:
        return _Rows(
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
            seeds=self._seeds[slots],
            positions=positions,
        )


def _best(logits: Tensor) -> tuple[Ints, npt.NDArray[np.float32]]:
    """The best token of each row, the lowest id on a tie, and its logit; NaN becomes -inf."""
    values = logits.numpy()  # NumPy's argmax is several times faster than torch's here
    tokens = values.argmax(axis=1)
    peaks = values[np.arange(len(values)), tokens]
    broken = np.flatnonzero(np.isnan(peaks))  # a NaN is its row's maximum
    if broken.size:
        repaired = np.where(np.isnan(values[broken]), np.float32(-np.inf), values[broken])
        values[broken] = repaired
        tokens[broken] = repaired.argmax(axis=1)
        peaks[broken] = repaired.max(axis=1)
    return tokens, peaks


def _choose_narrow(
    logits: Tensor, width: int, rows: _Rows
) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Tokens of rows with top_k < width, and which of them need more columns after all.

    A row overflows when tokens beyond its `width` best may tie with its k-th.
    """
    scaled, ids = torch.topk(logits, width)
    scaled.div_(_column(rows.temperature))
    kth = scaled.gather(1, _column(rows.top_k - 1))
    last = scaled[:, -1:]
    overflowing = ((last >= kth) & (last > -torch.inf)).squeeze(1)
    ids, order = ids.sort(dim=1)
    chosen = _choose(scaled.gather(1, order), kth, rows)
    return ids.gather(1, _column(chosen)).squeeze(1).numpy(), overflowing.numpy()


def _choose_wide(logits: Tensor, rows: _Rows) -> Ints:
    """Tokens of rows of any top_k, over the whole vocabulary."""
    scaled = logits / _column(rows.temperature)
    kth = None
    limited = np.flatnonzero(rows.top_k)
    if limited.size:
        kth = torch.full((len(scaled), 1), -torch.inf)
        best = torch.topk(scaled[limited], int(rows.top_k.max())).values
        kth[limited] = best.gather(1, _column(rows.top_k[limited] - 1))
    if scaled.shape[1] % _BLOCK:
        padding = (0, -scaled.shape[1] % _BLOCK)
        scaled = torch.nn.functional.pad(scaled, padding, value=-torch.inf)
    return _choose(scaled, kth, rows)


def _choose(scaled: Tensor, kth: Tensor | None, rows: _Rows) -> Ints:
    """A column of `scaled` `[n, columns]`, logits over temperature by ascending id, for each row.

    `kth` `[n, 1]`: the least logit that top-k keeps.
    """
    weights, totals = _weights(scaled, kth, rows.min_p)
    chosen = _pick(weights, uniform(rows.seeds, rows.positions))
    pending = np.flatnonzero(rows.top_p < 1)
    if 0 < pending.size < len(chosen):
        scaled, weights = scaled[pending], weights[pending]
    draw = 0
    while pending.size:
        outside, weights = _outside_nucleus(
            scaled, weights, chosen[pending], rows.top_p[pending], totals[pending]
        )
        pending, scaled = pending[outside], scaled[outside]
        draw += 1
        chosen[pending] = _pick(weights, uniform(rows.seeds[pending], rows.positions[pending], draw))
    return chosen


def _weights(scaled: Tensor, kth: Tensor | None, min_p: Floats) -> tuple[Tensor, Floats]:
    """What top-k and min-p keep of the probabilities, and the mass that top-p is a part of.

    Top-p stands between them, but min-p only ever removes what ranks lowest: taking it first
    changes no kept set, as long as the mass is that from before.
    """
    weights = torch.softmax(scaled, dim=-1)
    if kth is not None:
        weights.mul_(_at_least(scaled, kth))
    totals = _cumulative(weights)[:, -1]
    if min_p.any():
        floor = weights.amax(dim=1, keepdim=True) * _column(min_p.astype(np.float32))
        weights.mul_(_at_least(weights, floor))
    return weights, totals


def _outside_nucleus(
    scaled: Tensor, weights: Tensor, chosen: Ints, top_p: Floats, totals: Floats
) -> tuple[Ints, Tensor]:
    """Which rows chose a token beyond their nucleus; for those, the weights that rank above it."""
    columns = _column(chosen)
    own = scaled.gather(1, columns)
    above = _at_least(scaled, own).mul_(weights)
    # First as if all that tie with the token ranked above it: seldom does it matter.
    mass = _cumulative(above)[:, -1] - weights.gather(1, columns).squeeze(1).numpy()
    outside = np.flatnonzero(_beyond(mass, totals, top_p))
    if not outside.size:
        return outside, above[:0]
    above = above[outside]
    level = scaled[outside] == own[outside]
    above.masked_fill_(level & (torch.arange(scaled.shape[1]) <= columns[outside]), 0.0)
    mass = _cumulative(above)[:, -1]
    still = np.flatnonzero((mass > 0) & _beyond(mass, totals[outside], top_p[outside]))
    return outside[still], above[still]


def _beyond(mass_above: Floats, totals: Floats, top_p: Floats) -> npt.NDArray[np.bool_]:
    """Whether what ranks above a token reaches p already: compared from below, as transformers."""
    below = (1 - mass_above / totals).astype(np.float32)
    return below <= (1 - top_p).astype(np.float32)


def _pick(weights: Tensor, fractions: Floats) -> Ints:
    """The column at which the cumulative weight of each row passes its fraction of the sum."""
    cumulative = _cumulative(weights)
    chosen, fractions = _invert(cumulative, fractions)
    if cumulative.shape[1] == weights.shape[1]:
        return chosen
    blocks = weights.unflatten(1, (-1, _BLOCK))[np.arange(len(chosen)), chosen]
    inner, _ = _invert(np.cumsum(blocks.numpy(), axis=1, dtype=np.float64), fractions)
    return chosen * _BLOCK + inner


def _invert(cumulative: Floats, fractions: Floats) -> tuple[Ints, Floats]:
    """Where each row passes its fraction, and what fraction of that entry lies before the spot.

    An entry of no weight is never returned.
    """
    totals = cumulative[:, -1]
    spots = np.minimum(fractions * totals, np.nextafter(totals, 0))
    chosen = (cumulative <= spots[:, None]).sum(axis=1)
    index = np.arange(len(chosen))
    ends = cumulative[index, chosen]
    starts = np.where(chosen > 0, cumulative[index, chosen - 1], 0.0)
    return chosen, (spots - starts) / (ends - starts)


def _cumulative(weights: Tensor) -> Floats:
    """Cumulative sums of each row: of single columns, or of whole blocks where there are many."""
    if weights.shape[1] > _MAX_NARROW:
        weights = weights.unflatten(1, (-1, _BLOCK)).sum(dim=-1)
    return np.cumsum(weights.numpy(), axis=1, dtype=np.float64)


def _at_least(values: Tensor, floor: Tensor) -> Tensor:
    """1.0 where `values` reach `floor`, else 0.0: much faster than masks of bools."""
    return torch.ge(values, floor, out=torch.empty_like(values))


def _column(values: npt.NDArray[Any]) -> Tensor:
    return torch.from_numpy(values).unsqueeze(1)
