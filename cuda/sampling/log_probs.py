"""Compute log probabilities of tokens: the log-softmax after adjustments and temperature."""

from __future__ import annotations

import torch
from torch import Tensor

from gptmanager.cuda.device.launch import Argument, Launcher, Program, check_tensors, ints
from gptmanager.cuda.sampling import sampling

_THREADS = 512
NOTHING, LOGIT, LOG_PROB = range(3)  # the values of `wanted`
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
    """Write the logits or log probabilities of `tokens` int32 to `values` float32.

    `tokens` and `values` have the shape `[S]`, or `[S, n]` for `n` tokens per row.

    `logits` `[S, V]`, bfloat16, float16 or float32, are already adjusted. `params`
    `[N, sampling.PARAMS.itemsize]` uint8 has the bytes of one `sampling.PARAMS` record per slot.
    `slots` `[S]` int32 has the slot of each row, an index into `params` and `wanted`. `wanted`
    `[N]` uint8 selects what to write. With LOGIT, it is the token's logit divided by the
    temperature. With LOG_PROB, it is x[token] - log(sum(exp(x))), where x are the row's logits
    divided by the temperature; the whole row is read once. With NOTHING, or the slot -1, the row's
    values are not changed.

    `sampling.pack` stores a temperature of 0 as 1. NaN counts as -inf in the sum. If one x is +inf,
    all log probabilities of the row are 0. If all logits are -inf, so are the log probabilities. If
    every x is -inf although some logits are finite, the log probability of a finite logit is 0.
    Raises ValueError for tensors of other shapes or dtypes.
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
