"""`Int4Matrix`: a 4-bit weight matrix, in the order in which matmuls read it.

A panel has sixteen rows. A group has 32 adjacent columns of a row, as eight steps of four columns.
A byte has two columns: a column of step j in its lower half, and the same column of step j + 4 in
its upper half. `values` is uint8 `[panels, groups, 4 steps, 16 rows, 4 columns]`. `scales` and
`minima` are float16 `[panels, groups, 16 rows]`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gptmanager.errors import ConfigError
from gptmanager.kernels.gemm.int4_groups import GROUP, MIDDLE, Codebook, Groups
from gptmanager.kernels.gemm.packed_matrix import (
    PANEL_ROWS,
    PackedMatrix,
    Panels,
    Quantized,
    copy_rows,
    zeros,
)
from gptmanager.kernels.gemm.panels.codes import Codes
from gptmanager.kernels.gemm.panels.panel_writing import write_int4
from gptmanager.kernels.gemm.panels.words import PackedGroups
from gptmanager.kernels.gemm.weight_quantization import round_to_codebook, round_to_groups

INT4 = torch.uint8  # dtype of `values`: a byte has two columns
Given = Tensor | Codes | Groups | PackedGroups
_ALL = slice(None)
_STEPS, _FOUR = 4, 4  # steps in the lower halves of a group's bytes, and columns in a step


class Int4Matrix(PackedMatrix):
    """A matrix `[rows, columns]` of float32, bfloat16 or float16, stored in groups of 4-bit values.

    `copy_` can write only whole rows. `minima` is None until groups with minima are written. With a
    `codebook`, groups have no minima.
    """

    position_bytes = PANEL_ROWS // 2

    def __init__(
        self,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        codebook: Codebook | None = None,
    ) -> None:
        self.shape, self.dtype, self.codebook = torch.Size((rows, columns)), dtype, codebook
        groups, panels = -(-columns // GROUP), -(-rows // PANEL_ROWS)
        self.depth = groups * GROUP
        shape = panels, groups, _STEPS, PANEL_ROWS, _FOUR
        is_on_cpu = torch.device(device).type == "cpu"
        self.values = (
            zeros(shape, INT4) if is_on_cpu else torch.zeros(shape, dtype=INT4, device=device)
        )
        self.scales = torch.zeros(panels, groups, PANEL_ROWS, dtype=torch.float16, device=device)
        self.minima: Tensor | None = None
        self.plans, self._parts = {}, ()

    @property
    def kind(self) -> Quantized:
        """How the elements are stored."""
        return self.codebook or "int4"

    @property
    def nbytes(self) -> int:
        assert self.scales is not None
        minima = 0 if self.minima is None else self.minima.nbytes
        return self.values.nbytes + self.scales.nbytes + minima

    @property
    def panels(self) -> Panels:
        assert self.scales is not None
        return Panels(self.values, self.scales, self.minima, self.codebook)

    def adopt(self, panels: Panels) -> bool:
        if panels.codebook != self.codebook or not super().adopt(panels):
            return False
        self.minima = panels.minima
        return True

    def _part(self, first: int, size: int) -> PackedMatrix:
        assert self.scales is not None
        part = Int4Matrix.__new__(Int4Matrix)
        part.shape, part.dtype = torch.Size((size, self.shape[1])), self.dtype
        part.codebook = self.codebook
        own = slice(first // PANEL_ROWS, (first + size) // PANEL_ROWS)
        part.depth, part.values, part.scales = self.depth, self.values[own], self.scales[own]
        part.minima = None if self.minima is None else self.minima[own]
        part.plans, part._parts = {}, ()
        return part

    def groups(self, rows: slice = _ALL) -> Groups:
        """Return a copy of these rows as groups."""
        assert self.scales is not None
        start, stop, _ = rows.indices(len(self))
        first, end = start // PANEL_ROWS, -(-stop // PANEL_ROWS)
        own = slice(start - PANEL_ROWS * first, stop - PANEL_ROWS * first)
        halves = self.values[first:end].permute(0, 3, 1, 2, 4).flatten(0, 1)[own]
        scales, minima = (
            None if it is None else it[first:end].transpose(1, 2).flatten(0, 1)[own]
            for it in (self.scales, self.minima)
        )
        assert scales is not None
        return Groups(self._in_order(halves), scales, minima, self.codebook)

    def _in_order(self, halves: Tensor) -> Tensor:
        """Unpack the bytes of rows, `[n, groups, 4, 4]`, to 4-bit values `[n, columns]`."""
        return torch.stack((halves & 15, halves >> 4), dim=2).flatten(1)[:, : self.shape[1]]

    def unpacked(self, rows: slice = _ALL) -> Tensor:
        return self.groups(rows).floats().to(self.dtype)

    def gathered(self, ids: Tensor) -> Tensor:
        """Return the rows `ids [n]`, as `[n, columns]`."""
        assert self.scales is not None
        panel, lane = ids // PANEL_ROWS, ids % PANEL_ROWS
        values = self._in_order(self.values[panel, :, :, lane])
        minima = None if self.minima is None else self.minima[panel, :, lane]
        found = Groups(values, self.scales[panel, :, lane], minima, self.codebook)
        return found.floats().to(self.dtype)

    def copy_(
        self,
        values: Given,
        first_row: int = 0,
        first_column: int = 0,
        columns: slice = _ALL,
    ) -> None:
        """Write `columns` of the rows `values` to whole rows of this matrix, from `first_row` on.

        Floats and `Codes` are rounded to 4-bit groups. `Groups` and `PackedGroups` of this matrix's
        codebook are written unchanged; if `columns` begin within a group, they are rounded to new
        groups.
        """
        assert self.scales is not None and first_column == 0
        if isinstance(values, PackedGroups) and values.codebook == self.codebook:
            if values.write(columns, self.values, first_row):
                self._copy_numbers(values, first_row)
                return
        own = self._own(values, columns)
        minima = self._minima_for(own)
        self._write(own.values, first_row)
        copy_rows(self.scales.transpose(1, 2), first_row, own.scales)
        if minima is not None:
            copy_rows(minima.transpose(1, 2), first_row, _in_half(own.offsets))

    def _write(self, rows: Tensor, first_row: int) -> None:
        if self.values.device.type == "cpu":
            write_int4(rows, self.values, first_row)
            return
        first = first_row // PANEL_ROWS
        panels = self.values[first : -(-(first_row + len(rows)) // PANEL_ROWS)]
        on_cpu = panels.cpu()
        write_int4(rows, on_cpu, first_row - PANEL_ROWS * first)
        panels.copy_(on_cpu)

    def _copy_numbers(self, given: PackedGroups, first_row: int) -> None:
        """Write the scales of `given`, and its minima if it or this matrix has any."""
        assert self.scales is not None
        minima = self._minima_for(given)
        copy_rows(self._by_block(self.scales, given), first_row, given.by_block(given.scales))
        if minima is not None:
            offsets = given.by_block(_in_half(given.offsets))
            copy_rows(self._by_block(minima, given), first_row, offsets)

    @staticmethod
    def _by_block(numbers: Tensor, given: PackedGroups) -> Tensor:
        """Return a view `[panels, 16, blocks, given.groups_per_block]` of `numbers`."""
        panels, groups, lanes = numbers.shape
        size = given.groups_per_block
        return numbers.view(panels, groups // size, size, lanes).permute(0, 3, 1, 2)

    def _minima_for(self, given: Groups | PackedGroups) -> Tensor | None:
        """Return the minima, or None if neither this matrix nor `given` has any.

        A matrix without minima first gets minima that change no element. They follow from the
        scales, so the scales of `given` must not be written yet.
        """
        if self.minima is None and given.minima is not None:
            assert self.scales is not None
            self.minima = _in_half(self.scales.float() * -MIDDLE)
            self.plans, self._parts = {}, ()
        return self.minima

    def holds(
        self,
        values: Given,
        first_row: int = 0,
        first_column: int = 0,
        columns: slice = _ALL,
    ) -> bool:
        own = self.groups(slice(first_row, first_row + len(values)))
        given = self._own(values, columns).floats()
        return first_column == 0 and torch.equal(own.floats().cpu(), given)

    def _own(self, values: Given, columns: slice) -> Groups:
        if isinstance(values, PackedGroups):
            values = values.groups()
        if isinstance(values, Groups) and values.codebook == self.codebook:
            cut = values.columns(columns)
            if cut is not None:
                return cut
        if not isinstance(values, Tensor):
            values = values.floats()
        rows = values[:, columns].cpu()
        return round_to_codebook(rows, self.codebook) if self.codebook else round_to_groups(rows)


def _in_half(offsets: Tensor) -> Tensor:
    """Return minima in float16. Raises ConfigError for a finite one that becomes infinite."""
    found = offsets.half()
    if (found.isinf() & offsets.isfinite()).any():
        raise ConfigError(
            "a matrix of 4-bit groups, some of which have minima, has a scale of more than 8188: "
            "float16 cannot hold the minimum for it; load the matrix in 8 bits or in floats"
        )
    return found
