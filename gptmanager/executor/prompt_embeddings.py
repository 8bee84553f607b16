"""`PromptEmbeddings`: the tables of the sequences that run, and which packed tokens they embed.

Knows lines of the token table and token ids, nothing of requests. A step without virtual tokens
pays a look at a dictionary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gptmanager.request.input_rows import HostRows


class PromptEmbeddings:
    """Tables by line. Token id `vocab_size` + i of a line's sequence is row i of its table."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._tables: dict[int, np.ndarray] = {}

    def load(self, line: int, prompt_table: HostRows | None) -> None:
        """A sequence starts, whose context runs in `line`."""
        table = None if prompt_table is None else prompt_table.numbers
        if table is not None:
            self._tables[line] = table
        elif self._tables:
            self._tables.pop(line, None)

    def take(
        self, token_ids: np.ndarray, token_lines: np.ndarray
    ) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Places int64 `[n]` of virtual tokens, and their embeddings `[n, hidden]`; if there are.

        `token_ids` int64 `[T]` become ids of the vocabulary there.
        """
        if not self._tables:
            return None, None
        places = np.flatnonzero(token_ids >= self._vocab_size)
        if not places.size:
            return None, None
        rows, lines = token_ids[places] - self._vocab_size, token_lines[places]
        token_ids[places] = 0
        width = next(iter(self._tables.values())).shape[1]
        embeddings = np.empty((len(places), width), dtype=np.float32)
        for line in np.unique(lines).tolist():
            mine = lines == line
            embeddings[mine] = self._tables[line][rows[mine]]
        return torch.from_numpy(places), torch.from_numpy(embeddings)
