"""`TorchExecutor`: one step of a model over the paged KV cache.

Keeps what the device must know of each started sequence in preallocated arrays, a line a slot;
a step writes what changed and packs its rows. Decides nothing about who runs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from gptmanager.decoding.sampling import Sampler
from gptmanager.memory.kv_pool import KvPool
from gptmanager.models.batch import Batch
from gptmanager.models.model import Model
from gptmanager.prompt_embeddings import PromptEmbeddings
from gptmanager.slot_outputs import ContextPart, SlotOutputs, split_context
from gptmanager.step import ContextLogits, Extras, Row, Schedule, StepResult


@dataclass(slots=True, eq=False)
class TorchStep:
    """A step under way."""

    schedule: Schedule
    slots: np.ndarray  # [S], of the sampling rows
    positions: np.ndarray  # [S], absolute positions of the tokens to choose
    logits: Tensor  # float32 [S, vocab]
    context_logits: tuple[ContextLogits, ...] = ()
    tokens: np.ndarray | None = None  # int32 [S]
    extras: Extras | None = None


class TorchExecutor:
    """Runs schedules on a torch model; on the CPU every call has finished when it returns."""

    def __init__(
        self,
        model: Model,
        kv_pool: KvPool,
        *,
        num_slots: int,
        max_seq_len: int,
    ) -> None:
        self.model = model
        self.kv_pool = kv_pool
        self._outputs = SlotOutputs(num_slots)
        self._embeddings = PromptEmbeddings(model.spec.vocab_size)
        blocks_per_sequence = -(-max_seq_len // kv_pool.tokens_per_block)
        self._token_table = np.zeros((num_slots, max_seq_len), dtype=np.int32)
        self.sampler = Sampler(num_slots, model.spec.vocab_size, self._token_table)
        self._block_tables = np.zeros((num_slots, blocks_per_sequence), dtype=np.int32)
        self._token_table_tensor = torch.from_numpy(self._token_table)
        self._block_tables_tensor = torch.from_numpy(self._block_tables)
        self._stalled_ns = 0

    def forward(self, schedule: Schedule) -> TorchStep:
        stall = _Stall()
        self._load(schedule)
        if schedule.block_copies:
            self.kv_pool.copy(schedule.block_copies)
        parts = self._outputs.context_parts(schedule.context_rows)
        batch = self._pack(schedule, parts)
        with torch.inference_mode():
            logits = self.model.forward(batch, self.kv_pool)
        rows = schedule.sampling_rows
        logits, context_logits = split_context(logits, len(rows), parts)
        slots = np.array([row.slot for row in rows], dtype=np.int64)
        positions = np.array([row.position + row.num_tokens for row in rows], dtype=np.int64)
        self._stalled_ns += stall.nanoseconds()
        return TorchStep(schedule, slots, positions, logits, context_logits)

    def sample(self, step: TorchStep) -> None:
        """Choose a token for each sampling row and make it its sequence's next input."""
        stall = _Stall()
        raw = self._outputs.generation_logits(step.slots, step.logits)
        log_probs = self._outputs.log_probs(step.slots)
        with torch.inference_mode():
            step.tokens = self.sampler.sample(step.logits, step.slots, step.positions, log_probs)
        if raw or step.context_logits or log_probs is not None:
            log_probs = None if log_probs is None else log_probs[:, None]
            step.extras = Extras(log_probs, raw, step.context_logits)
        # the last position of a sequence needs no input after it
        fits = step.positions < self._token_table.shape[1]
        self._token_table[step.slots[fits], step.positions[fits]] = step.tokens[fits]
        self._stalled_ns += stall.nanoseconds()

    def result(self, step: TorchStep) -> StepResult:
        if step.tokens is None:
            raise RuntimeError("result() of a step that was not sampled")
        return StepResult(step.tokens[:, None], time.monotonic(), extras=step.extras)

    def take_gil_wait_us(self) -> int:
        """Microseconds since the last call in which the loop thread was off the CPU in a step.

        On the CPU a step computes all the time, so wall time beyond the thread's CPU time is time
        spent waiting: for the interpreter lock, or for a core.
        """
        stalled, self._stalled_ns = self._stalled_ns, 0
        return stalled // 1000

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held beside the weights."""
        return self.kv_pool.nbytes + self._token_table.nbytes + self._block_tables.nbytes

    def _load(self, schedule: Schedule) -> None:
        """Bring the slots up to date with what the schedule gave out."""
        for start in schedule.starts:
            self._token_table[start.slot, : len(start.tokens)] = start.tokens
            self.sampler.load(start.slot, start.sampling, start.orig_prompt_len, start.wanted)
            self._embeddings.load(start)
        self._outputs.load(schedule.starts)
        for append in schedule.block_appends:
            end = append.first + len(append.block_ids)
            self._block_tables[append.slot, append.first : end] = append.block_ids

    def _pack(self, schedule: Schedule, parts: Sequence[ContextPart] = ()) -> Batch:
        rows = (*schedule.context_rows, *schedule.generation_rows)
        slots = np.array([row.slot for row in rows], dtype=np.int32)
        starts = np.array([row.position for row in rows], dtype=np.int64)
        counts = np.array([row.num_tokens for row in rows], dtype=np.int64)
        ends = np.cumsum(counts)
        row_starts = np.zeros(len(rows) + 1, dtype=np.int32)
        row_starts[1:] = ends
        num_tokens = int(ends[-1])
        if num_tokens == len(rows):  # one token a row
            positions, token_slots = starts, slots
        else:
            positions = np.repeat(starts - (ends - counts), counts) + np.arange(num_tokens)
            token_slots = np.repeat(slots, counts)
        sample_rows = _sample_rows(schedule)
        sample_index = ends[sample_rows] - 1
        for part in parts:  # behind the rows that sample
            first = ends[part.place] - counts[part.place] + part.first - part.row.position
            sample_index = np.append(sample_index, np.arange(first, first + part.num_tokens))
            sample_rows = np.append(sample_rows, np.full(part.num_tokens, part.place))
        token_ids = self._token_table[token_slots, positions].astype(np.int64)
        prompt_index, prompt_embeddings = self._embeddings.take(token_ids, token_slots)
        return Batch(
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(positions),
            row_starts=torch.from_numpy(row_starts),
            kv_lengths=torch.from_numpy((starts + counts).astype(np.int32)),
            slots=torch.from_numpy(slots),
            block_tables=self._block_tables_tensor,
            token_table=self._token_table_tensor,
            sample_index=torch.from_numpy(sample_index),
            sample_rows=torch.from_numpy(sample_rows),
            num_context_rows=len(schedule.context_rows),
            prompt_index=prompt_index,
            prompt_embeddings=prompt_embeddings,
        )


def _sample_rows(schedule: Schedule) -> np.ndarray:
    """Which rows of the batch yield a token: finished contexts, and generation."""
    context: tuple[Row, ...] = schedule.context_rows
    first = len(context)
    finished = (index for index, row in enumerate(context) if row.samples)
    generation = range(first, first + len(schedule.generation_rows))
    return np.fromiter(chain(finished, generation), dtype=np.int64)


class _Stall:
    """Time since its making that this thread did not run."""

    def __init__(self) -> None:
        self._wall = time.perf_counter_ns()
        self._cpu = time.thread_time_ns()

    def nanoseconds(self) -> int:
        cpu = time.thread_time_ns() - self._cpu
        return max(0, time.perf_counter_ns() - self._wall - cpu)
