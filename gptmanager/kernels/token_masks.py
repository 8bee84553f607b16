"""Which tokens may come, written into logits: one operation over any rows.

A mask holds a bit for each token, the lowest of the first word for token 0, as llguidance makes
it. Decides nothing but how that is done on which device.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.int32]

_NOTHING = np.float32(-np.inf)


def mask_logits(logits: Tensor, rows: Ints, masks: Words) -> int:
    """-inf for each token that has no bit; how many masks have none at all.

    `logits` float32 `[S, vocab]`, changed in the rows `rows` `[n]`; `masks` int32 `[n, words]`.
    Tokens beyond the last word have no bit. On the CPU it is compiled by its first call, or loaded
    from Numba's cache.
    """
    if logits.device.type == "cpu":
        return int(_mask(logits.numpy(), rows, masks))
    return mask_logits_reference(logits, rows, masks)


def mask_logits_reference(logits: Tensor, rows: Ints, masks: Words) -> int:
    """The same in torch, on any device."""
    words = torch.from_numpy(masks).to(logits.device)
    tokens = torch.arange(logits.shape[1], device=logits.device)
    bits = words[:, (tokens // 32).clamp(max=words.shape[1] - 1)] >> (tokens % 32)
    forbidden = (bits & 1 == 0) | (tokens >= 32 * words.shape[1])
    there = torch.from_numpy(rows).to(logits.device)
    logits[there] = logits[there].masked_fill(forbidden, -torch.inf)
    return len(masks) - int(masks.any(axis=1).sum())


@numba.njit(cache=True)
def _mask(logits: Floats, rows: Ints, masks: Words) -> int:
    vocab_size = logits.shape[1]
    whole = min(masks.shape[1], vocab_size // 32)
    num_empty = 0
    for place in range(len(rows)):
        some = np.int32(0)
        for word in range(masks.shape[1]):
            some |= masks[place, word]
        num_empty += some == 0
        row = logits[rows[place]]
        for word in range(whole):
            bits = masks[place, word]
            if bits == 0:
                for bit in range(32):
                    row[word * 32 + bit] = _NOTHING
            elif bits != -1:
                for bit in range(32):  # a choice without a branch, so that it becomes SIMD
                    old = row[word * 32 + bit]
                    row[word * 32 + bit] = old if bits >> np.int32(bit) & np.int32(1) else _NOTHING
        for token in range(whole * 32, vocab_size):
            word = token // 32
            if word >= masks.shape[1] or not masks[place, word] >> (token - word * 32) & 1:
                row[token] = _NOTHING
    return num_empty
