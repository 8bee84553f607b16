"""One token from each row of logits, by the rules of `gptmanager.decoding.sampling.sampling`.

That reads the same records, PARAMS.
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
    """Return a kernel's instantiations: any type of logits, a vocabulary of whole vectors or not.

    As many logits are taken at a time whatever the type, so that sums have the same bits.
    """
    return tuple(f"{kernel}<{name}, {width}>" for name in NAMES.values() for width in (8, 1))


def instantiation(kernel: str, dtype: torch.dtype, vocab_size: int) -> str:
    """The one for such logits."""
    return f"{kernel}<{NAMES[dtype]}, {1 if vocab_size % 8 else 8}>"


def logits_dtype(logits: Tensor) -> torch.dtype:
    """Their own, if there are kernels for it, else one that they are expected to have."""
    return logits.dtype if logits.dtype in NAMES else torch.float32


_MOST_PARTS = 8  # blocks that share a row
_PIECES_BYTES = 256 * (8 + 8 + 4)  # `Pieces` of logits_row.cuh
_PIECE = 512  # logits that a warp takes at a time, at least
PROGRAM = Program("sampling/sampling.cu", instantiations("sample"), dependent=True)


def pack(params: SamplingParams, vocab_size: int) -> tuple[object, ...]:
    """A value of dtype PARAMS."""
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
    """Memory in which blocks that share a row exchange results; one per stream is enough.

    `pieces` uint8, `own_bests` float32, `arrived` int32, zero between launches.
    """

    pieces: Tensor
    own_bests: Tensor
    arrived: Tensor

    @classmethod
    def of(cls, launcher: Launcher, device: torch.device) -> Workspace:
        """For any number of rows: where there are many, blocks do not share them."""
        most = launcher.num_multiprocessors  # blocks that share rows, at least two each
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
    """Write to `tokens` `[S]` int32 the token chosen for each row of `logits` `[S, V]`, bfloat16,
    float16 or float32, and to `inputs` `[S]` int32 the same, 0 where there is none. With `cells`
    int64 `[S]` a row's input is that element of `inputs` `[n]`.

    `params` `[slots, PARAMS.itemsize]` uint8: an array of PARAMS, as bytes; `slots` `[S]` int32,
    -1: nothing is chosen or written; `positions` `[S]` int64: of the tokens to be chosen. A row's
    token depends on nothing of the others. The logits are left as they are. ValueError for other
    tensors. With a `workspace`, where there are few rows several blocks share each; the bits are
    the same.

    top_k keeps all that tie with the k-th best; top_p the shortest ranking with a mass of at least
    p in single precision; min_p is a share of the best token's probability; equal logits rank by
    ascending id. NOT_FINITE stands for the token of a row that holds NaN or +inf, NO_TOKEN for that
    of one of nothing but -inf.
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
    """How many blocks share a row: as many as run at once, and each has work for all its warps."""
    # Each has a multiprocessor for itself: one that waited for a place would end its row no sooner.
    resident = launcher.num_multiprocessors // num_rows
    return max(1, min(_MOST_PARTS, resident, -(-vocab_size // (_PIECE * _THREADS // 32))))
