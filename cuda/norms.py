"""Launchers of RMSNorm and LayerNorm: for rows, optionally after an addition, and for heads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from torch import Tensor

from gptmanager.cuda.device.launch import NAMES, Argument, Launcher, Program, check_tensors, ints

_COUNTS = {True: (1, 2, 4), False: (1, 2, 8)}  # vectors per thread, by whether they have 16 bytes
_MAX_THREADS = 1024


_FLAGS = ("false", "true")


def _kernels() -> Iterator[str]:
    """Yield the kernels' names: for rows, for heads, and for rows with weights stored minus 1."""
    kinds = [
        [
            f"{name}, {16 // dtype.itemsize if wide else 1}, {count}, {centered}"
            for count in _COUNTS[wide]
        ]
        for (dtype, name), wide, centered in itertools.product(NAMES.items(), (True, False), _FLAGS)
    ]
    for own, add in itertools.product(kinds, _FLAGS):
        yield from (f"norm<{kind}, {add}>" for kind in own)
    yield from (f"norm_heads<{kind}>" for own in kinds for kind in own)
    for own, add in itertools.product(kinds, _FLAGS):
        yield from (f"norm<{kind}, {add}, true>" for kind in own)


PROGRAM = Program(
    "norms.cu",
    tuple(_kernels()),
    dependent=True,
    at_once=1,  # compiled one by one: a model needs few of these kernels
)


def norm(
    launcher: Launcher,
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
    *,
    centered: bool = False,
    plus_one: bool = False,
) -> None:
    """Compute an RMSNorm, or a LayerNorm if `centered`, over the last dimension.

    The RMSNorm is `out = y / sqrt(mean(y^2) + eps) * weight + bias`. For a LayerNorm, the mean of y
    is first subtracted from y. Here y is `x`, or with a `residual` the rounded sum of both, which
    is also written to `residual`. If `plus_one`, `weight` holds the weights minus 1. `out`, `x` and
    `residual` are `[T, C]`, `weight` and `bias` are `[C]`. All have the same dtype: float32,
    float16 or bfloat16. `out` may be `x`. Raises ValueError for other tensors, and for rows of more
    than 64 KiB, or of more than 8192 elements if a row is not a multiple of 16 bytes.
    """
    num_tokens, width = x.shape
    row = (num_tokens, width)
    check_tensors(
        x=(x, row, x.dtype),
        out=(out, row, x.dtype),
        residual=(residual, row, x.dtype),
        weight=(weight, (width,), x.dtype),
        bias=(bias, (width,), x.dtype),
    )
    if num_tokens == 0:
        return
    vector, count, threads = _sizes(width, x.itemsize, is_wide=_are_wide(x.itemsize, width))
    flags = ", ".join(str(flag).lower() for flag in (centered, residual is not None))
    name = f"norm<{NAMES[x.dtype]}, {vector}, {count}, {flags}{', true' if plus_one else ''}>"
    arguments = (out, residual, x, weight, bias, np.int32(width), np.float32(eps))
    launcher.kernel(PROGRAM, name)((num_tokens,), (threads,), arguments)


def norm_heads(
    launcher: Launcher,
    x: Tensor,
    columns: range,
    width: int,
    weight: Tensor,
    eps: float,
    *,
    centered: bool = False,
) -> None:
    """Normalize each head in the `columns` of `x [T, N]` in place; a head has `width` columns.

    The norm is an RMSNorm, or a LayerNorm if `centered`. `weight` `[len(columns)]` has an element
    for each column. Dtypes and the largest width are as in `norm`. Raises ValueError
    for other tensors or columns.
    """
    num_tokens, stride = x.shape
    check_tensors(x=(x, (num_tokens, stride), x.dtype), weight=(weight, (len(columns),), x.dtype))
    parts, rest = divmod(len(columns), width)
    if rest or columns.step != 1 or columns.stop > stride:
        raise ValueError(
            f"the columns must be a range within {stride} columns, of step 1, that divides into "
            f"heads of {width}, got {columns}"
        )
    if not num_tokens or not parts:
        return
    sizes = columns.start, width, stride
    vector, count, threads = _sizes(width, x.itemsize, is_wide=_are_wide(x.itemsize, *sizes))
    name = f"norm_heads<{NAMES[x.dtype]}, {vector}, {count}, {str(centered).lower()}>"
    arguments: tuple[Argument, ...] = (x, weight, *ints(*sizes), np.float32(eps))
    launcher.kernel(PROGRAM, name)((num_tokens, parts), (threads,), arguments)


def _are_wide(itemsize: int, *sizes: int) -> bool:
    """Return whether all `sizes`, in elements, are multiples of 16 bytes."""
    return not any(size * itemsize % 16 for size in sizes)


def _sizes(width: int, itemsize: int, is_wide: bool) -> tuple[int, int, int]:
    """Return the elements of a vector, the vectors of a thread, and the threads of a row."""
    vector, counts = 16 // itemsize if is_wide else 1, _COUNTS[is_wide]
    vectors = width // vector
    count = next((n for n in counts if vectors <= n * _MAX_THREADS // 2), counts[-1])
    threads = -(-vectors // (32 * count)) * 32
    if threads > _MAX_THREADS:
        raise ValueError(
            f"rows of {width} elements: at most {_MAX_THREADS * count * vector} are supported"
        )
    return vector, count, threads
