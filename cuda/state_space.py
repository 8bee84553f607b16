"""Launcher of Mamba-2: a layer's convolution, the update of its memories, and the norm."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gptmanager.cuda.device.launch import NAMES, Launcher, Program, check_tensors, ints
from gptmanager.kernels.attention.attention_arguments import RowSpans
from gptmanager.kernels.recurrent.state_space_formulas import (
    StateSpaceShape,
    StateSpaceState,
    StateSpaceTensors,
)

_THREADS = 128  # threads in a block of the convolution
_COLUMNS = 64  # columns of a head's memory that a block of `scan` updates
# the largest `width` of each compiled `convolve`; the largest `state` of each compiled `scan`,
# which has as many threads; the largest group of a norm: 1,024 threads with 16 elements each
_WIDTHS, _STATES, _MAX_NORM = (4, 8), (128, 256), 1024 * 16
PROGRAM = Program(
    "state_space.cu",
    (
        *(f"convolve<{name}, {width}>" for name in NAMES.values() for width in _WIDTHS),
        *(f"scan<{name}, {state}>" for name in NAMES.values() for state in _STATES),
        *(f"norm_gated<{name}>" for name in NAMES.values()),
    ),
    dependent=True,
)


def covers(shape: StateSpaceShape) -> bool:
    """Return whether the kernels compute layers of these sizes."""
    fits = shape.state <= _STATES[-1] and shape.width <= _WIDTHS[-1]
    fits = fits and shape.inner // shape.norm_groups <= _MAX_NORM
    return fits and shape.head_dim % 4 == 0 and shape.state % 4 == 0


def state_space(
    launcher: Launcher,
    out: Tensor,
    projected: Tensor,
    shape: StateSpaceShape,
    tensors: StateSpaceTensors,
    eps: float,
    state: StateSpaceState,
    rows: RowSpans,
) -> None:
    """Compute `RecurrentOps.state_space`: write `out` `[T, H * P]`, and update `state` in place.

    `state.memory`, and the decay, step and skip of `tensors` are float32, `rows` int32. All others
    have the same dtype: float32, float16 or bfloat16. A token's result has the same bits however
    the tokens of its row are divided among calls. Raises ValueError for other tensors.
    """
    _check(out, projected, shape, tensors, state, rows)
    num_tokens, num_rows, dtype = len(out), len(rows.slots), out.dtype
    stride, wide, channels = shape.projected, torch.float32, shape.channels
    if not num_tokens:
        return
    mixed = out.new_empty(num_tokens, channels, dtype=wide)
    read = out.new_empty(num_tokens, shape.inner, dtype=wide)
    name, spans = NAMES[dtype], (rows.row_starts, rows.slots)
    width = next(it for it in _WIDTHS if shape.width <= it)
    launcher.kernel(PROGRAM, f"convolve<{name}, {width}>")(
        (num_rows, -(-channels // _THREADS)),
        (_THREADS,),
        (
            *(mixed, state.inputs, projected, tensors.conv.weight, tensors.conv.bias, *spans),
            *ints(channels, shape.width, stride, shape.inner),
        ),
    )
    rows_of_memory = next(it for it in _STATES if shape.state <= it)
    launcher.kernel(PROGRAM, f"scan<{name}, {rows_of_memory}>")(
        (num_rows, shape.heads, -(-shape.head_dim // _COLUMNS)),
        (rows_of_memory,),
        (
            *(read, state.memory, mixed, projected),
            *(tensors.decay, tensors.step, tensors.skip, *spans),
            *ints(shape.head_dim, shape.state, shape.groups, stride),
        ),
    )
    size = shape.inner // shape.norm_groups
    launcher.kernel(PROGRAM, f"norm_gated<{name}>")(
        (num_tokens, shape.norm_groups),
        (min(1024, -(-size // 32) * 32),),
        (out, read, projected, tensors.norm, *ints(size, stride), np.float32(eps)),
    )


def _check(
    out: Tensor,
    projected: Tensor,
    shape: StateSpaceShape,
    tensors: StateSpaceTensors,
    state: StateSpaceState,
    rows: RowSpans,
) -> None:
    """Raise ValueError for tensors that `state_space` does not take."""
    num_tokens, num_rows, dtype, heads = len(out), len(rows.slots), out.dtype, shape.heads
    wide, channels = torch.float32, shape.channels
    check_tensors(
        out=(out, (num_tokens, shape.inner), dtype),
        projected=(projected, (num_tokens, shape.projected), dtype),
        conv=(tensors.conv.weight, (shape.width, channels), dtype),
        bias=(tensors.conv.bias, (channels,), dtype),
        decay=(tensors.decay, (heads,), wide),
        step=(tensors.step, (heads,), wide),
        skip=(tensors.skip, (heads,), wide),
        norm=(tensors.norm, (shape.inner,), dtype),
        inputs=(state.inputs, (None, shape.width - 1, channels), dtype),
        memory=(state.memory, (None, heads, shape.state, shape.head_dim), wide),
        row_starts=(rows.row_starts, (num_rows + 1,), torch.int32),
        slots=(rows.slots, (num_rows,), torch.int32),
    )
