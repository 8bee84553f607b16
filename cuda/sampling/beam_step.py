"""The best continuations of beams: what `BeamCandidates` holds, each beam by itself.

Two passes over a row, and 32 more where it wants more than a block has threads. What all beams of a
request make of them is for a host to rank: it alone knows their sums. Requests of any widths share
a launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gptmanager.cuda.device.launch import Argument, Launcher, Program, check_tensors, ints
from gptmanager.cuda.sampling import sampling

_THREADS = 512
MAX_COUNT = 4 * _THREADS  # continuations of one row: CANDIDATES of beam_step.cu
PROGRAM = Program("sampling/beam_step.cu", sampling.instantiations("best_of_rows"), dependent=True)


def best_of_rows(
    launcher: Launcher,
    tokens: Tensor,
    log_probs: Tensor,
    logits: Tensor,
    params: Tensor,
    slots: Tensor,
    counts: Tensor,
) -> None:
    """Write to `tokens` int32 and `log_probs` float32, both `[S, most]`, the best of each row.

    `counts` `[S]` int32: how many a row wants; 0: the row is passed over, and nothing written.
    Behind those, and behind a vocabulary of fewer, are -1 and -inf.
    `logits` `[S, V]`, bfloat16, float16 or float32, adjusted;
    `params` `[slots, sampling.PARAMS.itemsize]` uint8: an array of those, as bytes;
    `slots` `[S]` int32.

    Log probabilities are those of the logits divided by the temperature (0 counts as 1), in single
    precision; equal ones rank by ascending id. NaN counts as -inf, +inf as the highest finite
    number; a row of nothing but -inf has no other log probability. ValueError for other tensors,
    and for more than MAX_COUNT a row.
    """
    num_rows, vocab_size = logits.shape
    most = tokens.shape[-1]
    check_tensors(
        tokens=(tokens, (num_rows, None), torch.int32),
        log_probs=(log_probs, (num_rows, most), torch.float32),
        logits=(logits, (num_rows, vocab_size), sampling.logits_dtype(logits)),
        params=(params, (None, sampling.PARAMS.itemsize), torch.uint8),
        slots=(slots, (num_rows,), torch.int32),
        counts=(counts, (num_rows,), torch.int32),
    )
    if most > MAX_COUNT:
        raise ValueError(f"tokens has room for {most} a row, the limit is {MAX_COUNT}")
    if num_rows == 0:
        return
    name = sampling.instantiation("best_of_rows", logits.dtype, vocab_size)
    arguments: tuple[Argument, ...] = (
        tokens,
        log_probs,
        logits,
        params,
        slots,
        counts,
        *ints(vocab_size, most),
    )
    launcher.kernel(PROGRAM, name)((num_rows,), (_THREADS,), arguments)
