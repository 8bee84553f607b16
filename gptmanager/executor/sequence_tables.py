"""`SequenceTables`: the tokens and the blocks of each started sequence.

A line is a row of these tables; each beam of a sequence has its own (see `Lines`). The tables are
arrays on the CPU; `DeviceTables` also has copies on a device. This module does not know schedules
and models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from gptmanager.cuda.device.uploads import Upload

Ints = npt.NDArray[np.int64]
Written = tuple[Ints, npt.NDArray[Any]]  # cells, and the values written to them


class SequenceTables:
    """The tables of tokens and of block ids on the CPU.

    `tokens` is int32 `[lines, max_seq_len]`, `blocks` int32 `[lines, blocks_per_sequence]`.
    `token_tensor` and `block_tensor` are the tables as tensors. They share the memory of the
    arrays, except in `DeviceTables`, where they are copies on a device.
    """

    def __init__(self, num_lines: int, max_seq_len: int, blocks_per_sequence: int) -> None:
        self.tokens = np.zeros((num_lines, max_seq_len), dtype=np.int32)
        self.blocks = np.zeros((num_lines, blocks_per_sequence), dtype=np.int32)
        self.token_tensor = torch.from_numpy(self.tokens)
        self.block_tensor = torch.from_numpy(self.blocks)

    def write_tokens(self, line: int, first: int, tokens: Sequence[int]) -> None:
        """Write tokens to a line, from position `first` on."""
        self.tokens[line, first : first + len(tokens)] = tokens

    def write_cells(self, lines: Ints, positions: Ints, tokens: npt.NDArray[Any]) -> None:
        """Write `tokens` `[n]`, int32, to the cells at these lines and positions `[n]`."""
        self.tokens[lines, positions] = tokens

    def write_blocks(self, line: int, first: int, block_ids: Sequence[int]) -> None:
        """Write block ids to a line, from index `first` on."""
        self.blocks[line, first : first + len(block_ids)] = block_ids

    def fork(self, first_line: int, parents: Sequence[int], position: int) -> None:
        """Copy tokens from beam `parents[i]` to beam i, for all beams.

        The tokens at positions below `position` are copied. `first_line` is the line of beam 0.
        """
        sources = first_line + np.array(parents)
        lines = slice(first_line, first_line + len(parents))
        self.tokens[lines, :position] = self.tokens[sources, :position]

    @property
    def nbytes(self) -> int:
        """Bytes of CPU memory."""
        return self.tokens.nbytes + self.blocks.nbytes


class DeviceTables(SequenceTables):
    """Tables with a copy on a device, to which `flush` sends what was written since the last flush.

    Tokens chosen on the device are written to its copy first, and later to the CPU's arrays.
    `token_cells` is the device's token table as a vector, plus a 0 at the end, which only padding
    reads. A cell of the token table is an index into this vector.
    """

    def __init__(
        self, num_lines: int, max_seq_len: int, blocks_per_sequence: int, device: torch.device
    ) -> None:
        super().__init__(num_lines, max_seq_len, blocks_per_sequence)
        self.token_cells = torch.zeros(self.tokens.size + 1, dtype=torch.int32, device=device)
        self.token_tensor = self.token_cells[:-1].view(self.tokens.shape)
        self.block_tensor = torch.zeros(self.blocks.shape, dtype=torch.int32, device=device)
        self._written_tokens: list[Written] = []
        self._written_blocks: list[Written] = []
        self._may_repeat = False  # whether a cell may have been written twice
        self._forks: list[Written] = []  # lines, and the lines that they are copied from

    def write_tokens(self, line: int, first: int, tokens: Sequence[int]) -> None:
        super().write_tokens(line, first, tokens)
        cell = line * self.tokens.shape[1] + first
        cells = np.arange(cell, cell + len(tokens))
        self._written_tokens.append((cells, np.array(tokens, dtype=np.int32)))

    def write_cells(self, lines: Ints, positions: Ints, tokens: npt.NDArray[Any]) -> None:
        super().write_cells(lines, positions, tokens)
        self._written_tokens.append((self.cells(lines, positions), tokens))
        self._may_repeat = True

    def write_blocks(self, line: int, first: int, block_ids: Sequence[int]) -> None:
        super().write_blocks(line, first, block_ids)
        cell = line * self.blocks.shape[1] + first
        cells = np.arange(cell, cell + len(block_ids))
        self._written_blocks.append((cells, np.array(block_ids, dtype=np.int32)))

    def fork(self, first_line: int, parents: Sequence[int], position: int) -> None:
        super().fork(first_line, parents, position)
        lines = np.arange(first_line, first_line + len(parents))
        self._forks.append((lines, first_line + np.array(parents)))

    def cells(self, lines: Ints, positions: Ints) -> Ints:
        """Return the cells of these positions, or -1 for a position past the end of its line."""
        width = self.tokens.shape[1]
        return np.where(positions < width, lines * width + positions, -1)

    def flush(self, upload: Upload) -> None:
        """Enqueue all pending updates of the device's copy: forks first, then written cells."""
        if not (self._forks or self._written_tokens or self._written_blocks):
            return
        lines, sources = _joined(self._forks)
        token_cells, tokens = _joined(self._written_tokens)
        if self._may_repeat:
            token_cells, tokens = _last(token_cells, tokens)
        block_cells, blocks = _joined(self._written_blocks)
        sent = upload((lines, sources, token_cells, tokens, block_cells, blocks))
        if len(lines):
            self.token_tensor.index_copy_(0, sent[0], self.token_tensor.index_select(0, sent[1]))
        if len(tokens):
            self.token_cells.index_copy_(0, sent[2], sent[3])
        if len(blocks):
            self.block_tensor.view(-1).index_copy_(0, sent[4], sent[5])
        # cleared only now: if the step runs out of memory above, it runs again in parts
        self._forks, self._written_tokens, self._written_blocks = [], [], []
        self._may_repeat = False


_NOTHING = np.zeros(0, dtype=np.int64)


def _joined(written: Sequence[Written]) -> Written:
    """Return all cells and their values."""
    if not written:
        return _NOTHING, _NOTHING
    cells, values = zip(*written, strict=True)
    return np.concatenate(cells), np.concatenate(values)


def _last(cells: Ints, values: npt.NDArray[Any]) -> Written:
    """Return each cell once, with the value that was written to it last."""
    found, index = np.unique(cells[::-1], return_index=True)
    return found, values[::-1][index]
