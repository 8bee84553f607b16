"""Choose a token from each row of logits, by the rules of `gptmanager.decoding.sampling.sampling`.

The CPU's sampler, too, reads parameters as records of dtype PARAMS.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gptmanager.cuda.device.launch import NAMES, Argument, Launcher, Program, check_tensors, ints
from gptmanager.request.sampling_params import SamplingParams

_THREADS = 512
PARAMS = np.dtype(  # `Params` of choice.cuh
    [
        ("seed", np.uint64),
        ("top_k", np.int64),  # 0: unlimited
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("temperature", np.float32),
        ("greedy", np.bool_),
    ],
    align=True,
)


def instantiations(kernel: str) -> tuple[str, ...]:
    """Return the instantiations of a kernel: each dtype, with vectors of 8 logits and of 1.

    The width of vectors does not depend on the dtype, so sums have the same bits for all dtypes.
    """
    return tuple(f"{kernel}<{name}, {width}>" for name in NAMES.values() for width in (8, 1))


def instantiation(kernel: str, dtype: torch.dtype, vocab_size: int) -> str:
    """Return the instantiation for logits of this dtype and vocabulary size."""
    return f"{kernel}<{NAMES[dtype]}, {1 if vocab_size % 8 else 8}>"


def logits_dtype(logits: Tensor) -> torch.dtype:
    """Return the dtype for `check_tensors`: that of `logits` if it is supported, else float32."""
    return logits.dtype if logits.dtype in NAMES else torch.float32


_MOST_PARTS = 8  # blocks that share a row
_PIECES_BYTES = 256 * (8 + 8 + 4)  # `Pieces` of logits_row.cuh
PROGRAM = Program(
    "sampling/sampling.cu",
    instantiations("sample"),
    dependent=True,
    at_once=1,  # each takes long to compile, and a model needs one of them
)


def pack(params: SamplingParams, vocab_size: int) -> tuple[object, ...]:
    """Return a record of dtype PARAMS for one request."""
    only_best = params.temperature <= 0 or params.top_k == 1 or params.top_p <= 0
    return (
        params.seed & (2**64 - 1),
        params.top_k if params.top_k < vocab_size else 0,
        params.top_p,
        params.min_p,
        params.temperature if params.temperature > 0 else 1.0,
        params.greedy or only_best,
    )


class Workspace(NamedTuple):
    """Memory in which blocks that share a row exchange results. One workspace per stream is enough.

    `pieces` is uint8, `own_bests` is float32. `arrived` is int32, and zero between launches.
    """

    pieces: Tensor
    own_bests: Tensor
    arrived: Tensor

    @classmethod
    def of(cls, launcher: Launcher, device: torch.device) -> Workspace:
        """Return a workspace for any number of rows. Blocks share a row only if rows are few."""
        # If blocks share rows, a launch has at most this number of blocks: at least two per row.
        most = launcher.num_multiprocessors
        return cls(
            torch.empty(most // 2 * _PIECES_BYTES, dtype=torch.uint8, device=device),
            torch.empty(most * _THREADS, device=device),
            torch.zeros(most // 2, dtype=torch.int32, device=device),
        )


def sample(
    launcher: Launcher,
    tokens: Tensor,
    inputs: Tensor,
    logits: Tensor,
    params: Tensor,
    slots: Tensor,
    positions: Tensor,
    workspace: Workspace | None = None,
    cells: Tensor | None = None,
) -> None:
    """Choose a token for each row of `logits` `[S, V]`, bfloat16, float16 or float32.

    The tokens are written to `tokens` int32 `[S]`, and to `inputs` int32 `[S]`. If no token can be
    chosen, `inputs` gets 0. With `cells` int64 `[S]`, the token of row i is written to
    `inputs[cells[i]]`, or only to `tokens` if the cell is -1.

    `params` uint8 `[slots, PARAMS.itemsize]` is an array of PARAMS records, as bytes. `slots` int32
    `[S]` has each row's index in that array; for a row with -1 nothing is chosen or written.
    `positions` int64 `[S]` has the positions of the tokens to be chosen. A row's token does not
    depend on other rows. The logits are not changed. With a `workspace`, several blocks share each
    row if there are few rows; the result is the same. Raise ValueError if a tensor has another
    shape or dtype.

    top_k keeps all tokens that tie with the k-th best. top_p keeps the fewest best tokens that have
    a total probability of at least p, in single precision. min_p is relative to the best token's
    probability. Equal logits rank by ascending id. The token is NOT_FINITE if the row contains NaN
    or +inf, NO_TOKEN if all its logits are -inf.
    """
    num_rows, vocab_size = logits.shape
    check_tensors(
        tokens=(tokens, (num_rows,), torch.int32),
        inputs=(inputs, (num_rows if cells is None else None,), torch.int32),
        logits=(logits, (num_rows, vocab_size), logits_dtype(logits)),
        params=(params, (None, PARAMS.itemsize), torch.uint8),
        slots=(slots, (num_rows,), torch.int32),
        positions=(positions, (num_rows,), torch.int64),
        cells=(cells, (num_rows,), torch.int64),
    )
    if num_rows == 0:
        return
    parts = 1 if workspace is None else num_parts(launcher, num_rows, vocab_size)
    shared = workspace if parts > 1 and workspace is not None else (None, None, None)
    arguments: tuple[Argument, ...] = (
        *(tokens, inputs, logits, params, slots, positions, cells),
        *shared,
        *ints(vocab_size, parts),
    )
    name = instantiation("sample", logits.dtype, vocab_size)
    launcher.kernel(PROGRAM, name)((num_rows * parts,), (_THREADS,), arguments)


def num_parts(launcher: Launcher, num_rows: int, vocab_size: int) -> int:
    """Return the number of blocks that share a row: at most one for each 16 pieces of it."""
    # At most one block per multiprocessor: more would wait for the first ones, and save no time.
    resident = launcher.num_multiprocessors // num_rows
    unit = 512 if vocab_size % 8 else 1024  # UNIT of logits_row.cuh: the fewest logits of a piece
    return max(1, min(_MOST_PARTS, resident, -(-vocab_size // (unit * _THREADS // 32))))
