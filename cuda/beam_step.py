"""The best continuations of beams: what `BeamCandidates` holds, and how `BeamSearch` ranks it.

Two stages, each deterministic: `best_of_rows` for each beam by itself, in two passes over its
logits, and `merge_beams` for all beams of each request. Requests of any widths share a launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gptmanager.cuda import sampling
from gptmanager.cuda.launch import Argument, Launcher, Program, check_tensors, ints

_THREADS, _MERGE_THREADS = 512, 128
MAX_COUNT = _THREADS  # continuations of one row
PROGRAM = Program("beam_step.cu", ("best_of_rows<4>", "best_of_rows<1>", "merge_beams"))


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

    `counts` `[S]` int32: how many a row wants, twice its request's beams; 0: the row is passed
    over, and nothing written. Behind those, and behind a vocabulary of fewer, are -1 and -inf.
    `logits` `[S, V]` float32, adjusted; `params` `[slots, sampling.PARAMS.itemsize]` uint8: an
    array of those, as bytes; `slots` `[S]` int32.

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
        logits=(logits, (num_rows, vocab_size), torch.float32),
        params=(params, (None, sampling.PARAMS.itemsize), torch.uint8),
        slots=(slots, (num_rows,), torch.int32),
        counts=(counts, (num_rows,), torch.int32),
    )
    if most > MAX_COUNT:
        raise ValueError(f"tokens has room for {most} a row, the limit is {MAX_COUNT}")
    if num_rows == 0:
        return
    name = "best_of_rows<4>" if vocab_size % 4 == 0 else "best_of_rows<1>"
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


def merge_beams(
    launcher: Launcher,
    tokens: Tensor,
    beams: Tensor,
    sums: Tensor,
    log_probs: Tensor,
    row_tokens: Tensor,
    row_log_probs: Tensor,
    counts: Tensor,
    totals: Tensor,
    firsts: Tensor,
    vocab_size: int,
) -> None:
    """Rank the continuations of all beams of each of R requests, as `BeamSearch` does.

    Written, `[R, kept]`: `tokens` and `beams` int32, `sums` (the beam's total + log probability)
    and `log_probs` float32, best first; equal sums rank by ascending beam, then id. A request has
    count + min(count, V) at most (a stop word of more than one beam may need them); behind its own
    are -1 and -inf. `row_tokens`, `row_log_probs` `[S, most]` and `counts` `[S]`: those of
    `best_of_rows`; `totals` `[S]` float32: the beams' cumulative log probabilities; `firsts`
    `[R + 1]` int32: where the beams of each request begin among the S. ValueError for others.
    """
    num_rows, most = row_tokens.shape
    num_requests, kept = tokens.shape
    check_tensors(
        tokens=(tokens, (num_requests, kept), torch.int32),
        beams=(beams, (num_requests, kept), torch.int32),
        sums=(sums, (num_requests, kept), torch.float32),
        log_probs=(log_probs, (num_requests, kept), torch.float32),
        row_tokens=(row_tokens, (num_rows, most), torch.int32),
        row_log_probs=(row_log_probs, (num_rows, most), torch.float32),
        counts=(counts, (num_rows,), torch.int32),
        totals=(totals, (num_rows,), torch.float32),
        firsts=(firsts, (num_requests + 1,), torch.int32),
    )
    if num_requests == 0:
        return
    outputs = tokens, beams, sums, log_probs
    inputs = row_tokens, row_log_probs, counts, totals, firsts
    launcher.kernel(PROGRAM, "merge_beams")(
        (num_requests,), (_MERGE_THREADS,), (*outputs, *inputs, *ints(vocab_size, most, kept))
    )
