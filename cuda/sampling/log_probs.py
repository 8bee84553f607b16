"""Log probabilities of tokens: the log-softmax after adjustments and temperature."""

from __future__ import annotations

import torch
from torch import Tensor

from gptmanager.cuda.device.launch import Argument, Launcher, Program, check_tensors, ints
from gptmanager.cuda.sampling import sampling

_THREADS = 512
NOTHING, LOGIT, LOG_PROB = range(3)  # what a slot wants
PROGRAM = Program("sampling/log_probs.cu", sampling.instantiations("log_probs"), dependent=True)


def log_probs(
    launcher: Launcher,
    values: Tensor,
    logits: Tensor,
    tokens: Tensor,
    params: Tensor,
    wanted: Tensor,
    slots: Tensor,
) -> None:
    """Write to `values` `[S]` float32 what the slots of the rows want of `tokens` `[S]` int32.

    Both may be `[S, n]`: of several tokens of each row.

    `logits` `[S, V]`, bfloat16, float16 or float32, adjusted;
    `params` `[slots, sampling.PARAMS.itemsize]` uint8: an array of those, as bytes;
    `wanted` `[slots]` uint8: NOTHING leaves the row's value as it is,
    LOGIT is a token's logit divided by the temperature, LOG_PROB logit - log(sum(exp(logits)))
    of such logits. `slots` `[S]` int32, -1: nothing is wanted. One pass over the row.

    A temperature of 0 counts as 1, NaN as -inf; where a logit is +inf, or all are -inf, the value
    is 0 or -inf; 0 for a finite logit that the temperature makes -inf with all others.
    ValueError for other tensors.
    """
    num_rows, vocab_size = logits.shape
    shape = (num_rows, *tokens.shape[1:2])
    check_tensors(
        values=(values, shape, torch.float32),
        logits=(logits, (num_rows, vocab_size), sampling.logits_dtype(logits)),
        tokens=(tokens, shape, torch.int32),
        params=(params, (None, sampling.PARAMS.itemsize), torch.uint8),
        wanted=(wanted, (len(params),), torch.uint8),
        slots=(slots, (num_rows,), torch.int32),
    )
    count = tokens.shape[1] if tokens.dim() > 1 else 1
    if num_rows == 0 or count == 0:
        return
    name = sampling.instantiation("log_probs", logits.dtype, vocab_size)
    arguments: tuple[Argument, ...] = (
        values,
        logits,
        tokens,
        params,
        wanted,
        slots,
        *ints(vocab_size, count),
    )
    launcher.kernel(PROGRAM, name)((num_rows,), (_THREADS,), arguments)
