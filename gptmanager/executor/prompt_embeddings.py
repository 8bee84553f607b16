"""`PromptEmbeddings`: the tables of the sequences that run, and which packed tokens they embed.

Knows lines of the token table and token ids, nothing of requests.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gptmanager.request.input_rows import HostRows


class Embedded(NamedTuple):
    """Packed tokens that are virtual: their indices int64 `[n]`, and float32 `[n, hidden]`."""

    tokens: npt.NDArray[np.int64]
    embeddings: npt.NDArray[np.float32]


class PromptEmbeddings:
    """Token id `vocab_size` + i of a sequence is row i of its line's table.

    `tables`, by line, is empty while no sequence has virtual tokens: then nothing must be asked.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.tables: dict[int, npt.NDArray[np.float32]] = {}

    def load(self, line: int, prompt_table: HostRows | None) -> None:
        """A sequence starts, whose context runs in `line`."""
        table = None if prompt_table is None else prompt_table.numbers
        if table is not None:
            self.tables[line] = table
        elif self.tables:
            self.tables.pop(line, None)

    def take(
        self, token_ids: npt.NDArray[np.int64], token_lines: npt.NDArray[np.int64]
    ) -> Embedded | None:
        """What of `token_ids` `[T]` is virtual, if any; they become ids of the vocabulary there."""
        index = np.flatnonzero(token_ids >= self._vocab_size)
        if not index.size:
            return None
        rows, lines = token_ids[index] - self._vocab_size, token_lines[index]
        token_ids[index] = 0
        width = next(iter(self.tables.values())).shape[1]
        embeddings = np.empty((len(index), width), dtype=np.float32)
        for line in np.unique(lines).tolist():
            mine = lines == line
            embeddings[mine] = self.tables[line][rows[mine]]
        return Embedded(index, embeddings)
