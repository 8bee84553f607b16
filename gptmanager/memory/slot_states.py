"""`SlotStates`: the states of recurrent layers, for each line (the place of a running sequence)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class StateShape(NamedTuple):
    """The shape and the dtype of one state tensor of a sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SlotStates:
    """The states of all lines. `tensors[i]` has the shape `[num_lines, *shapes[i].shape]`.

    A line holds the states of a running sequence, or a snapshot of states.

    The caller clears a line before a sequence begins in it. Only the model writes nonzero values.
    """

    def __init__(
        self, shapes: Sequence[StateShape], num_lines: int, device: torch.device | str = "cpu"
    ) -> None:
        kinds = [*dict.fromkeys(shapes)]
        # All states of a kind are in one tensor, so that one operation per kind clears a line.
        self.stacks = [
            torch.zeros((shapes.count(it), num_lines, *it.shape), dtype=it.dtype, device=device)
            for it in kinds
        ]
        self.tensors: list[Tensor] = [
            self.stacks[kinds.index(it)][shapes[:number].count(it)]
            for number, it in enumerate(shapes)
        ]

    def copy(self, source: int, destination: int) -> None:
        """Copy all states of line `source` to line `destination`."""
        for stack in self.stacks:
            stack[:, destination] = stack[:, source]

    def clear(self, line: int) -> None:
        """Set all states of a line to zero."""
        for stack in self.stacks:
            stack[:, line].zero_()

    @property
    def nbytes(self) -> int:
        return sum(stack.nbytes for stack in self.stacks)


def state_bytes(shapes: Iterable[StateShape]) -> int:
    """Return the size in bytes of the states of one line."""
    return sum(shape.nbytes for shape in shapes)
