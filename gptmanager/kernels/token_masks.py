"""Applies token masks to any rows of logits in one operation.

A mask has a bit for each token, set if the token is allowed, in words of 32 bits. The lowest bit of
the first word is for token 0, as in llguidance.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from gptmanager.kernels.simd.lanes import pointer_to, task_at
from gptmanager.kernels.simd.machine_code import compiled
from gptmanager.kernels.simd.threads import address_of, run_alone, task_fields

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.int32]

_NOTHING = np.float32(-np.inf)


class MaskTask(ctypes.Structure):
    _fields_ = task_fields("logits rows masks num_masks vocab_size num_rows num_words num_empty")


TASK = np.dtype(MaskTask)


def mask_logits(logits: Tensor, rows: Ints, masks: Words) -> int:
    """Set the logits of masked tokens to -inf; return the number of masks in which no bit is set.

    `logits` is float32 `[S, vocab]`, `rows` int64 `[n]`, and `masks` int32 `[n, words]`: `masks[i]`
    applies to row `rows[i]` of `logits`. Tokens beyond the last word are not allowed. On the CPU,
    the first call compiles the loop or loads it from Numba's cache.
    """
    if logits.device.type != "cpu" or not logits.is_contiguous():
        return mask_logits_reference(logits, rows, masks)
    rows, masks = np.ascontiguousarray(rows, np.int64), np.ascontiguousarray(masks, np.int32)
    task = MaskTask(
        logits=address_of(logits, torch.float32),
        rows=rows.ctypes.data,
        masks=masks.ctypes.data,
        num_masks=len(rows),
        vocab_size=logits.shape[1],
        num_rows=len(logits),
        num_words=masks.shape[1],
    )
    run_alone(compiled(mask_rows), task)
    return int(task.num_empty)


def mask_logits_reference(logits: Tensor, rows: Ints, masks: Words) -> int:
    """Do the same as `mask_logits` in torch, on any device."""
    words = torch.from_numpy(masks).to(logits.device)
    tokens = torch.arange(logits.shape[1], device=logits.device)
    bits = words[:, (tokens // 32).clamp(max=words.shape[1] - 1)] >> (tokens % 32)
    forbidden = (bits & 1 == 0) | (tokens >= 32 * words.shape[1])
    there = torch.from_numpy(rows).to(logits.device)
    logits[there] = logits[there].masked_fill(forbidden, -torch.inf)
    return len(masks) - int(masks.any(axis=1).sum())


def mask_rows(address: int) -> None:
    """Apply mask `i` to the row `rows[i]`; count the masks in which no bit is set."""
    t = task_at(address, TASK)
    vocab_size, num_words = t.vocab_size, t.num_words
    logits = carray(pointer_to(t.logits), (t.num_rows, vocab_size), np.float32)
    rows = carray(pointer_to(t.rows), t.num_masks, np.int64)
    masks = carray(pointer_to(t.masks), (t.num_masks, num_words), np.int32)
    whole = min(num_words, vocab_size // 32)
    num_empty = 0
    for place in range(len(rows)):
        some = np.int32(0)
        for word in range(num_words):
            some |= masks[place, word]
        num_empty += some == 0
        row = logits[rows[place]]
        for word in range(whole):
            bits = masks[place, word]
            if bits == 0:
                for bit in range(32):
                    row[word * 32 + bit] = _NOTHING
            elif bits != -1:
                for bit in range(32):  # without a branch, so that LLVM vectorizes the loop
                    old = row[word * 32 + bit]
                    row[word * 32 + bit] = old if bits >> np.int32(bit) & np.int32(1) else _NOTHING
        for token in range(whole * 32, vocab_size):
            word = token // 32
            if word >= num_words or not masks[place, word] >> (token - word * 32) & 1:
                row[token] = _NOTHING
    t.num_empty = num_empty
