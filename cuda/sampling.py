"""One token from each row of logits, by the rules of `gptmanager.decoding.sampling`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gptmanager.cuda.launch import Argument, Launcher, Program, check_tensors, ints

_THREADS = 512
# a slot's parameters as the kernel's struct has them: of `gptmanager.decoding.sampling.SLOT` what
# chooses a token; what adjusts logits has run before
PARAMS = np.dtype(
    [
        ("seed", np.uint64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("end_id", np.int64),
        ("first_end", np.int64),
        ("temperature", np.float32),
        ("greedy", np.bool_),
    ],
    align=True,
)
PARAMS_BYTES = PARAMS.itemsize
PROGRAM = Program("sampling.cu", ("sample<4>", "sample<1>"))


def packed(slots: npt.NDArray[np.void]) -> Tensor:
    """The parameters uint8 `[slots, PARAMS_BYTES]` of records that have the fields of PARAMS."""
    records = np.zeros(len(slots), dtype=PARAMS)
    for name in PARAMS.names or ():
        records[name] = slots[name]
    return torch.from_numpy(records.view(np.uint8).reshape(len(slots), PARAMS_BYTES))


def sample(
    launcher: Launcher,
    tokens: Tensor,
    logits: Tensor,
    params: Tensor,
    slots: Tensor,
    positions: Tensor,
) -> None:
    """Write to `tokens` `[S]` int32 the token chosen for each row of `logits` `[S, V]` float32.

    `params` `[slots, PARAMS_BYTES]` uint8: as `packed` gives them; `slots` `[S]`
    int32; `positions` `[S]` int64: of the tokens to be chosen. A row's token depends on nothing of
    the others. The logits are left as they are. ValueError for other tensors.
    """
    num_rows, vocab_size = logits.shape
    check_tensors(
        tokens=(tokens, (num_rows,), torch.int32),
        logits=(logits, (num_rows, vocab_size), torch.float32),
        params=(params, (None, PARAMS_BYTES), torch.uint8),
        slots=(slots, (num_rows,), torch.int32),
        positions=(positions, (num_rows,), torch.int64),
    )
    if num_rows == 0:
        return
    name = "sample<4>" if vocab_size % 4 == 0 else "sample<1>"
    arguments: tuple[Argument, ...] = (tokens, logits, params, slots, positions, *ints(vocab_size))
    launcher.kernel(PROGRAM, name)((num_rows,), (_THREADS,), arguments)
