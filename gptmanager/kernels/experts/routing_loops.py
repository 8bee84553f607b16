"""Compiled routing: chooses each token's experts, gathers the inputs of each expert, and adds up
the outputs.

A choice is one of the `per_token` experts of a token. Choices are numbered token by token. The row
of a choice is the index, in `rows`, of the input that the choice's expert reads. Rows are sorted by
expert.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, get_args

import numpy as np

from gptmanager.kernels.activations.activation_loops import logistic
from gptmanager.kernels.experts.routing import Score
from gptmanager.kernels.simd.dtypes import FLOAT32, LOG2_E, ONE, ZERO, load_as, store_as
from gptmanager.kernels.simd.lanes import (
    LANES,
    claim,
    exp2,
    get,
    get_long,
    keep_lanes,
    larger,
    load_part,
    loop,
    max_lanes,
    put,
    put_long,
    splat,
    store_part,
    sum_lanes,
    task_at,
)
from gptmanager.kernels.simd.threads import NEXT_PART, NEXT_THREAD, share_of, task_fields

SCORES: Mapping[Score, int] = {
    name: kind for kind, name in enumerate(get_args(Score)) if name != "sparse_mixer"
}
_SOFTMAX, _SIGMOID, _SOFTMAX_OF_BEST, _SIGMOID_OF_BEST = range(4)  # in the order of `Score`
_INFINITY = np.float32(np.inf)
SCRATCH_ROWS = 3  # per thread: scores, scores for ranking, and qualities of groups


class RoutingTask(ctypes.Structure):
    """Addresses (0: none), sizes, and the fields of `Routing`.

    The fields up to `scratch` depend on the call. Inputs are `logits` `[num_tokens, num_experts]`,
    `x` `[num_tokens, width]`, and `correction` and `factors`, float32 `[num_experts]`. This rank
    has `count` experts, from number `first` on.

    Results are `weights` float32 and `choices` int64, both `[num_tokens, per_token]`; `places`
    int64 of the same shape, the row of each choice, or -1 for experts of other ranks; and `rows`
    `[num_tokens * per_token, width]`, the inputs of experts. `starts` is int64 scratch
    `[count + 1]`, and `scratch` float32 `[threads, SCRATCH_ROWS, num_experts]`. `zeros` is int64
    memory `[num_zeros]` that is set to 0.

    `bounds` has `num_lists` pairs (low, high) of int64. `lists` int64 `[num_lists, 1 + 3 * count]`
    has a list for each pair: the experts with more than `low` and at most `high` rows. A list
    begins with its number of experts. Then the list has, for each of its experts, the expert's
    number minus `first`, number of rows, and first row.
    """

    _fields_ = task_fields(
        "num_tokens logits x rows choices places weights starts lists zeros scratch"
        " correction factors bounds num_experts count first per_token width num_lists num_zeros"
        " score groups top_groups two_best renormalize scales_inputs logits_dtype dtype",
        "factor sum_eps",
    )


class MixingTask(ctypes.Structure):
    """Addresses of the experts' `outputs` by row, and of the `places` and `weights` of choices.

    `weights` is 0 if the inputs of the experts were already multiplied by the weights.
    """

    _fields_ = task_fields("num_tokens outputs result places weights per_token width dtype")


ROUTING_TASK, MIXING_TASK = np.dtype(RoutingTask), np.dtype(MixingTask)


@loop
def _softmax(dtype: int, source: int, start: int, count: int, to: int) -> None:
    """Write the softmax of `count` numbers to `to`, as float32."""
    most, total = splat(-_INFINITY), splat(ZERO)
    for e in range(0, count, LANES):
        value = load_as(dtype, source, start + e, count - e)
        most = larger(most, keep_lanes(value, 0, count - e, -_INFINITY))
    highest = splat(max_lanes(most))
    for e in range(0, count, LANES):
        value = load_as(dtype, source, start + e, count - e) - highest
        value = keep_lanes(exp2(value * splat(LOG2_E)), 0, count - e, ZERO)
        store_part(to, e, value, count - e)
        total = total + value
    by = splat(ONE / sum_lanes(total))
    for e in range(0, count, LANES):
        store_part(to, e, load_part(to, e, count - e) * by, count - e)


@loop
def _ranking(score: Any) -> Any:
    """Return the score, but inf for NaN: such an expert is chosen, as in torch."""
    zero = splat(ZERO)
    return zero - larger(splat(-_INFINITY), zero - score)


@loop
def _score(t: Any, token: int, scores: int) -> None:
    start, count = token * t.num_experts, t.num_experts
    if t.score == _SOFTMAX:
        _softmax(t.logits_dtype, t.logits, start, count, scores)
        return
    for e in range(0, count, LANES):
        value = load_as(t.logits_dtype, t.logits, start + e, count - e)
        store_part(scores, e, logistic(value) if t.score == _SIGMOID else value, count - e)


@loop
def _quality(t: Any, scores: int, group: int) -> Any:
    """Return the best score of a group or, with `two_best`, the sum of its two best scores."""
    size = t.num_experts // t.groups
    best, second = -_INFINITY, -_INFINITY
    for e in range(group * size, (group + 1) * size):
        value = get(scores, e)
        if value > best:
            best, second = value, best
        elif value > second:
            second = value
    return best + second if t.two_best and size > 1 else best


@loop
def _keep_best_groups(t: Any, scores: int, qualities: int) -> None:
    """Set the scores to -inf in all but the best groups; of equal groups, the earlier is better."""
    size = t.num_experts // t.groups
    for group in range(t.groups):
        put(qualities, group, _quality(t, scores, group))
    for group in range(t.groups):
        own, better = get(qualities, group), 0
        for other in range(t.groups):
            value = get(qualities, other)
            better += value > own or (value == own and other < group)
        if better >= t.top_groups:
            for e in range(group * size, (group + 1) * size):
                put(scores, e, -_INFINITY)


@loop
def _choose_best(t: Any, scores: int, choices: int) -> None:
    """Write the best experts to `choices`, by descending score; equal ones by ascending number.

    No score is NaN.
    """
    last, last_expert = _INFINITY, -1
    for number in range(t.per_token):
        best, found = -_INFINITY, -1
        for e in range(t.num_experts):
            value = get(scores, e)
            follows = value < last or (value == last and e > last_expert)
            if follows and (found < 0 or value > best):
                best, found = value, e
        last, last_expert = best, found
        put_long(choices, number, found)


@loop
def _weigh(t: Any, scores: int, choices: int, weights: int) -> None:
    count = t.per_token
    for number in range(count):
        put(weights, number, get(scores, get_long(choices, number)))
    if t.score == _SOFTMAX_OF_BEST:
        _softmax(FLOAT32, weights, 0, count, weights)
    elif t.score == _SIGMOID_OF_BEST:
        for e in range(0, count, LANES):
            store_part(weights, e, logistic(load_part(weights, e, count - e)), count - e)
    by = ONE
    if t.renormalize:
        total = ZERO
        for number in range(count):
            total += get(weights, number)
        by = ONE / (total + np.float32(t.sum_eps))
    for number in range(count):
        value = get(weights, number) * by * np.float32(t.factor)
        if t.factors:
            value *= get(t.factors, get_long(choices, number))
        put(weights, number, value)


@loop
def _choose(t: Any, token: int, scores: int) -> None:
    """Choose and weigh the experts of a token."""
    row_bytes = 4 * t.num_experts
    ranked, first = scores + row_bytes, token * t.per_token
    choices, weights = t.choices + 8 * first, t.weights + 4 * first
    _score(t, token, scores)
    for e in range(0, t.num_experts, LANES):
        count = t.num_experts - e
        value = load_part(scores, e, count)
        if t.correction:
            value = value + load_part(t.correction, e, count)
        store_part(ranked, e, _ranking(value), count)
    if t.groups > 1:
        _keep_best_groups(t, ranked, ranked + row_bytes)
    _choose_best(t, ranked, choices)
    _weigh(t, scores, choices, weights)


@loop
def _own(t: Any, choice: int) -> int:
    """Return the number of a choice's expert minus `first`, or `count` if another rank has it."""
    number: int = get_long(t.choices, choice) - t.first
    return number if 0 <= number < t.count else t.count


@loop
def _list(t: Any, expert: int, rows: int, first: int) -> None:
    """Add an expert to each list with bounds that include the expert's number of rows."""
    size = 1 + 3 * t.count
    for number in range(t.num_lists):
        if get_long(t.bounds, 2 * number) < rows <= get_long(t.bounds, 2 * number + 1):
            to = t.lists + 8 * size * number
            count = get_long(to, 0)
            put_long(to, 0, count + 1)
            put_long(to, 1 + 3 * count, expert)
            put_long(to, 2 + 3 * count, rows)
            put_long(to, 3 + 3 * count, first)


@loop
def _sort(t: Any) -> None:
    """Assign rows to choices, sorted by expert, and write the lists of experts that have rows."""
    num_choices, row = t.num_tokens * t.per_token, 0
    for number in range(t.num_zeros):
        put_long(t.zeros, number, 0)
    for number in range(t.num_lists):
        put_long(t.lists, (1 + 3 * t.count) * number, 0)
    for expert in range(t.count + 1):
        put_long(t.starts, expert, 0)
    for choice in range(num_choices):
        expert = _own(t, choice)
        put_long(t.starts, expert, get_long(t.starts, expert) + 1)
    for expert in range(t.count):
        rows = get_long(t.starts, expert)
        put_long(t.starts, expert, row)
        if rows:
            _list(t, expert, rows, row)
        row += rows
    for choice in range(num_choices):
        expert = _own(t, choice)
        place = -1
        if expert < t.count:
            place = get_long(t.starts, expert)
            put_long(t.starts, expert, place + 1)
        put_long(t.places, choice, place)


@loop
def _gather(t: Any, token: int) -> None:
    """Copy a token's input to the rows of its choices, times their weights if `scales_inputs`."""
    for choice in range(token * t.per_token, (token + 1) * t.per_token):
        place = get_long(t.places, choice)
        if place < 0:
            continue
        by = splat(get(t.weights, choice) if t.scales_inputs else ONE)
        for d in range(0, t.width, LANES):
            value = load_as(t.dtype, t.x, token * t.width + d, t.width - d)
            value = value * by if t.scales_inputs else value
            store_as(t.dtype, t.rows, place * t.width + d, value, t.width - d)


def choose_and_gather(address: int) -> None:
    """Choose the experts of all tokens, sort and gather their inputs, in one thread."""
    t = task_at(address, ROUTING_TASK)
    for token in range(t.num_tokens):
        _choose(t, token, t.scratch)
    _sort(t)
    for token in range(t.num_tokens):
        _gather(t, token)


def choose(address: int) -> None:
    """Choose the experts of the tokens in the parts that this thread claims."""
    t = task_at(address, ROUTING_TASK)
    own = t.scratch + claim(address, NEXT_THREAD) * 4 * SCRATCH_ROWS * t.num_experts
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for token in share_of(t, part, t.num_tokens):
            _choose(t, token, own)
        part = claim(address, NEXT_PART)


def sort(address: int) -> None:
    """Sort the choices of all tokens, in one thread."""
    _sort(task_at(address, ROUTING_TASK))


def gather(address: int) -> None:
    """Gather the experts' inputs for the tokens in the parts that this thread claims."""
    t = task_at(address, ROUTING_TASK)
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for token in share_of(t, part, t.num_tokens):
            _gather(t, token)
        part = claim(address, NEXT_PART)


def mix(address: int) -> None:
    """Add up, in float32, the weighted outputs of each token's experts, for the claimed tokens."""
    t = task_at(address, MIXING_TASK)
    part = claim(address, NEXT_PART)
    while part < t.num_parts:
        for token in share_of(t, part, t.num_tokens):
            first = token * t.per_token
            for d in range(0, t.width, LANES):
                total = splat(ZERO)
                for choice in range(first, first + t.per_token):
                    place = get_long(t.places, choice)
                    if place >= 0:
                        value = load_as(t.dtype, t.outputs, place * t.width + d, t.width - d)
                        by = get(t.weights, choice) if t.weights else ONE
                        total = total + value * splat(by)
                store_as(t.dtype, t.result, token * t.width + d, total, t.width - d)
        part = claim(address, NEXT_PART)


BODIES = (choose_and_gather, mix, choose, sort, gather)
