"""`Runner`: computes the logits of packed rows on the CPU; base class of `DeviceRunner`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gptmanager.cuda.device.uploads import Array
from gptmanager.executor.choice.prompt_scores import PromptScorer, Scores
from gptmanager.executor.packed_rows import PackedRows
from gptmanager.executor.sequence_tables import SequenceTables
from gptmanager.executor.step_in_flight import ChoiceInputs
from gptmanager.kernels.attention.attention_arguments import RowLengths
from gptmanager.kernels.capture.captured_step import Begin, ignore
from gptmanager.memory.adapter_pool import AdapterPool
from gptmanager.memory.kv_pool import KvPool
from gptmanager.memory.released_memory import ReleasedMemory
from gptmanager.models.batch import Batch
from gptmanager.models.model import Model, capturable
from gptmanager.request.input_rows import HostRows
from gptmanager.statistics import Memory


class Computed(NamedTuple):
    """The result of a batch. `logits` `[S, vocab]`: float32; on a device maybe the model's dtype.

    `inputs`: the places of the S chosen tokens in the device's tables; None if the places are not
    uploaded yet. `lost`: (line, reason) of each sequence that ran out of memory. The logits of a
    lost sequence are NaN.
    """

    logits: Tensor
    inputs: ChoiceInputs | None = None
    lost: tuple[tuple[int, str], ...] = ()


class StepSignal:
    """Calls each of `callbacks` before each forward pass, on the thread that runs the pass.

    The replay of a CUDA graph is not announced.

    A callback's argument is true if the pass runs without the interpreter lock: then threads that
    the callback wakes run in parallel with the pass. Each callback is also called with False after
    an iteration without an announced pass, and before the loop does something else that may take
    long.
    A callback must not raise.
    """

    def __init__(self) -> None:
        self.callbacks: list[Callable[[bool], None]] = []
        self._has_begun = False  # whether this iteration has announced a pass

    def begin(self, is_unlocked: bool) -> None:
        """Announce a forward pass."""
        self._has_begun = True
        self._call(is_unlocked)

    def end_iteration(self) -> None:
        """Record the end of an iteration. If the iteration announced no pass, call the callbacks
        with False, so that no thread waits for a pass.
        """
        if not self._has_begun:
            self._call(False)
        self._has_begun = False

    def interrupt(self) -> None:
        """Announce that the loop does something else before the next step."""
        self._call(False)

    def _call(self, is_unlocked: bool) -> None:
        for callback in self.callbacks:
            callback(is_unlocked)


class Runner:
    """Runs a model on the CPU. When a method returns, its work is done.

    A caller must enter `stream` around the whole step. Token id `vocab_size` + i is a virtual
    token: its embedding is row i of the prompt table of the sequence. `adapter_pool`: None if no
    sequence uses an adapter.
    """

    stream: AbstractContextManager[Any] = nullcontext()
    # whether tokens are chosen on a device, and so are unknown when the executor's `sample` returns
    tokens_on_device = False

    def __init__(
        self,
        model: Model,
        kv_pool: KvPool,
        tables: SequenceTables,
        adapter_pool: AdapterPool | None = None,
    ) -> None:
        self.model = model
        self.kv_pool = kv_pool
        self.tables = tables
        self.adapter_pool = adapter_pool
        self._adapter_slots = np.full(len(tables.tokens), -1, dtype=np.int32)  # by line
        self._has_adapters = False  # whether any line has or had an adapter
        self._prompt_tables: dict[int, Array] = {}  # by line, of sequences with virtual tokens
        self._scorer: PromptScorer | None = None  # created on first use
        self._released: ReleasedMemory | None = None
        self._capturable = capturable(model)
        self._step_capture = (
            None if self._capturable is None else self._capturable.new_step_capture()
        )
        self.begin_step: Begin = ignore  # called before a pass, see `StepCapture.run`

    def load(
        self, line: int, prompt_table: HostRows | None, adapter_slot: int = -1, beam_width: int = 1
    ) -> None:
        """Load a sequence that starts in `line`, with its virtual tokens if it has any.

        Recurrent states are cleared in `line`, but not in the lines of further beams: a model with
        recurrent states has no beams, so each of its sequences has one line.
        `adapter_slot`: the slot of the adapter that all beams of the sequence use; -1 without an
        adapter.
        """
        self.kv_pool.states.clear(line)
        self._adapter_slots[line : line + beam_width] = adapter_slot
        self._has_adapters |= adapter_slot >= 0
        table = None if prompt_table is None else prompt_table.numbers
        if table is not None:
            self._prompt_tables[line] = table
        elif self._prompt_tables:
            self._prompt_tables.pop(line, None)

    def run(self, rows: PackedRows) -> Computed:
        """Return the logits at the rows' `sample_index`. Raises torch's out-of-memory errors."""
        return Computed(self._launch(rows).float())

    def to_cpu(self, logits: Tensor) -> Tensor:
        """Return the logits as float32 on the CPU, complete when the step's result is known."""
        return logits

    def score(self, logits: Tensor, targets: Array, count: int, normalized: bool) -> Scores:
        """Score prompt tokens as `PromptScorer.score` does; the scores are copied to the CPU."""
        if self._scorer is None:
            self._scorer = PromptScorer(logits.shape[1])
        return self._scorer.score(logits, targets, count, normalized=normalized)

    def relieve(self) -> None:
        """Release memory that is cached for later use."""

    def catch_up(self) -> None:
        """Wait for work that the host has enqueued on its own stream, such as new weights."""

    def release(self) -> None:
        """Return the memory of the KV cache to the system. No step may run until `restore`."""
        self._released = ReleasedMemory(self.kv_pool.memory)
        self._released.release()

    def restore(self) -> None:
        """Allocate what `release` gave back to the system. The KV cache has lost its contents."""
        if self._released is not None:
            self._released.restore()
            self._released = None

    @property
    def memory(self) -> Memory:
        """Bytes of the weights, the KV cache and the tables."""
        pages = self.kv_pool.nbytes + self.kv_pool.host_nbytes
        own = self.model.nbytes + pages + self.tables.nbytes
        return Memory(cpu=own, adapter_page=self._adapter_page_bytes)

    @property
    def _adapter_page_bytes(self) -> int:
        return 0 if self.adapter_pool is None else self.adapter_pool.page_nbytes

    def _adapters_of(self, rows: PackedRows) -> Array | None:
        """Return the adapter slot of each token, int32 `[T]`; None if no row uses an adapter."""
        if not self._has_adapters:
            return None
        slots = self._adapter_slots[rows.token_lines]
        slots[rows.row_starts[-1] :] = -1  # padding
        return slots if slots.max() >= 0 else None

    def _launch(self, rows: PackedRows) -> Tensor:
        tensors, slots, adapters = self.upload(self._arrays(rows)), self._adapters_of(rows), None
        if slots is not None and self.adapter_pool is not None:
            adapters = self.adapter_pool.step(self.upload((slots,))[0], slots)
        all_sampled = has_one_token_each(rows)
        lengths = RowLengths(rows.row_starts, rows.kv_lengths)
        given = {"adapters": adapters, "all_sampled": all_sampled, "lengths": lengths}
        batch = self._batch(tensors, rows.num_context_rows, **given)
        if self._has_virtual_tokens(rows):
            batch = self._embed(batch, rows)
        is_plain = all_sampled and adapters is None and batch.prompt_index is None
        if is_plain and self._capturable is not None and self._step_capture is not None:
            own = batch, self.kv_pool, self._step_capture
            return self._capturable.forward_captured(*own, self.begin_step)
        self.begin_step(False)
        found = self.model.forward(batch, self.kv_pool)
        if not isinstance(found, Tensor):  # the forward of a host's own model
            raise TypeError(
                f"forward of {type(self.model).__name__} returned an object of type "
                f"{type(found).__name__}, expected a tensor of logits [S, vocab_size]"
            )
        return found

    def _arrays(self, rows: PackedRows) -> tuple[Array, ...]:
        """Return the arrays that `_batch` reads."""
        return (
            self._inputs(rows),
            rows.lines.astype(np.int32),
            rows.positions,
            rows.row_starts,
            rows.kv_lengths,
            rows.sample_index,
            rows.sample_rows,
        )

    def _inputs(self, rows: PackedRows) -> Array:
        """Return the tokens of the batch, int64 `[T]`."""
        token_ids: Array = self.tables.tokens[rows.token_lines, rows.positions].astype(np.int64)
        return token_ids

    def upload(self, arrays: Sequence[Array]) -> Sequence[Tensor]:
        """Return the arrays as tensors on the model's device."""
        return [torch.from_numpy(array) for array in arrays]

    def _batch(self, tensors: Sequence[Tensor], num_context_rows: int, **given: Any) -> Batch:
        """Return a batch. `tensors`: the arrays of `_arrays`, followed by the model's plan.

        `given`: the other fields of the batch.
        """
        token_ids, lines, positions, starts, lengths, index, sample_rows, *plan = tensors
        return Batch(
            *(token_ids, positions, starts, lengths, lines),
            *(self.tables.block_tensor, self.tables.token_tensor, index, sample_rows),
            num_context_rows=num_context_rows,
            plan=tuple(plan),
            **given,
        )

    def _has_virtual_tokens(self, rows: PackedRows) -> bool:
        """Return whether any context belongs to a sequence with virtual tokens."""
        contexts = rows.lines[: rows.num_context_rows].tolist()
        return not self._prompt_tables.keys().isdisjoint(contexts)

    def _embed(self, batch: Batch, rows: PackedRows) -> Batch:
        """Return the batch with the embeddings of virtual tokens, which only contexts have."""
        context = slice(0, int(rows.row_starts[rows.num_context_rows]))
        lines, positions = rows.token_lines[context], rows.positions[context]
        numbers = self.tables.tokens[lines, positions] - self.model.spec.vocab_size
        index = np.flatnonzero(numbers >= 0)
        if not index.size:
            return batch
        lines, numbers = lines[index], numbers[index]
        parts = [(lines == line, self._prompt_tables[line]) for line in np.unique(lines).tolist()]
        embeddings = np.empty((len(index), parts[0][1].shape[1]), dtype=np.float32)
        for own, table in parts:
            embeddings[own] = table[numbers[own]]
        where, embedded = self.upload((index, embeddings))
        batch.token_ids.index_fill_(0, where, 0)
        return replace(batch, prompt_index=where, prompt_embeddings=embedded)


def has_one_token_each(rows: PackedRows) -> bool:
    """Return whether each row is a generation row with one token, and each token is sampled."""
    num_rows, ends = len(rows.lines), rows.row_starts[-1]
    return rows.num_context_rows == 0 and len(rows.sample_index) == ends == num_rows
