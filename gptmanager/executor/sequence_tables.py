"""`SequenceTables`: the tokens and the blocks of each started sequence, a line for each beam.

A host's arrays, and what of them a device must have. Knows nothing of schedules and models.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from gptmanager.cuda.uploads import Upload


class SequenceTables:
    """`tokens` int32 `[lines, max_seq_len]`, `blocks` int32 `[lines, blocks_per_sequence]`.

    `token_tensor` and `block_tensor` are the same on the device; on the CPU the same memory.
    """

    def __init__(self, num_lines: int, max_seq_len: int, blocks_per_sequence: int) -> None:
        self.tokens = np.zeros((num_lines, max_seq_len), dtype=np.int32)
        self.blocks = np.zeros((num_lines, blocks_per_sequence), dtype=np.int32)
        self.token_tensor = torch.from_numpy(self.tokens)
        self.block_tensor = torch.from_numpy(self.blocks)

    def write_tokens(self, line: int, first: int, tokens: Sequence[int]) -> None:
        self.tokens[line, first : first + len(tokens)] = tokens

    def write_blocks(self, line: int, first: int, block_ids: Sequence[int]) -> None:
        self.blocks[line, first : first + len(block_ids)] = block_ids

    def fork(self, first_line: int, parents: Sequence[int], position: int) -> None:
        """Beam i goes on from the tokens before `position` of its parent."""
        sources = first_line + np.array(parents)
        lines = slice(first_line, first_line + len(parents))
        self.tokens[lines, :position] = self.tokens[sources, :position]

    @property
    def nbytes(self) -> int:
        """Bytes on the host."""
        return self.tokens.nbytes + self.blocks.nbytes


class DeviceTables(SequenceTables):
    """Tables with a copy on a device, which has what was written when `flush` has run.

    What a step on the device chooses it writes to its own copy, and the host's gets it later. The
    last element of `token_cells`, all of the device's tokens, belongs to nobody.
    """

    def __init__(
        self, num_lines: int, max_seq_len: int, blocks_per_sequence: int, device: torch.device
    ) -> None:
        super().__init__(num_lines, max_seq_len, blocks_per_sequence)
        self.token_cells = torch.zeros(self.tokens.size + 1, dtype=torch.int32, device=device)
        self.token_tensor = self.token_cells[:-1].view(self.tokens.shape)
        self.block_tensor = torch.zeros(self.blocks.shape, dtype=torch.int32, device=device)
        self._written: dict[str, list[tuple[int, npt.NDArray[np.int32]]]] = {}
        self._forks: list[tuple[int, Sequence[int]]] = []

    @property
    def device_nbytes(self) -> int:
        return self.token_cells.nbytes + self.block_tensor.nbytes

    def write_tokens(self, line: int, first: int, tokens: Sequence[int]) -> None:
        super().write_tokens(line, first, tokens)
        self._note("tokens", line * self.tokens.shape[1] + first, tokens)

    def write_blocks(self, line: int, first: int, block_ids: Sequence[int]) -> None:
        super().write_blocks(line, first, block_ids)
        self._note("blocks", line * self.blocks.shape[1] + first, block_ids)

    def fork(self, first_line: int, parents: Sequence[int], position: int) -> None:
        super().fork(first_line, parents, position)
        self._forks.append((first_line, parents))

    def cells(
        self, lines: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Where in `token_cells` these positions are; behind a line's end nobody's."""
        width = self.tokens.shape[1]
        return np.where(positions < width, lines * width + positions, self.tokens.size)

    def flush(self, upload: Upload) -> None:
        """Enqueue what the device's copy lacks: beams first, then what was written to them."""
        if not (self._forks or self._written):
            return
        arrays = {}
        if self._forks:  # of one sequence each
            lines = [first + np.arange(len(parents)) for first, parents in self._forks]
            sources = [first + np.array(parents) for first, parents in self._forks]
            arrays = {"lines": np.concatenate(lines), "sources": np.concatenate(sources)}
            self._forks.clear()
        for name, pieces in self._written.items():
            arrays[f"{name} places"] = np.concatenate(
                [np.arange(start, start + len(values)) for start, values in pieces]
            )
            arrays[name] = np.concatenate([values for _, values in pieces])
        self._written = {}
        uploaded = upload(arrays)
        if "lines" in uploaded:
            rows = self.token_tensor.index_select(0, uploaded["sources"])
            self.token_tensor.index_copy_(0, uploaded["lines"], rows)
        cells = {"tokens": self.token_cells, "blocks": self.block_tensor.view(-1)}
        for name, whole in cells.items():
            if name in uploaded:
                whole.index_copy_(0, uploaded[f"{name} places"], uploaded[name])

    def _note(self, name: str, start: int, values: Sequence[int]) -> None:
        if len(values):
            piece = np.array(values, dtype=np.int32)
            self._written.setdefault(name, []).append((start, piece))
