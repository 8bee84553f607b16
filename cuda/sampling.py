"""One token from each row of logits, by the rules of `gptmanager.decoding.sampling`.

That reads the same records, PARAMS.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gptmanager.cuda.launch import Argument, Launcher, Program, check_tensors, ints
from gptmanager.request.sampling_params import SamplingParams

_THREADS = 512
PARAMS = np.dtype(  # `Params` of choice.cuh
    [
        ("seed", np.uint64),
        ("top_k", np.int64),  # 0: unlimited
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("end_id", np.int64),
        ("first_end", np.int64),  # the position from which on end_id is allowed
        ("temperature", np.float32),
        ("greedy", np.bool_),
    ],
    align=True,
)
PROGRAM = Program("sampling.cu", ("sample<4>", "sample<1>"))


def pack(params: SamplingParams, orig_prompt_len: int, vocab_size: int) -> tuple[object, ...]:
    """A value of dtype PARAMS, for a sequence whose host sent `orig_prompt_len` tokens."""
    only_best = params.temperature <= 0 or params.top_k == 1 or params.top_p <= 0
    has_end = 0 <= params.end_id < vocab_size
    return (
        params.seed & (2**64 - 1),
        params.top_k if params.top_k < vocab_size else 0,
        params.top_p,
        params.min_p,
        params.end_id if has_end else 0,
        orig_prompt_len + params.min_length if has_end else 0,
        params.temperature if params.temperature > 0 else 1.0,
        params.greedy or only_best,
    )


def sample(
    launcher: Launcher,
    tokens: Tensor,
    inputs: Tensor,
    logits: Tensor,
    params: Tensor,
    slots: Tensor,
    positions: Tensor,
) -> None:
    """Write to `tokens` `[S]` int32 the token chosen for each row of `logits` `[S, V]` float32,
    and to `inputs` `[S]` int32 the same, 0 where there is none.

    `params` `[slots, PARAMS.itemsize]` uint8: an array of PARAMS, as bytes; `slots` `[S]` int32;
    `positions` `[S]` int64: of the tokens to be chosen. A row's token depends on nothing of the
    others. The logits are left as they are. ValueError for other tensors.

    top_k keeps all that tie with the k-th best; top_p the shortest ranking whose mass reaches p in
    single precision; min_p is a share of the best token's probability; equal logits rank by
    ascending id. NOT_FINITE stands for the token of a row that holds NaN or +inf, NO_TOKEN for that
    of one of nothing but -inf.
    """
    num_rows, vocab_size = logits.shape
    check_tensors(
        tokens=(tokens, (num_rows,), torch.int32),
        inputs=(inputs, (num_rows,), torch.int32),
        logits=(logits, (num_rows, vocab_size), torch.float32),
        params=(params, (None, PARAMS.itemsize), torch.uint8),
        slots=(slots, (num_rows,), torch.int32),
        positions=(positions, (num_rows,), torch.int64),
    )
    if num_rows == 0:
        return
    name = "sample<4>" if vocab_size % 4 == 0 else "sample<1>"
    arguments: tuple[Argument, ...] = (
        tokens,
        inputs,
        logits,
        params,
        slots,
        positions,
        *ints(vocab_size),
    )
    launcher.kernel(PROGRAM, name)((num_rows,), (_THREADS,), arguments)
