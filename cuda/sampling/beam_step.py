"""Find the best next tokens ("continuations") of each beam, for `BeamCandidates`.

The kernel reads each row of logits twice, and 32 more times if the row needs more continuations
than a block has threads. If the kernel finds more than MAX_COUNT tokens that may be among the best,
it reads the row once more for each continuation. The CPU ranks the continuations of all beams of a
request, because only the CPU has the sums of the beams' log probabilities. Requests with different
beam widths share a launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gptmanager.cuda.device.launch import Argument, Launcher, Program, check_tensors, ints
from gptmanager.cuda.sampling import sampling

_THREADS = 512
MAX_COUNT = 4 * _THREADS  # maximum number of continuations of a row; CANDIDATES in beam_step.cu
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
    """Write the best tokens of each row to `tokens` int32 and `log_probs` float32, `[S, most]`.

    `counts` `[S]` int32 has the number of continuations of each row; if the number is 0, nothing is
    written to the row. Otherwise the places after the last continuation are filled with -1 and
    -inf. A row has at most V continuations, even if its count is larger.
    `logits` `[S, V]`, bfloat16, float16 or float32, are already adjusted.
    `params` `[slots, sampling.PARAMS.itemsize]` uint8 is an array of PARAMS, as bytes, and `slots`
    `[S]` int32 has the index of each row in that array.

    Log probabilities are computed in single precision from the logits divided by the temperature
    (`sampling.pack` stores a temperature of 0 as 1). Tokens of equal log probability rank by
    ascending id. NaN counts as -inf, +inf as the largest finite number. If all logits of a row are
    -inf, all its log probabilities are -inf. Raises ValueError for other tensors, and for `most`
    above MAX_COUNT.
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
        raise ValueError(f"`tokens` must have at most {MAX_COUNT} columns, got {most}")
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
