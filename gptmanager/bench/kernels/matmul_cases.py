"""Kernel benchmark cases for the matmuls of a generation step, of a small and a large model.

The matmuls run as in a manager that has chosen our kernel for them, with weights in the dtype of
the activations. Large matmuls also run with int8, fp8 and int4 weights. All are compared with
torch's matmul of weights in the dtype of the activations.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from gptmanager.bench.kernels.cases import (
    Absent,
    Case,
    Decoder,
    Goal,
    Prepared,
    Rig,
    Sizes,
    largest_error,
    tolerance,
)
from gptmanager.cuda.activations import activate_gated
from gptmanager.cuda.gemm import gemv_int4
from gptmanager.cuda.gemm.byte_rows import ByteRows, Fp8Rows, Int8Rows
from gptmanager.cuda.gemm.device_matrices import DeviceMatrix
from gptmanager.cuda.gemm.gemv import FEW_ROWS
from gptmanager.cuda.gemm.own_matmuls import OwnMatmuls
from gptmanager.kernels.gemm.int4_groups import GROUP
from gptmanager.kernels.gemm.int4_matrix import Int4Matrix
from gptmanager.kernels.gemm.packed_matrix import plain

Stored = Literal["int8", "fp8", "int4"]
_ROWS: dict[Stored, type[ByteRows | Int4Matrix]] = {
    "int8": Int8Rows,
    "fp8": Fp8Rows,
    "int4": Int4Matrix,
}
_ITEM_BYTES: dict[Stored, float] = {"int8": 1, "fp8": 1, "int4": 0.5 + 2 / GROUP}  # with scales
_LARGE = 32 << 20  # bytes; with a smaller weight, a matmul takes hardly longer than a launch
_SHARE_OF_COPY = 0.85  # goal for few rows: at least this share of the bandwidth of a copy
_TIMES_ROOFLINE = 1.3  # goal for more rows: at most this multiple of the roofline's time
# goals with quantized weights: at most these multiples of torch's time with 16-bit weights
_TIMES_FLOATS: dict[Stored, float] = {"int8": 0.65, "fp8": 0.65, "int4": 0.4}


def matmul_cases(sizes: Sizes) -> list[Case]:
    """Return the cases for all matrices of `sizes.decoders` and all `sizes.matmul_rows`."""
    return [
        case
        for model in sizes.decoders
        for name, number in _weights(model).items()
        for rows in sizes.matmul_rows
        for stored in (None, *_ROWS)
        if (case := _case(sizes, model, number, name, rows, stored)) is not None
    ]


def _weights(model: Decoder) -> dict[str, tuple[int, int]]:
    """Return name -> (width, depth) of a layer's four matrices and of the head."""
    return {
        "QKV": (model.qkv, model.hidden),
        "output": (model.hidden, model.hidden),
        "gate-up + SiLU": (2 * model.ffn, model.hidden),
        "down": (model.hidden, model.ffn),
        "head": (model.vocab_size, model.hidden),
    }


def _case(
    sizes: Sizes, model: Decoder, size: tuple[int, int], name: str, rows: int, stored: Stored | None
) -> Case | None:
    width, depth = size
    has_silu = "SiLU" in name
    itemsize, out_width = sizes.dtype.itemsize, width // 2 if has_silu else width
    is_large = width * depth * itemsize >= _LARGE
    numbers = sizes.matmul_rows
    if stored == "int4":  # for more rows, and for gate-up + SiLU, a manager uses other kernels
        numbers = tuple(it for it in numbers if it <= gemv_int4.MOST_ROWS)
    if stored and not is_large or rows not in numbers or (stored == "int4" and has_silu):
        return None
    weight_bytes = round(width * depth * (_ITEM_BYTES[stored] if stored else itemsize))
    is_few = rows <= FEW_ROWS
    goal = Goal("copy", _SHARE_OF_COPY) if is_few else Goal("roofline", _TIMES_ROOFLINE)
    return Case(
        "matmuls",
        f"{name} of {model.name}{f', {stored}' if stored else ''}, {rows} x {depth} x {width}",
        weight_bytes + rows * (depth + out_width) * itemsize,
        partial(_prepare, rows, width, depth, has_silu, stored),
        2 * rows * width * depth,
        (
            *([goal] if is_large else ()),
            Goal("peer", _TIMES_FLOATS[stored] if stored else 1.0, "torch"),
        ),
        quick=is_large and rows in (numbers[0], numbers[-1]),
    )


def _prepare(
    rows: int, width: int, depth: int, has_silu: bool, stored: Stored | None, rig: Rig
) -> Prepared:
    """Prepare weights that successive calls alternate between, and one set of input rows.

    A step reads each weight only once, so a weight is never in the cache when a step needs it.
    Raise Absent if `stored` is "fp8" and the device has no 8-bit floats. On such a device, managers
    also refuse fp8 weights.
    """
    if stored == "fp8" and not rig.launcher.has_fp8:
        raise Absent("weights in 8-bit floats need compute capability 8.9 or later")
    x = rig.randn(rows, depth)
    num_bytes = round(width * depth * (_ITEM_BYTES[stored] if stored else x.itemsize))
    floats = rig.sets(num_bytes, width, depth, scale=depth**-0.5)
    weights: list[DeviceMatrix] = [_quantized(it, stored) if stored else it for it in floats]
    if stored == "int4":
        floats = [plain(it) for it in weights]
    out = x.new_empty(rows, width // 2 if has_silu else width)
    own = out.clone()
    matmuls = OwnMatmuls(rig.launcher)

    def ours(number: int) -> Tensor:
        matmuls.multiply(out, x, weights[number], None, silu=has_silu)
        return out

    def by_torch(number: int) -> Tensor:
        result = F.linear(x, floats[number])
        if not has_silu:
            return result
        activate_gated(rig.launcher, own, result)  # a manager does this after torch's matmul
        return own

    expected = F.linear(x.float(), plain(weights[0]).float())
    if has_silu:
        gate, up = expected.chunk(2, dim=1)
        expected = F.silu(gate) * up
    error, peers = largest_error(expected), {"torch": lambda: by_torch}
    return Prepared(len(weights), ours, error, tolerance(rig.sizes.dtype), peers)


def _quantized(weight: Tensor, stored: Stored) -> ByteRows | Int4Matrix:
    """Return the weight quantized. For int4 return random values: to quantize would be slow."""
    rows, columns = weight.shape
    found = _ROWS[stored](rows, columns, weight.dtype, weight.device)
    if isinstance(found, Int4Matrix):
        found.values.random_(0, 256)
        found.panels.scales.fill_(0.2 * columns**-0.5)
    else:
        found.copy_(weight)
    return found
