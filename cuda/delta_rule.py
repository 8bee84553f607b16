"""Launcher of the gated delta rule: a layer's convolution, then the update of its memories."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gptmanager.cuda.device.launch import NAMES, Launcher, Program, check_tensors, ints
from gptmanager.kernels.attention.attention_arguments import RowSpans
from gptmanager.kernels.recurrent.delta_formulas import DeltaShape, DeltaState, DeltaTensors

_THREADS = 128  # threads in a block of the convolution
# the largest `width` of each compiled `convolve`, the largest `key_dim` of each compiled
# `advance`, and the largest `value_dim` of all `advance`
_WIDTHS, _KEYS, _MAX_VALUES = (4, 8), (32, 64, 128), 128
_COLUMNS = 8  # columns of a head's memory that a warp updates
PROGRAM = Program(
    "delta_rule.cu",
    (
        *(f"convolve<{name}, {width}>" for name in NAMES.values() for width in _WIDTHS),
        *(f"advance<{name}, {key}>" for name in NAMES.values() for key in _KEYS),
    ),
    dependent=True,
)


def covers(shape: DeltaShape) -> bool:
    """Return whether the kernels compute layers of these sizes."""
    fits = shape.key_dim <= _KEYS[-1] and shape.value_dim <= _MAX_VALUES
    return fits and shape.width <= _WIDTHS[-1]


def gated_delta(
    launcher: Launcher,
    out: Tensor,
    projected: Tensor,
    gates: Tensor,
    shape: DeltaShape,
    tensors: DeltaTensors,
    eps: float,
    state: DeltaState,
    rows: RowSpans,
) -> None:
    """Compute `RecurrentOps.gated_delta`: write `out` `[T, H * V]`, and update `state` in place.

    `gates`, `state.memory`, and the decay and step of `tensors` are float32, `rows` int32. All
    others have the same dtype: float32, float16 or bfloat16. A token's result has the same bits
    however the tokens of its row are divided among calls. Raises ValueError for other tensors.
    """
    num_tokens, num_rows, dtype, heads = len(out), len(rows.slots), out.dtype, shape.value_heads
    stride, wide = shape.channels + shape.values, torch.float32
    check_tensors(
        out=(out, (num_tokens, shape.values), dtype),
        projected=(projected, (num_tokens, stride), dtype),
        gates=(gates, (num_tokens, 2 * heads), wide),
        conv=(tensors.conv, (shape.width, shape.channels), dtype),
        decay=(tensors.decay, (heads,), wide),
        step=(tensors.step, (heads,), wide),
        norm=(tensors.norm, (shape.value_dim,), dtype),
        inputs=(state.inputs, (None, shape.width - 1, shape.channels), dtype),
        memory=(state.memory, (None, heads, shape.key_dim, shape.value_dim), wide),
        row_starts=(rows.row_starts, (num_rows + 1,), torch.int32),
        slots=(rows.slots, (num_rows,), torch.int32),
    )
    if not num_tokens:
        return
    mixed = out.new_empty(num_tokens, shape.channels, dtype=wide)
    name, spans = NAMES[dtype], (rows.row_starts, rows.slots)
    width = next(it for it in _WIDTHS if shape.width <= it)
    launcher.kernel(PROGRAM, f"convolve<{name}, {width}>")(
        (num_rows, -(-shape.channels // _THREADS)),
        (_THREADS,),
        (
            *(mixed, state.inputs, projected, tensors.conv, None, *spans),
            *ints(shape.channels, shape.width, stride, 0),
        ),
    )
    key = next(it for it in _KEYS if shape.key_dim <= it)
    threads = 32 * -(-shape.value_dim // _COLUMNS)
    launcher.kernel(PROGRAM, f"advance<{name}, {key}>")(
        (num_rows, heads),
        (threads,),
        (
            *(out, state.memory, mixed, projected, gates),
            *(tensors.decay, tensors.step, tensors.norm, *spans),
            *ints(shape.key_heads, shape.key_dim, shape.value_dim, stride),
            np.float32(eps),
        ),
    )
