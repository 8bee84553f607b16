"""`Runner`: computes the logits of packed rows; `CpuRunner` does so where the tables are."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from gptmanager.executor.packed_rows import PackedRows
from gptmanager.executor.prompt_embeddings import PromptEmbeddings
from gptmanager.executor.sequence_tables import SequenceTables
from gptmanager.executor.step_in_flight import ChoiceInputs
from gptmanager.memory.kv_pool import KvPool
from gptmanager.models.batch import Batch
from gptmanager.models.model import Model
from gptmanager.request.input_rows import HostRows
from gptmanager.statistics import Memory


class Computed(NamedTuple):
    """What a batch yields: float32 `logits` `[S, vocab]`.

    `inputs`: the S as the device knows them already, where that is so. `lost`: lines of sequences
    for which there was no memory, and why; their logits are NaN.
    """

    logits: Tensor
    inputs: ChoiceInputs | None = None
    lost: tuple[tuple[int, str], ...] = ()


class Runner(Protocol):
    """Where a model runs."""

    @property
    def stream(self) -> AbstractContextManager[Any]:
        """To be entered around all that a step does."""

    def load(self, line: int, prompt_table: HostRows | None) -> None:
        """A sequence starts in `line`, maybe with virtual tokens."""

    def run(self, rows: PackedRows) -> Computed:
        """Logits of the sampled tokens; raises what torch raises where memory is short."""

    def bring(self, logits: Tensor) -> Tensor:
        """Logits that a host wants, on the CPU by the time of the step's result."""

    def relieve(self) -> None:
        """Give back memory that is held for later."""

    @property
    def memory(self) -> Memory:
        """Bytes of the tensors that are held, the weights among them."""


class CpuRunner:
    """Runs a model on the CPU; every call has finished when it returns."""

    def __init__(self, model: Model, kv_pool: KvPool, tables: SequenceTables) -> None:
        self.stream: AbstractContextManager[Any] = nullcontext()
        self._model = model
        self._kv_pool = kv_pool
        self._tables = tables
        self._embeddings = PromptEmbeddings(model.spec.vocab_size)

    def load(self, line: int, prompt_table: HostRows | None) -> None:
        self._embeddings.load(line, prompt_table)

    def run(self, rows: PackedRows) -> Computed:
        tables = self._tables
        token_ids = tables.tokens[rows.token_lines, rows.positions].astype(np.int64)
        embedded = None
        if self._embeddings.tables:
            embedded = self._embeddings.take(token_ids, rows.token_lines)
        batch = Batch(
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(rows.positions),
            row_starts=torch.from_numpy(rows.row_starts),
            kv_lengths=torch.from_numpy(rows.kv_lengths),
            slots=torch.from_numpy(rows.lines.astype(np.int32)),
            block_tables=tables.block_tensor,
            token_table=tables.token_tensor,
            sample_index=torch.from_numpy(rows.sample_index),
            sample_rows=torch.from_numpy(rows.sample_rows),
            num_context_rows=rows.num_context_rows,
            prompt_index=embedded and torch.from_numpy(embedded.tokens),
            prompt_embeddings=embedded and torch.from_numpy(embedded.embeddings),
        )
        return Computed(self._model.forward(batch, self._kv_pool).float())

    def bring(self, logits: Tensor) -> Tensor:
        return logits

    def relieve(self) -> None:
        pass

    @property
    def memory(self) -> Memory:
        pages = self._kv_pool.nbytes + self._kv_pool.host_nbytes
        return Memory(cpu=self._model.nbytes + pages + self._tables.nbytes)
