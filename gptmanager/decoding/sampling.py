"""`Sampler`: chooses one token a row from a step's logits, each row by its own parameters.

The order on the logits is fixed: post-processor, embedding bias, penalties, bad words and n-grams
have changed them before they come here; then min_length, temperature, top-k, top-p, min-p. This
module decides what those five keep and which kept token is drawn. It knows nothing of requests,
stop words, or the network.

A row's token depends on its own logits, parameters, seed and position, bit for bit. Hence the only
operations here are elementwise ones and reductions that neither cross nor split a row.

A draw inverts the cumulative distribution over ascending ids. Top-p needs no sort: a token drawn
from what top-k left is accepted if the mass ranked above it is less than p; else the next draw is
from what ranks above it: the nucleus' own distribution, in 1/p draws on average at most.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gptmanager.request import SamplingParams

Ints = npt.NDArray[np.int64]
Singles = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.uint64]
Params = npt.NDArray[np.void]  # of _PARAMS

_PARAMS = np.dtype(
    [
        ("seed", np.uint64),
        ("top_k", np.int64),  # 0: unlimited
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("end_id", np.int64),
        ("first_end", np.int64),  # the position from which on end_id is allowed
        ("temperature", np.float32),
        ("greedy", np.bool_),
    ],
    align=True,
)
_BLOCK = 128  # tokens that one entry of a cumulative sum over the whole vocabulary stands for
_PART = 1 << 21  # logits worked on at a time, so that what is made of them stays in cache
_MIN_GROUPS = 512  # of tokens, whose maxima bound the k-th best logit from below
_LOW_32 = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_PHILOX_FACTORS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_PHILOX_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)


def philox4x32(counter: Words, key: Words) -> Words:
    """Philox4x32-10 of `counter` `[4, n]` under `key` `[2, n]`; 32-bit words in uint64."""
    even, odd = counter[0::2], counter[1::2]
    for _ in range(10):
        product = even * _PHILOX_FACTORS
        even = (product >> _HALF)[::-1] ^ odd ^ key
        odd = (product & _LOW_32)[::-1]
        key = (key + _PHILOX_KEY_STEPS) & _LOW_32
    return np.stack((even[0], odd[0], even[1], odd[1]))


def uniform(seeds: Words, positions: Ints, draw: int = 0) -> Floats:
    """Numbers in [0, 1) of 53 random bits, `[n]`: functions of (seed, position, draw) alone.

    `seeds` uint64 `[n]`; `positions` int64 `[n]`, not negative; `draw` tells apart the numbers
    that one token needs. They are the upper bits of Philox4x32-10's first two words, key = seed,
    counter = (position, draw, 0).
    """
    places = positions.astype(np.uint64)
    counter = np.zeros((4, len(places)), dtype=np.uint64)
    counter[0], counter[1], counter[2] = places & _LOW_32, places >> _HALF, draw
    words = philox4x32(counter, np.stack((seeds & _LOW_32, seeds >> _HALF)))
    return np.asarray(((words[0] << _HALF | words[1]) >> np.uint64(11)) * 2.0**-53)


class Sampler:
    """Sampling parameters by slot, and the choice of tokens for any set of slots.

    As in transformers, top_k keeps all that tie with the k-th best, top_p the shortest ranking
    whose mass reaches p in single precision, min_p is a share of the best token's probability, and
    the best token is always kept. Equal logits rank by ascending id (there, in no defined order).

    Odd logits harm their own row only. NaN counts as -inf. +inf is the token, the lowest id of
    several, for sampling rows too. A row of nothing but -inf yields token 0.

    `device` is where the logits lie; those of another device than the CPU are copied to it.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self._device = torch.device(device)
        self._params: Params = np.zeros(num_slots, dtype=_PARAMS)

    def load(self, slot: int, params: SamplingParams, orig_prompt_len: int) -> None:
        """The sequence in `slot` is sampled by `params`, which are valid, from now on.

        `orig_prompt_len`: tokens that the host sent; min_length counts from there.
        """
        only_best = params.temperature <= 0 or params.top_k == 1 or params.top_p <= 0
        has_end = 0 <= params.end_id < self.vocab_size
        self._params[slot] = (
            params.seed & (2**64 - 1),
            params.top_k if params.top_k < self.vocab_size else 0,
            params.top_p,
            params.min_p,
            params.end_id if has_end else 0,
            orig_prompt_len + params.min_length if has_end else 0,
            params.temperature,
            params.greedy or only_best,
        )

    def sample(self, logits: Tensor, slots: Ints, positions: Ints) -> npt.NDArray[np.int32]:
        """The next token of each of S rows, int32 `[S]`.

        `logits` float32 `[S, vocab_size]`, may be changed; `slots` int64 `[S]`; `positions` int64
        `[S]`: the absolute position of the token to be chosen. ValueError for other logits.
        """
        params = self._prepare(logits, slots, positions)
        values = logits.cpu().numpy()
        tokens, peaks = _best(values)
        if not params["greedy"].all():
            _draw(values, params, positions, peaks, tokens)
        return tokens.astype(np.int32)

    def log_probs(self, logits: Tensor, slots: Ints, positions: Ints) -> Tensor:
        """What beams are searched by, float32 `[S, vocab_size]`; arguments as of `sample`.

        The log-softmax after the temperature.
        """
        params = self._prepare(logits, slots, positions)
        logits /= torch.from_numpy(params["temperature"])[:, None]
        return torch.log_softmax(logits, dim=1)

    def _prepare(self, logits: Tensor, slots: Ints, positions: Ints) -> Params:
        """Make early ends impossible; the parameters of the rows."""
        given = (logits.dtype, tuple(logits.shape), logits.device.type)
        expected = (torch.float32, (len(slots), self.vocab_size), self._device.type)
        if given != expected:
            raise ValueError(f"logits are {given}, expected {expected}")
        params = self._params[slots]
        early = np.flatnonzero(positions < params["first_end"])
        if early.size:
            logits[early, params["end_id"][early]] = -torch.inf
        return params


def _best(values: Singles) -> tuple[Ints, Singles]:
    """The best token of each row, the lowest id on a tie, and its logit; NaN becomes -inf."""
    tokens = values.argmax(axis=1)  # NumPy's is several times faster than torch's
    peaks = values[np.arange(len(values)), tokens]
    broken = np.flatnonzero(np.isnan(peaks))  # a NaN passes for the maximum
    if broken.size:
        values[broken] = np.where(np.isnan(values[broken]), -np.inf, values[broken])
        tokens[broken], peaks[broken] = _best(values[broken])
    return tokens, peaks


def _draw(values: Singles, params: Params, positions: Ints, peaks: Singles, tokens: Ints) -> None:
    """Replace the best tokens of sampling rows by drawn ones; `peaks` are the best logits."""
    step = max(1, _PART // values.shape[1])
    limited = params["top_k"] > 0
    with np.errstate(all="ignore"):  # extreme logits and temperatures overflow, harmlessly
        # An infinite quotient leaves nothing to draw: the best token has all the mass.
        sampling = np.isfinite(peaks / params["temperature"]) & ~params["greedy"]
        for choose, mine in ((_choose_wide, ~limited), (_choose_narrow, limited)):
            rows = np.flatnonzero(sampling & mine)
            for start in range(0, len(rows), step):
                part = rows[start : start + step]
                tokens[part] = choose(_take(values, part), params[part], positions[part])


def _choose_wide(values: Singles, params: Params, positions: Ints) -> Ints:
    """Tokens of rows without top_k: all of the vocabulary, summed in blocks."""
    scaled = torch.from_numpy(values) / torch.from_numpy(params["temperature"])[:, None]
    padding = -scaled.shape[1] % _BLOCK
    if padding:
        scaled = torch.nn.functional.pad(scaled, (0, padding), value=-torch.inf)
    weights = torch.softmax(scaled, dim=1)
    return _choose(weights.view(len(values), -1, _BLOCK), params, positions)


def _choose_narrow(values: Singles, params: Params, positions: Ints) -> Ints:
    """Tokens of rows with top_k: only the candidates, in blocks of one.

    How many columns there are depends on the other rows; as each sum runs over single columns
    one after another, columns of no weight change no bit of it.
    """
    owners, ids = np.divmod(_candidates(values, params["top_k"]), values.shape[1])
    counts = np.bincount(owners, minlength=len(values))
    starts = np.cumsum(counts) - counts
    columns = np.arange(len(owners)) - starts[owners]
    scaled = np.full((len(values), counts.max()), -np.inf)
    scaled[owners, columns] = values[owners, ids] / params["temperature"][owners]
    ascending = np.sort(scaled, axis=1)
    kth = _from_end(ascending, np.minimum(params["top_k"], counts))
    weights = np.where(scaled >= kth, np.exp(scaled - ascending[:, -1:]), 0.0)
    chosen = _choose(torch.from_numpy(weights[:, :, None]), params, positions)
    return np.asarray(ids[starts + chosen])


def _candidates(values: Singles, top_k: Ints) -> Ints:
    """Flat indices, ascending, of few finite logits of each row, its top_k best and ties included.

    The k-th best maximum of disjoint groups of tokens is a lower bound for the k-th best token.
    """
    rows, vocab_size = values.shape
    per_group = max(1, vocab_size // max(_MIN_GROUPS, 2 * int(top_k.max())))
    groups = vocab_size // per_group
    maxima = values[:, : per_group * groups].reshape(rows, per_group, groups).max(axis=1)
    floor = _from_end(np.sort(maxima, axis=1), top_k)
    # Division by the temperature may round a logit up to its neighbor: that one ties as well.
    floor -= np.abs(floor) * np.float32(2.0**-22)
    return np.flatnonzero(values >= np.maximum(floor, np.finfo(np.float32).min))


def _choose(weights: Tensor, params: Params, positions: Ints) -> Ints:
    """The column drawn for each row, counted through its blocks.

    `weights` `[n, blocks, columns]`: what top-k leaves, to any scale, by ascending id; changed.
    """
    cumulative = _cumulative(weights)
    totals = cumulative[:, -1]
    if params["min_p"].any():
        # What min-p removes ranks lowest: before top-p it does the same, given top-p's totals.
        best = weights.amax(dim=(1, 2), keepdim=True)
        floor = best * torch.from_numpy(params["min_p"]).to(weights.dtype)[:, None, None]
        weights.mul_(torch.ge(weights, floor, out=torch.empty_like(weights)))
        cumulative = _cumulative(weights)
    chosen = _pick(weights, cumulative, uniform(params["seed"], positions))
    pending = np.flatnonzero(params["top_p"] < 1)
    if pending.size < len(chosen):
        weights = _rows_of(weights, pending)
    draw = 0
    while pending.size:
        if draw:
            fractions = uniform(params["seed"][pending], positions[pending], draw)
            chosen[pending] = _pick(weights, _cumulative(weights), fractions)
        top_p, total = params["top_p"][pending], totals[pending]
        outside, weights = _outside_nucleus(weights, chosen[pending], top_p, total)
        pending = pending[outside]
        draw += 1
    return chosen


def _outside_nucleus(
    weights: Tensor, chosen: Ints, top_p: Floats, totals: Floats
) -> tuple[Ints, Tensor]:
    """The rows whose choice lies beyond their nucleus, and the weights that rank above it there.

    Masks are floats: with bools these passes take several times as long.
    """
    columns = torch.from_numpy(chosen)[:, None]
    own = weights.flatten(1).gather(1, columns)
    mask = torch.empty_like(weights)
    tied = torch.eq(weights, own[:, :, None], out=mask).sum(dim=(1, 2)).numpy() - 1
    above = torch.gt(weights, own[:, :, None], out=mask).mul_(weights)
    mass = _cumulative(above)[:, -1]
    all_ties = mass + tied * own[:, 0].numpy()
    unclear = np.flatnonzero(_reach(all_ties, totals, top_p) & ~_reach(mass, totals, top_p))
    if unclear.size:
        some = _rows_of(weights, unclear).flatten(1)
        higher = (some == own[unclear]) & (torch.arange(some.shape[1]) < columns[unclear])
        above[unclear] += (some * higher).view_as(above[unclear])
        mass[unclear] = _cumulative(above[unclear])[:, -1]
    outside = np.flatnonzero(_reach(mass, totals, top_p))
    return outside, _rows_of(above, outside)


def _reach(mass: Floats, totals: Floats, top_p: Floats) -> npt.NDArray[np.bool_]:
    """Whether the mass above a choice is p already; compared from below, as in transformers."""
    rest = (1 - mass / totals).astype(np.float32)
    return np.asarray((mass > 0) & (rest <= (1 - top_p).astype(np.float32)))


def _pick(weights: Tensor, cumulative: Floats, fractions: Floats) -> Ints:
    """The column at which the cumulative weight of each row passes its fraction of the sum."""
    blocks, fractions = _invert(cumulative, fractions)
    inside = weights[np.arange(len(blocks)), blocks].numpy().cumsum(axis=1, dtype=np.float64)
    return blocks * weights.shape[2] + _invert(inside, fractions)[0]


def _invert(cumulative: Floats, fractions: Floats) -> tuple[Ints, Floats]:
    """The entry at which each row passes its fraction, never one of no weight; how far into it."""
    totals = cumulative[:, -1]
    spots = np.minimum(fractions * totals, np.nextafter(totals, 0))
    chosen = (cumulative <= spots[:, None]).sum(axis=1)
    rows = np.arange(len(chosen))
    ends, starts = cumulative[rows, chosen], cumulative[rows, chosen - 1] * (chosen > 0)
    return chosen, (spots - starts) / (ends - starts)


def _cumulative(weights: Tensor) -> Floats:
    """Cumulative sums `[n, blocks]` over the blocks of each row."""
    return weights.sum(dim=2).numpy().cumsum(axis=1, dtype=np.float64)


def _from_end(ascending: npt.NDArray[Any], place: Ints) -> npt.NDArray[Any]:
    """The entry of each row that is `place`-th from its end, `[n, 1]`."""
    return np.take_along_axis(ascending, ascending.shape[1] - place[:, None], axis=1)


def _take(values: Singles, rows: Ints) -> Singles:
    """`values[rows]`, without a copy where the rows adjoin."""
    first, last = rows[0], rows[-1]
    return values[first : last + 1] if last - first == len(rows) - 1 else values[rows]


def _rows_of(values: Tensor, rows: Ints) -> Tensor:
    return values.index_select(0, torch.from_numpy(rows))
