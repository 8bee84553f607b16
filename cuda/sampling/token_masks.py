"""Apply masks of allowed tokens to logits, as `gptmanager.kernels.token_masks` does."""

from __future__ import annotations

import torch
from torch import Tensor

from gptmanager.cuda.device.launch import Argument, Launcher, Program, check_tensors, ints

_THREADS = 256
_BLOCK_TOKENS = 1024 * _THREADS // 32  # tokens per block
PROGRAM = Program("sampling/token_masks.cu", ("mask_logits",), dependent=True)


def mask_logits(launcher: Launcher, logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Set to -inf the logits of all tokens for which the mask has a 0; other logits stay.

    `logits` `[S, vocab]` float32 are changed in place. `rows` `[n]` int32 has the row of `logits`
    for each mask, or -1 for a mask that is not used; two masks must not have the same row. In
    `masks` `[n, words]` int32, the lowest bit of word 0 is for token 0. Logits of tokens after the
    last word are set to -inf, too. No logit is read. Raises ValueError if a tensor has a wrong
    shape or dtype.
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
    grid = num_masks, -(-vocab_size // _BLOCK_TOKENS)
    arguments: tuple[Argument, ...] = (logits, rows, masks, *ints(vocab_size, num_words))
    launcher.kernel(PROGRAM, "mask_logits")(grid, (_THREADS,), arguments)
