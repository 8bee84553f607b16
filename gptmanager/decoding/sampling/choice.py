"""Chooses a token by a row of logits: the best, or one sampled after temperature and truncation.

This compiled code decides which tokens top-k, top-p and min-p keep, and which of them is sampled.
The result for a row depends only on its own logits and parameters, because the order of every sum
depends only on the row's length.

No logits are sorted. Top-k finds the k-th best logit by bisection, counting the logits that are at
least a bound. Sampling inverts the cumulative weights in the order of ids. If the probability mass
ranked above a sampled token is less than p, top-p accepts the token. Otherwise top-p samples again,
from the tokens ranked above this token. The accepted tokens have the exact distribution of the
nucleus, after at most 1 + ln(1/p) draws on average.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.extending import register_jitable

from gptmanager.decoding.sampling.random_numbers import uniform
from gptmanager.kernels.simd.lanes import (
    LANES,
    exp2,
    get,
    keep_lanes,
    larger,
    load,
    load_part,
    loop,
    mark_nan,
    max_lanes,
    put,
    splat,
    store,
    sum_lanes,
    where_above,
    where_at_least,
)
from gptmanager.step import NO_TOKEN, NOT_FINITE

Single = Any  # a float32 of compiled code

BLOCK = 8 * LANES  # tokens of a block; a block has one sum of weights
FEW = 16  # bisection stops when at most this number of logits is left to compare one by one
ZERO, ONE, HALF_OF = np.float32(0.0), np.float32(1.0), np.float32(0.5)
NOTHING, LOWEST = np.float32(-np.inf), np.finfo(np.float32).min
LOG2_E = np.float32(1.4426950408889634)
NEGLIGIBLE = np.float32(-87.0)  # a weight of e to this power, or less, is 0


@register_jitable
def padded(size: int) -> int:
    """Return `size` rounded up to whole blocks: the number of weights that are stored for a row."""
    return (size + BLOCK - 1) // BLOCK * BLOCK


@loop
def _load_or_nothing(x: int, i: int, size: int) -> Any:
    """Load LANES logits from index `i` on, with -inf after the end of the row."""
    value = load_part(x, i, size - i)
    if i + LANES > size:
        value = keep_lanes(value, 0, size - i, NOTHING)
    return value


@loop
def find_best(x: int, size: int) -> tuple[int, Single]:
    """Return the best token and its logit. If several tokens are best, take the lowest id.

    Return NOT_FINITE as the token if a logit is NaN or +inf, NO_TOKEN if all are -inf.
    """
    top, start, marks = NOTHING, 0, splat(ZERO)
    for block in range(0, size, BLOCK):
        highest = splat(NOTHING)
        for i in range(block, min(block + BLOCK, size), LANES):
            logits = _load_or_nothing(x, i, size)
            highest, marks = larger(highest, logits), mark_nan(marks, logits)
        value = max_lanes(highest)
        if value > top:
            top, start = value, block
    if top == np.inf or np.isnan(sum_lanes(marks)):
        return NOT_FINITE, top
    if top == NOTHING:
        return NO_TOKEN, top
    token = start
    while get(x, token) != top:
        token += 1
    return token, top


# Top-k ---------------------------------------------------------------------------------------


@loop
def _count_from(x: int, size: int, bound: Single) -> int:
    """Return how many logits are at least `bound`, which is not -inf."""
    one, limit = splat(ONE), splat(bound)
    a, b, c, d = splat(ZERO), splat(ZERO), splat(ZERO), splat(ZERO)
    whole = size // (4 * LANES) * (4 * LANES)
    for i in range(0, whole, 4 * LANES):
        a = a + where_at_least(load(x, i), limit, one)
        b = b + where_at_least(load(x, i + LANES), limit, one)
        c = c + where_at_least(load(x, i + 2 * LANES), limit, one)
        d = d + where_at_least(load(x, i + 3 * LANES), limit, one)
    for i in range(whole, size, LANES):
        a = a + where_at_least(_load_or_nothing(x, i, size), limit, one)
    return int(sum_lanes(a + b + (c + d)))


@loop
def _gather(x: int, size: int, low: Single, high: Single, found: int) -> int:
    """Write the logits with low <= logit < high to address `found`; return their number."""
    one, bottom, limit = splat(ONE), splat(low), splat(high)
    count = 0
    for block in range(0, size, BLOCK):
        end = min(block + BLOCK, size)
        inside = splat(ZERO)
        for i in range(block, end, LANES):
            value = _load_or_nothing(x, i, size)
            inside = inside + where_at_least(value, bottom, one) - where_at_least(value, limit, one)
        if sum_lanes(inside) > ZERO:
            for i in range(block, end):
                if low <= get(x, i) < high:
                    put(found, count, get(x, i))
                    count += 1
    return count


@loop
def _largest(values: int, count: int, rank: int) -> Single:
    """Return the `rank`-th largest of a few values, which are overwritten."""
    best = 0
    for _ in range(rank):
        best = 0
        for i in range(1, count):
            if get(values, i) > get(values, best):
                best = i
        result = get(values, best)
        put(values, best, NOTHING)
    return result


@loop
def find_kth(x: int, size: int, k: int, top: Single, scratch: int) -> Single:
    """Return the k-th best logit, k >= 1; -inf if fewer than k logits are above -inf.

    `top` is the best logit; `scratch` is the address of space for FEW floats.
    """
    low = high = top
    num_low = num_high = _count_from(x, size, top)
    if num_high >= k:
        return top
    step = ONE
    while num_low < k:  # lower `low`, twice as far each time
        if low == LOWEST:
            return NOTHING
        high, num_high = low, num_low
        low = max(top - step, LOWEST)
        step = step + step
        num_low = _count_from(x, size, low)
    # at least k logits are >= `low`, and fewer than k logits are >= `high`
    while num_low - num_high > FEW:
        middle = HALF_OF * low + HALF_OF * high
        if middle <= low or middle >= high:  # adjacent floats: all logits in between are equal
            return low
        count = _count_from(x, size, middle)
        if count >= k:
            low, num_low = middle, count
        else:
            high, num_high = middle, count
    return _largest(scratch, _gather(x, size, low, high, scratch), k - num_high)


# Weights -------------------------------------------------------------------------------------


@loop
def weigh(
    x: int, size: int, temperature: Single, top: Single, kth: Single, weights: int, sums: int
) -> float:
    """Compute the weight e^((l - top) / temperature) of each logit l >= `kth`; return their sum.

    The weights of lower logits are 0. `weights` is the address of `padded(size)` floats. `sums` is
    the address of one float per block, for the sum of the block's weights.
    """
    divisor, scale = splat(temperature), splat(LOG2_E)
    highest, lowest, least = splat(top / temperature), splat(kth / temperature), splat(NEGLIGIBLE)
    total = 0.0
    for block in range(0, size, BLOCK):
        mass = splat(ZERO)
        for i in range(block, block + BLOCK, LANES):
            scaled = _load_or_nothing(x, i, size) / divisor
            below = scaled - highest
            weight = where_above(below, least, exp2(below * scale))
            weight = where_at_least(scaled, lowest, weight)
            store(weights, i, weight)
            mass = mass + weight
        put(sums, block // BLOCK, sum_lanes(mass))
        total += sum_lanes(mass)
    return total


@loop
def _drop_below(weights: int, sums: int, size: int, floor: Single) -> None:
    """Set weights below `floor` to 0, for min-p."""
    limit = splat(floor)
    for block in range(0, size, BLOCK):
        mass = splat(ZERO)
        for i in range(block, block + BLOCK, LANES):
            weight = load(weights, i)
            weight = where_at_least(weight, limit, weight)
            store(weights, i, weight)
            mass = mass + weight
        put(sums, block // BLOCK, sum_lanes(mass))


@loop
def _sum_above(weights: int, sums: int, size: int, token: int) -> float:
    """Return the sum of the weights ranked above `token`; write the sum in each block to `sums`.

    Of equal weights the lower id ranks higher.
    """
    own = splat(get(weights, token))
    total = 0.0
    for block in range(0, size, BLOCK):
        mass = splat(ZERO)
        if block <= token < block + BLOCK:
            for i in range(block, block + BLOCK, LANES):
                weight = load(weights, i)
                before = keep_lanes(where_at_least(weight, own, weight), 0, token - i, ZERO)
                behind = keep_lanes(where_above(weight, own, weight), token - i, LANES, ZERO)
                mass = mass + (before + behind)
        elif block < token:
            for i in range(block, block + BLOCK, LANES):
                mass = mass + where_at_least(load(weights, i), own, load(weights, i))
        else:
            for i in range(block, block + BLOCK, LANES):
                mass = mass + where_above(load(weights, i), own, load(weights, i))
        put(sums, block // BLOCK, sum_lanes(mass))
        total += sum_lanes(mass)
    return total


# The draw ------------------------------------------------------------------------------------


@loop
def _pick(weights: int, sums: int, size: int, own: Single, token: int, fraction: Single) -> int:
    """Return the first token, by id, where the cumulative weight exceeds `fraction` of the sum.

    Only the tokens ranked above `token` count; `own` is the weight of `token`. If `own` and `token`
    are 0, all tokens count. `sums` has, for each block, the sum of the weights that count. A token
    of weight 0 is never returned.
    """
    spot = 0.0
    for block in range(padded(size) // BLOCK):
        spot += get(sums, block)
    spot *= fraction
    passed, start, mass, chosen = 0.0, 0.0, 0.0, 0
    for block in range(padded(size) // BLOCK):
        if get(sums, block) > ZERO:
            chosen, start, mass = block * BLOCK, passed, np.float64(get(sums, block))
            passed += mass
            if passed > spot:
                break
    inside = 0.0
    for i in range(chosen, chosen + BLOCK):
        weight = get(weights, i)
        if weight > own or (weight == own and i < token):
            inside += weight
    spot = (spot - start) / mass * inside
    passed, last = 0.0, chosen
    for i in range(chosen, chosen + BLOCK):
        weight = get(weights, i)
        if weight > ZERO and (weight > own or (weight == own and i < token)):
            last = i
            passed += weight
            if passed > spot:
                break
    return last


@loop
def draw_token(p: Any, position: int, total: float, weights: int, sums: int, size: int) -> int:
    """Sample from weights with the sum `total`; `p` is a record of `cuda.sampling.sampling.PARAMS`.

    Top-p compares the mass above a token with `p.top_p` in single precision, as in transformers.
    """
    # The best weight is 1, so min-p is a bound on weights. Min-p drops only the lowest ranks, and
    # `total` includes the dropped weights: the result is the same as with top-p before min-p.
    if p.min_p > ZERO:
        _drop_below(weights, sums, size, np.float32(p.min_p))
    token, own, draw = 0, ZERO, 0
    while True:
        token = _pick(weights, sums, size, own, token, uniform(p.seed, position, draw))
        if p.top_p >= 1.0:
            return token
        own = get(weights, token)
        above = _sum_above(weights, sums, size, token)
        if above <= 0.0 or np.float32(1.0 - above / total) > np.float32(1.0 - p.top_p):
            return token
        draw += 1
