"""Bias, penalties and bans: compiled code that adjusts a row of logits before sampling.

The order is fixed: embedding bias, repetition, frequency and presence, bad words, n-grams,
min_length. A row's arithmetic depends only on its own logits, parameters and history. A row
without adjustments is not changed. Arrays are passed as addresses, parameters as records.

    repetition  l > 0: l / r, else l * r         for every token of prompt and output
    frequency   l - f * (times it was generated)  for every generated token
    presence    l - p                             for every generated token
    bad words   -inf for the last token of each word, if its other tokens end the history
    n-grams     -inf for each token that would repeat n tokens that the history already contains
    min_length  -inf for each end id before its first permitted position

Counts are computed from the history in each step. A table of counts, `[lines, vocab]`, would be
larger than the histories, and would have to follow pauses, rewinds and beams.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gptmanager.kernels.simd.lanes import get, get_int, loop, put, put_int

ZERO, ONE = np.float32(0.0), np.float32(1.0)
BANNED = np.float32(-np.inf)


@loop
def _penalize(x: int, size: int, p: Any, history: int, length: int, seen: int) -> None:
    """Apply the penalties. `seen` int32 `[size]` is scratch memory, zero before and after.

    In `seen[token]`, bit 0 is set if the history has the token, and the other bits count how often
    the token was generated.
    """
    start = 0 if p.repetition != ONE else min(p.prompt_len, length)
    for i in range(start, length):
        token = get_int(history, i)
        if 0 <= token < size:
            put_int(seen, token, (get_int(seen, token) | 1) + (2 if i >= p.prompt_len else 0))
    for i in range(start, length):
        token = get_int(history, i)
        mark = get_int(seen, token) if 0 <= token < size else 0
        if mark:
            value, times = get(x, token), mark >> 1
            if p.repetition != ONE:
                value = value / p.repetition if value > ZERO else value * p.repetition
            if times:
                value = value - p.frequency * np.float32(times)
                value = value - p.presence
            put(x, token, value)
            put_int(seen, token, 0)


@loop
def _ends_with(history: int, length: int, tokens: int, start: int, count: int) -> bool:
    """Return whether the history ends with the `count` tokens from `tokens[start]` on.

    The comparison starts at the last token, because most mismatches are found there.
    """
    if count > length:
        return False
    for i in range(1, count + 1):
        if get_int(history, length - i) != get_int(tokens, start + count - i):
            return False
    return True


@loop
def _ban_words(x: int, p: Any, history: int, length: int) -> None:
    words, start = p.lists + 8 * p.num_biases, 0
    ends = words + 4 * p.num_word_tokens
    for word in range(p.num_words):
        end = get_int(ends, word)
        if _ends_with(history, length, words, start, end - start - 1):
            put(x, get_int(words, end - 1), BANNED)
        start = end


@loop
def _ban_ngrams(x: int, size: int, n: int, history: int, length: int) -> None:
    for start in range(length - n + 1):
        token = get_int(history, start + n - 1)
        if 0 <= token < size and _ends_with(history, length, history, start, n - 1):
            put(x, token, BANNED)


@loop
def _ban_ends(x: int, size: int, p: Any) -> None:
    ends = p.lists + 8 * p.num_biases + 4 * (p.num_word_tokens + p.num_words)
    for i in range(p.num_ends):
        token = get_int(ends, i)
        if 0 <= token < size:
            put(x, token, BANNED)


@loop
def adjust(x: int, size: int, p: Any, history: int, length: int, position: int, seen: int) -> None:
    """Adjust one row in place, for the token at `position`.

    `x`, `history` and `seen` are addresses of float32 `[size]` logits, int32 `[length]` tokens, and
    int32 `[size]` zeros. `p` is a record of `cuda.sampling.adjustments.PARAMS`; its `lists` is the
    address of the row's biases, bad words and end ids.
    """
    for i in range(p.num_biases):
        token = get_int(p.lists, i)
        put(x, token, get(x, token) + get(p.lists, p.num_biases + i))
    if p.penalizes:
        _penalize(x, size, p, history, length, seen)
    if p.num_words:
        _ban_words(x, p, history, length)
    if p.ngram_size:
        _ban_ngrams(x, size, p.ngram_size, history, length)
    if position < p.first_end:
        _ban_ends(x, size, p)
