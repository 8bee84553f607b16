"""Unpacks integers of 2, 4 or 8 bits from words, and converts numbers of checkpoints to floats.

The lowest bits of a word have its first number, unless an `order` is given.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gptmanager.kernels.gemm.weight_quantization import run_in_team
from gptmanager.kernels.simd.lanes import LANES
from gptmanager.models.quantized.unpacking_loops import (
    E2M1,
    E4M3,
    FOUR_BITS,
    NAMED,
    SIGNED,
    UNSIGNED,
    ScaleTask,
    UnpackTask,
    scale_rows,
)
from gptmanager.models.quantized.unpacking_loops import unpack_columns as unpack_columns_body
from gptmanager.models.quantized.unpacking_loops import unpack_rows

_PAIRS = (FOUR_BITS, E2M1, NAMED)
_READ = LANES // 2  # bytes with two codes that are read at a time


def unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 `[n, words]` to uint8 `[n, elements]`; `bits` is 2, 4 or 8."""
    per_word = 32 // bits
    result = torch.empty(len(words), words.shape[1] * per_word, dtype=torch.uint8)
    task = UnpackTask(
        words=words.data_ptr(),
        result=result.data_ptr(),
        num_tokens=len(words),
        width=words.shape[1],
        row_stride=words.stride(0),
        word_stride=words.stride(1),
        bits=bits,
    )
    run_in_team(unpack_rows, task, result.numel())
    return result


def unpack_columns(words: Tensor, bits: int, order: tuple[int, ...] = ()) -> Tensor:
    """Unpack int32 `[n, words]` and transpose it to uint8 `[elements, n]`.

    `order`: for each element of a word, its place in the word, counted from the lowest bits. Empty
    if elements are in order.
    """
    count, per_word = len(words), 32 // bits
    width = -(-count // LANES) * LANES
    own = torch.empty(words.shape[1], width, dtype=torch.int32)
    own[:, :count] = words.t()
    result = torch.empty(len(own) * per_word, width, dtype=torch.uint8)
    places = order or range(per_word)
    task = UnpackTask(
        words=own.data_ptr(),
        result=result.data_ptr(),
        num_tokens=len(own),
        width=width,
        bits=bits,
        order=sum(place << 4 * number for number, place in enumerate(places)),
    )
    run_in_team(unpack_columns_body, task, result.numel())
    return result[:, :count]


def scaled(
    codes: Tensor,
    scales: Tensor,
    block: int,
    *,
    kind: int = UNSIGNED,
    columns: int | None = None,
    zeros: Tensor | float = 0.0,
    table: Tensor | None = None,
    index: Tensor | None = None,
    high_first: bool = False,
    factor: float = 1.0,
) -> Tensor:
    """Return (value - zero) * scale * factor for each code, in float32 `[n, columns]`.

    `codes`: `[n, bytes]` of int8, float8_e4m3fn, or uint8 with codes of the given `kind`.
    `columns`: the number of codes in a row, by default all. `scales`: `[n, blocks]`. `zeros`: `[n,
    blocks]`, or one number. A block has `block` consecutive columns, unless `index` `[columns]` has
    the block of each column. `table`, `high_first`: see `ScaleTask`.
    """
    kind = {torch.int8: SIGNED, torch.float8_e4m3fn: E4M3}.get(codes.dtype, kind)
    count, size = codes.shape
    columns = columns or size * (2 if kind in _PAIRS else 1)
    if kind in _PAIRS and size % _READ:
        codes = F.pad(codes, (0, -size % _READ))
    if isinstance(zeros, Tensor) and zeros.shape != scales.shape:
        given = scales, zeros
        scales, zeros = torch.broadcast_tensors(*given)  # type: ignore[no-untyped-call]
    num_blocks = scales.shape[1]
    if num_blocks == 1:
        index, block = None, -(-columns // LANES) * LANES
    elif index is None and block % LANES:
        index = torch.arange(columns) // block
    own = [it.float().contiguous() for it in (scales, zeros, index) if isinstance(it, Tensor)]
    result = torch.empty(count, columns)
    addresses = iter([it.data_ptr() for it in own])
    task = ScaleTask(
        codes=codes.data_ptr(),
        table=0 if table is None else table.data_ptr(),
        scales=next(addresses),
        zeros=next(addresses) if isinstance(zeros, Tensor) else 0,
        index=0 if index is None else next(addresses),
        result=result.data_ptr(),
        num_tokens=count,
        width=columns,
        stride=codes.stride(0),
        num_blocks=num_blocks,
        block=block,
        kind=kind,
        high_first=high_first,
        zero=0.0 if isinstance(zeros, Tensor) else zeros,
        factor=factor,
    )
    run_in_team(scale_rows, task, result.numel())
    return result


def powers_of_two(exponents: Tensor) -> Tensor:
    """Return the values of E8M0 numbers, 2 ** (byte - 127), in float32."""
    return torch.exp2(exponents.view(torch.uint8).float() - 127)


def numbers(given: Tensor) -> Tensor:
    """Convert stored scales or zeros to float32. uint8 is read as E8M0, an exponent of 2."""
    return powers_of_two(given) if given.element_size() == 1 and _is_e8m0(given) else given.float()


def _is_e8m0(given: Tensor) -> bool:
    return given.dtype in (torch.uint8, torch.float8_e8m0fnu)
