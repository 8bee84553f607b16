"""Products as the kernel benchmark times them: those of a generation step of a small and a large
model, as a manager computes them where our kernel is the faster one.
"""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor

from gptmanager.bench.kernels.cases import (
    Bed,
    Case,
    Decoder,
    Goal,
    Prepared,
    Sizes,
    largest_error,
    tolerance,
)
from gptmanager.cuda.activations import silu_mul
from gptmanager.cuda.gemm.gemv import FEW_ROWS
from gptmanager.cuda.gemm.own_matmuls import OwnMatmuls

_LARGE = 32 << 20  # bytes of a weight; the time of a smaller one is mostly its launch
_SHARE_OF_COPY = 0.85  # of few rows
_TIMES_ROOFLINE = 1.3  # of more


def matmul_cases(sizes: Sizes) -> list[Case]:
    return [
        _case(sizes, model, number, name, rows)
        for model in sizes.decoders
        for name, number in _weights(model).items()
        for rows in sizes.product_rows
    ]


def _weights(model: Decoder) -> dict[str, tuple[int, int]]:
    """Width and depth of a layer's four, and of the head."""
    return {
        "QKV": (model.qkv, model.hidden),
        "output": (model.hidden, model.hidden),
        "gate-up + SiLU": (2 * model.ffn, model.hidden),
        "down": (model.hidden, model.ffn),
        "head": (model.vocab_size, model.hidden),
    }


def _case(sizes: Sizes, model: Decoder, size: tuple[int, int], name: str, rows: int) -> Case:
    width, depth = size
    has_silu = "SiLU" in name
    itemsize, out_width = sizes.dtype.itemsize, width // 2 if has_silu else width
    weight_bytes = width * depth * itemsize
    is_large = weight_bytes >= _LARGE
    is_few = rows <= FEW_ROWS
    goal = Goal("copy", _SHARE_OF_COPY) if is_few else Goal("roofline", _TIMES_ROOFLINE)
    return Case(
        "products",
        f"{name} of {model.name}, {rows} x {depth} x {width}",
        weight_bytes + rows * (depth + out_width) * itemsize,
        partial(_prepare, rows, width, depth, has_silu),
        2 * rows * width * depth,
        (*([goal] if is_large else ()), Goal("peer", 1.0, "torch")),
        quick=is_large and rows in (sizes.product_rows[0], sizes.product_rows[-1]),
    )


def _prepare(rows: int, width: int, depth: int, has_silu: bool, bed: Bed) -> Prepared:
    """Weights are what a step reads anew; all are multiplied with the same rows."""
    x = bed.randn(rows, depth)
    num_bytes = width * depth * x.itemsize
    weights = bed.sets(num_bytes, width, depth, scale=depth**-0.5)
    out = x.new_empty(rows, width // 2 if has_silu else width)
    own = out.clone()
    products = OwnMatmuls(bed.launcher)

    def ours(number: int) -> Tensor:
        products.multiply(out, x, weights[number], None, silu=has_silu)
        return out

    def by_torch(number: int) -> Tensor:
        product = F.linear(x, weights[number])
        if not has_silu:
            return product
        silu_mul(bed.launcher, own, product)  # as a manager does behind torch's product
        return own

    expected = F.linear(x.float(), weights[0].float())
    if has_silu:
        gate, up = expected.chunk(2, dim=1)
        expected = F.silu(gate) * up
    error, peers = largest_error(expected), {"torch": lambda: by_torch}
    return Prepared(len(weights), ours, error, tolerance(bed.sizes.dtype), peers)
