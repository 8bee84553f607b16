"""Integers of 2, 4 or 8 bits, packed in words of 32 bits.

The lowest bits of a word have its first number, unless an `order` is given.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gptmanager.kernels.gemm.int4_groups import GROUP, MIDDLE, Codebook, Groups
from gptmanager.kernels.gemm.panels.word_loops import (
    AWQ_ORDER,
    AWQ_ROWS,
    GroupTask,
    UnpackTask,
    awq_groups,
)
from gptmanager.kernels.gemm.panels.word_loops import unpack_columns as unpack_columns_body
from gptmanager.kernels.gemm.panels.word_loops import unpack_rows, word_groups
from gptmanager.kernels.gemm.weight_quantization import run_in_team
from gptmanager.kernels.simd.lanes import LANES

_FOUR_GROUPS = 4 * GROUP


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """Rows of a 4-bit matrix as a checkpoint stores them: eight values in a word.

    `words` is int32 `[n, columns / 8]` with any strides. If there is an `order`, `words` is
    `[rows / 8, columns]`: a word has the values of 8 rows in one column. The value of the i-th of
    these rows is at place `order[i]` of the word, counted from the lowest bits. The first `skipped`
    unpacked rows do not belong to the matrix. `scales` and `minima` are float16 `[n, blocks]`. A
    block has `width` columns, a multiple of 32, or all columns of a row. `codebook`: see `Groups`.
    """

    words: Tensor
    columns: int
    scales: Tensor
    width: int
    minima: Tensor | None = None
    order: tuple[int, ...] = ()
    skipped: int = 0
    codebook: Codebook | None = None

    def __len__(self) -> int:
        return len(self.scales)

    def groups(self) -> Groups:
        if self.order:
            values = unpack_columns(self.words.t(), 4, self.order)
            values = values[self.skipped : self.skipped + len(self)]
        else:
            values = unpack(self.words, 4)[:, : self.columns]
        minima = None if self.minima is None else self.in_groups(self.minima)
        return Groups(values, self.in_groups(self.scales), minima, self.codebook)

    def rows(self, rows: slice) -> Groups:
        return self.groups().rows(rows)

    def floats(self) -> Tensor:
        return self.groups().floats()

    @property
    def offsets(self) -> Tensor:
        """The numbers that are added to `scale * value`, float32 `[n, blocks]`."""
        return self.scales.float() * -MIDDLE if self.minima is None else self.minima.float()

    @property
    def groups_per_block(self) -> int:
        """The number of groups in each block, or 1 if the last block has fewer groups."""
        count = -(-self.columns // GROUP)
        blocks = self.scales.shape[1]
        size = count if blocks == 1 else self.width // GROUP
        return size if blocks * size == count else 1

    def by_block(self, numbers: Tensor) -> Tensor:
        """Return scales or minima, one for each group, as `[n, blocks, groups_per_block]`.

        If `groups_per_block` is 1, each group is a block.
        """
        size = self.groups_per_block
        return (self.in_groups(numbers) if size == 1 else numbers).unsqueeze(2).expand(-1, -1, size)

    def in_groups(self, numbers: Tensor) -> Tensor:
        """Return `numbers`, one for each block, repeated for each group of 32 columns."""
        count = -(-self.columns // GROUP)
        if numbers.shape[1] == 1:
            return numbers.expand(-1, count)
        return numbers.repeat_interleave(self.width // GROUP, 1)[:, :count]

    def write(self, columns: slice, values: Tensor, first: int) -> bool:
        """Write the 4-bit values to `values`, the panels of an `Int4Matrix`, from row `first` on.

        Returns False, and writes nothing, if the words must be unpacked first.
        """
        strides = self.words.stride()
        row_stride, word_stride = strides[::-1] if self.order else strides
        is_by_row = word_stride == 1 and not self.order
        num_rows, multiple = LANES, _FOUR_GROUPS if is_by_row else GROUP
        body, is_known = word_groups, 1 in strides
        if self.order:
            num_rows, body = AWQ_ROWS, awq_groups
            is_known = self.order == AWQ_ORDER and word_stride == 1 and not self.skipped
        is_whole = columns.indices(self.columns) == (0, self.columns, 1)
        in_panels = not (len(self) % num_rows or first % LANES or self.columns % multiple)
        if not (is_known and is_whole and in_panels and values.device.type == "cpu"):
            return False
        task = GroupTask(
            words=self.words.data_ptr(),
            values=values.data_ptr(),
            num_tokens=len(self),
            first_row=first,
            num_groups=self.columns // GROUP,
            row_stride=row_stride,
            word_stride=word_stride,
        )
        run_in_team(body, task, len(self) * self.columns)
        return True


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


def unpack_stream(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 `[n, words]` to uint8 `[n, elements]`, for 3, 5 or 6 bits.

    A row is one stream of bits, in which an element may begin in one word and end in the next. Its
    number of elements must be a multiple of eight.
    """
    parts = words.contiguous().view(torch.uint8).view(len(words), -1, bits).long()
    shifts = torch.arange(0, 8 * bits, 8)
    eight = (parts << shifts).sum(2, keepdim=True)  # the bits of eight elements
    found: Tensor = eight >> torch.arange(0, 8 * bits, bits) & (1 << bits) - 1
    return found.to(torch.uint8).flatten(1)


def unpack_columns(words: Tensor, bits: int, order: tuple[int, ...] = ()) -> Tensor:
    """Unpack int32 `[n, words]` and transpose it to uint8 `[elements, n]`.

    `order` has the place of each element in a word, counted from the lowest bits. It is empty if
    elements are in order.
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
