"""Which tokens may come, written into logits: as `gptmanager.kernels.token_masks` does."""

from __future__ import annotations

import torch
from torch import Tensor

from gptmanager.cuda.device.launch import Argument, Launcher, Program, check_tensors, ints

_THREADS = 256
_STRETCH = 1024 * _THREADS // 32  # tokens that a block takes
PROGRAM = Program("sampling/token_masks.cu", ("mask_logits",), dependent=True)


def mask_logits(launcher: Launcher, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """-inf for each token that has no bit; nothing else is written, and no logit is read.

    `logits` `[S, vocab]` float32, changed in place in the rows `rows` `[n]` int32 (distinct; -1: a
    mask that is not used); `masks` `[n, words]` int32, the lowest bit of the first word for token
    0. Tokens behind the last word have no bit. ValueError for other tensors.
    """
    num_masks, num_words = masks.shape
    vocab_size = logits.shape[1]
    check_tensors(
        logits=(logits, (None, None), torch.float32),
        rows=(rows, (num_masks,), torch.int32),
        masks=(masks, (num_masks, None), torch.int32),
    )
    if num_masks == 0:
        return
    grid = num_masks, -(-vocab_size // _STRETCH)
    arguments: tuple[Argument, ...] = (logits, rows, masks, *ints(vocab_size, num_words))
    launcher.kernel(PROGRAM, "mask_logits")(grid, (_THREADS,), arguments)
