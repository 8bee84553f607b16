"""`Codes`: rows of a checkpoint's numbers of 8 bits or fewer, with their scales."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptmanager.kernels.gemm.panels.code_loops import (
    E2M1,
    E4M3,
    FOUR_BITS,
    NAMED,
    SIGNED,
    UNSIGNED,
    ScaleTask,
    scale_rows,
    scale_to_int8,
)
from gptmanager.kernels.gemm.panels.column_loops import (
    FOUR,
    GROUP_BYTES,
    ColumnTask,
    columns_to_int8,
)
from gptmanager.kernels.gemm.panels.panel_writing import panel_depth, panel_scratch
from gptmanager.kernels.gemm.panels.words import unpack
from gptmanager.kernels.gemm.weight_quantization import run_in_team, team_size
from gptmanager.kernels.simd.lanes import LANES
from gptmanager.kernels.simd.tiles import LINE_BYTES

_PAIRS = (FOUR_BITS, E2M1, NAMED)
_READ = LANES // 2  # bytes that are read at a time if a byte has two codes
_IN_BYTES = {4: FOUR_BITS, 8: UNSIGNED}  # bits of integers that need no unpacking -> kind
_KINDS = {torch.int8: SIGNED, torch.float8_e4m3fn: E4M3}
_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """Rows of codes. An element is (value - zero) * scale * factor + minimum, in float32.

    `codes` is `[n, bytes]` of int8, float8_e4m3fn, or uint8 with codes of the given `kind`. If
    `bits` is not 0, `codes` is instead int32 `[n, words]` with any strides: a word has integers of
    `bits` bits, the first one in the lowest bits. `columns`: how many codes of a row are used, by
    default all. `scales`: `[n, blocks]`. `zeros`: `[n, blocks]`, or one number. A block has `block`
    consecutive columns, unless `index` `[columns]` has the block of each column. `minima`:
    `[n, blocks]`, or None; not both `zeros` and `minima` are given. `table`, `high_first`: see
    `ScaleTask`.
    """

    codes: Tensor
    scales: Tensor
    block: int
    kind: int = UNSIGNED
    columns: int | None = None
    zeros: Tensor | float = 0.0
    minima: Tensor | None = None
    table: Tensor | None = None
    index: Tensor | None = None
    high_first: bool = False
    factor: float = 1.0
    bits: int = 0

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def num_columns(self) -> int:
        per_code = 32 // self.bits if self.bits else 2 if self.kind in _PAIRS else 1
        return self.columns or self.codes.shape[1] * per_code

    def rows(self, rows: slice) -> Codes:
        zeros = self.zeros[rows] if isinstance(self.zeros, Tensor) else self.zeros
        minima = None if self.minima is None else self.minima[rows]
        codes, scales = self.codes[rows], self.scales[rows]
        return replace(self, codes=codes, scales=scales, zeros=zeros, minima=minima)

    def floats(self) -> Tensor:
        """Return the elements in float32, `[n, columns]`."""
        result = torch.empty(len(self), self.num_columns)
        self._run(scale_rows, {"result": result.data_ptr()})
        return result

    def write_int8(self, columns: slice, values: Tensor, scales: Tensor, first: int) -> None:
        """Round and write `columns` as `panel_writing.write_int8` does, given `floats()`."""
        start, stop, _ = columns.indices(self.num_columns)
        if self.bits and self.write_words(start, stop, values, scales, first):
            return
        floats = (self.num_columns + LANES) * _FLOAT_BYTES
        scratch, sizes = panel_scratch(stop - start, len(self) * self.num_columns, floats)
        fields = {
            "values": values.data_ptr(),
            "row_scales": scales.data_ptr(),
            "first_column": start,
            "num_columns": stop - start,
            "first_row": first,
            "depth": panel_depth(values),
            "scratch": scratch.data_ptr(),
            **sizes,
        }
        self._run(scale_to_int8, fields)

    def write_words(
        self, start: int, stop: int, values: Tensor, scales: Tensor, first: int
    ) -> bool:
        """Write the columns from `start` to `stop` of integers in words, as `write_int8` does.

        Return False, and write nothing, if the integers must be unpacked first.
        """
        count, columns, strides = len(self), self.num_columns, self.codes.stride()
        if 1 not in strides or self.factor != 1 or count % LANES or first % LANES:
            return False
        if self.minima is not None:
            return False
        if any(size % FOUR for size in (start, stop, columns)):
            return False
        index = torch.arange(columns) // self.block if self.index is None else self.index
        index = index.int().contiguous()
        own_scales, zeros = (
            it.float().expand_as(self.scales).t().contiguous() if isinstance(it, Tensor) else None
            for it in (self.scales, self.zeros)
        )
        assert own_scales is not None
        num_words, num_groups = self.codes.shape[1], self.scales.shape[1]
        scratch_bytes = num_groups * GROUP_BYTES + num_words * LINE_BYTES
        scratch = torch.empty(team_size(count * columns) * scratch_bytes, dtype=torch.uint8)
        task = ColumnTask(
            words=self.codes.data_ptr(),
            scales=own_scales.data_ptr(),
            zeros=0 if zeros is None else zeros.data_ptr(),
            index=index.data_ptr(),
            values=values.data_ptr(),
            row_scales=scales.data_ptr(),
            num_tokens=count,
            num_words=num_words,
            width=columns,
            num_groups=num_groups,
            bits=self.bits,
            row_stride=strides[0],
            word_stride=strides[1],
            first_column=start,
            num_columns=stop - start,
            first_row=first,
            depth=panel_depth(values),
            scratch=scratch.data_ptr(),
            scratch_bytes=scratch_bytes,
            zero=0.0 if isinstance(self.zeros, Tensor) else self.zeros,
        )
        run_in_team(columns_to_int8, task, count * columns)
        return True

    def _unpacked(self) -> Codes:
        """Return the same numbers with `codes` in bytes instead of 32-bit words."""
        if self.bits in _IN_BYTES and self.codes.stride(1) == 1:
            codes, kind = self.codes.view(torch.uint8), _IN_BYTES[self.bits]
        else:
            codes, kind = unpack(self.codes, self.bits), UNSIGNED
        return replace(self, codes=codes, kind=kind, bits=0)

    def _run(self, body: Any, fields: Mapping[str, int]) -> None:
        if self.bits:
            self._unpacked()._run(body, fields)
            return
        kind = _KINDS.get(self.codes.dtype, self.kind)
        codes, columns, block = self.codes, self.num_columns, self.block
        if kind in _PAIRS and codes.shape[1] % _READ:
            codes = F.pad(codes, (0, -codes.shape[1] % _READ))
        scales, index = self.scales, self.index
        zeros = self.zeros if self.minima is None else self.minima
        if isinstance(zeros, Tensor) and zeros.shape != scales.shape:
            given = scales, zeros
            scales, zeros = torch.broadcast_tensors(*given)  # type: ignore[no-untyped-call]
        num_blocks = scales.shape[1]
        if num_blocks == 1:
            index, block = None, -(-columns // LANES) * LANES
        elif index is None and block % LANES:
            index = torch.arange(columns) // block
        own = [it.float().contiguous() for it in (scales, zeros, index) if isinstance(it, Tensor)]
        addresses = iter([it.data_ptr() for it in own])
        task: ctypes.Structure = ScaleTask(
            codes=codes.data_ptr(),
            table=0 if self.table is None else self.table.data_ptr(),
            scales=next(addresses),
            zeros=next(addresses) if isinstance(zeros, Tensor) else 0,
            index=0 if index is None else next(addresses),
            num_tokens=len(codes),
            width=columns,
            stride=codes.stride(0),
            num_blocks=num_blocks,
            block=block,
            kind=kind,
            high_first=self.high_first,
            adds_zeros=self.minima is not None,
            zero=0.0 if isinstance(zeros, Tensor) else zeros,
            factor=self.factor,
            **fields,
        )
        run_in_team(body, task, len(codes) * columns)


def powers_of_two(exponents: Tensor) -> Tensor:
    """Return the values of E8M0 numbers, 2 ** (byte - 127), in float32."""
    return torch.exp2(exponents.view(torch.uint8).float() - 127)


def numbers(given: Tensor) -> Tensor:
    """Convert stored scales or zeros to float32. A uint8 is read as E8M0, a power of two."""
    return powers_of_two(given) if given.element_size() == 1 and _is_e8m0(given) else given.float()


def _is_e8m0(given: Tensor) -> bool:
    return given.dtype in (torch.uint8, torch.float8_e8m0fnu)
