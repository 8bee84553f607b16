"""`DeviceExecutor`: a step enqueued on a device, whose tokens arrive while the next one runs.

Decides what stays on the device between steps: sequences' tokens, block tables and parameters. What
it does not do there it leaves to the `TorchExecutor`, at the price of waiting for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gptmanager.cuda.streams import Event, Stream
from gptmanager.decoding.device_sampling import MAX_CONTINUATIONS, Choice, DeviceSampler
from gptmanager.executor import TorchExecutor
from gptmanager.generation_graphs import GenerationGraphs
from gptmanager.memory.kv_pool import KvPool
from gptmanager.models.batch import Batch
from gptmanager.models.model import Model, PlanningModel
from gptmanager.packed_rows import PackedRows, padded
from gptmanager.sequence_tables import DeviceTables
from gptmanager.staging import Staging
from gptmanager.statistics import Memory
from gptmanager.step import BeamCandidates, Extras, Schedule, StepResult
from gptmanager.token_chooser import TorchStep

_NUM_ARRIVALS = 4  # buffers for tokens: more than steps are under way


@dataclass(frozen=True, eq=False)
class _Arrival:
    """A choice on its way to the host. Of its rows those that are `is_single` are sequences of one
    beam; `starts`: what had started in their lines when it left.
    """

    choice: Choice
    copied: Event
    is_single: np.ndarray
    starts: np.ndarray


class DeviceExecutor(TorchExecutor):
    """Runs schedules on `stream`. `graph_sizes`: numbers of rows for which a generation step of a
    `PlanningModel` is recorded at the start; steps of so many rows at most run as a recording.

    A step is adjusted, chosen, and its beams' continuations found, on the device, and nothing waits
    for it before `result`. Steps with guesses, sampled beams, logits post-processors, or logits
    that a host wants bring their logits to the host, behind the processors, which work on the
    device's.
    """

    def __init__(
        self,
        model: Model,
        kv_pool: KvPool,
        *,
        stream: Stream,
        num_slots: int,
        max_beam_width: int = 1,
        graph_sizes: Sequence[int] = (),
        **options: Any,
    ) -> None:
        self._stream = stream
        self._staging = Staging(stream)
        num_lines = num_slots * max_beam_width
        self._num_starts = np.zeros(num_lines, dtype=np.int64)
        self._arrivals = [
            (stream.staging(8 * num_lines), stream.event()) for _ in range(_NUM_ARRIVALS)
        ]
        self._turn = 0
        self._plans = isinstance(model, PlanningModel)
        with stream:
            super().__init__(
                model, kv_pool, num_slots=num_slots, max_beam_width=max_beam_width, **options
            )
            self._graphs = GenerationGraphs(stream, self._staging, graph_sizes)
            if graph_sizes and any(name.startswith("plan") for name in self._idle_arrays(1)):
                shape = (max(graph_sizes), model.spec.vocab_size)
                self._graph_logits = torch.empty(shape, device=stream.device)
                with torch.inference_mode():
                    self._graphs.record(self._idle_arrays, self._step)
            stream.synchronize()

    def forward(self, schedule: Schedule) -> TorchStep:
        with self._stream:
            return super().forward(schedule)

    def sample(self, step: TorchStep) -> None:
        with self._stream:
            super().sample(step)

    def result(self, step: TorchStep) -> StepResult:
        with self._stream:
            return super().result(step)

    @property
    def memory(self) -> Memory:
        arrivals = sum(memory.nbytes for memory, _ in self._arrivals)
        return Memory(
            cpu=self._tables.nbytes,
            gpu=self.model.nbytes + self.kv_pool.nbytes + self._device_tables.device_nbytes,
            pinned=self._staging.nbytes + arrivals + self.kv_pool.host_nbytes,
        )

    def run_largest(self, num_tokens: int, num_sampled: int) -> None:
        """Run contexts of `num_tokens` tokens in all; what they write and read is block 0."""
        longest = self._tables.tokens.shape[1]
        counts = np.full(-(-num_tokens // longest), longest, dtype=np.int64)
        counts[-1] = num_tokens - counts[:-1].sum()
        ends = np.cumsum(counts)
        positions = np.arange(num_tokens) - np.repeat(ends - counts, counts)
        sampled = np.arange(num_tokens - min(num_sampled, num_tokens), num_tokens)
        rows = PackedRows(
            lines=np.zeros(len(counts), dtype=np.int64),
            row_starts=np.concatenate(([0], ends)).astype(np.int32),
            kv_lengths=counts.astype(np.int32),
            positions=positions,
            token_lines=np.zeros(num_tokens, dtype=np.int64),
            sample_index=sampled,
            sample_rows=np.searchsorted(ends, sampled, side="right"),
            num_context_rows=len(counts),
        )
        with self._stream, torch.inference_mode():
            self._compute(rows)

    # What the device knows ------------------------------------------------------------------

    def _new_tables(
        self, num_lines: int, max_seq_len: int, blocks_per_sequence: int
    ) -> DeviceTables:
        self._device_tables = DeviceTables(
            num_lines, max_seq_len, blocks_per_sequence, self._stream.device
        )
        return self._device_tables

    def _new_sampler(self, vocab_size: int) -> DeviceSampler:
        tokens, stream = self._tables.tokens, self._stream
        self._sampler = DeviceSampler(
            len(tokens), vocab_size, tokens, stream.launcher, stream.device
        )
        return self._sampler

    def _load(self, schedule: Schedule) -> None:
        super()._load(schedule)
        for start in schedule.starts:
            self._num_starts[start.slot * self.max_beam_width] += 1
        self._device_tables.flush(self._staging.upload)

    # The model -------------------------------------------------------------------------------

    def _compute(self, rows: PackedRows) -> Tensor:
        num_rows = len(rows.lines)
        if rows.num_context_rows == 0 and len(rows.sample_index) == rows.row_starts[-1] == num_rows:
            size = self._graphs.size_for(num_rows)
            if size is not None:
                arrays = self._arrays(padded(rows, size), fixed=True)
                return self._graphs.run(size, arrays)[:num_rows]
        return super()._compute(rows)

    def _relieve(self) -> None:
        self._stream.relieve()

    def _batch(self, rows: PackedRows) -> Batch:
        tensors = self._staging.upload(self._arrays(rows))
        batch = self._tensors_batch(tensors, rows.num_context_rows)
        context = slice(0, int(rows.row_starts[rows.num_context_rows]))
        lines, positions = rows.token_lines[context], rows.positions[context]
        token_ids = self._tables.tokens[lines, positions].astype(np.int64)
        places, embeddings = self._embeddings.take(token_ids, lines)
        if places is None or embeddings is None:
            return batch
        places = places.to(self._stream.device)
        batch.token_ids.index_fill_(0, places, 0)
        embeddings = embeddings.to(self._stream.device)
        return replace(batch, prompt_index=places, prompt_embeddings=embeddings)

    def _arrays(self, rows: PackedRows, fixed: bool = False) -> dict[str, np.ndarray]:
        """What the device gets of a batch."""
        arrays = {
            "places": self._device_tables.cells(rows.token_lines, rows.positions),
            "positions": rows.positions,
            "row_starts": rows.row_starts,
            "kv_lengths": rows.kv_lengths,
            "slots": rows.lines.astype(np.int32),
            "sample_index": rows.sample_index,
            "sample_rows": rows.sample_rows,
        }
        if self._plans:
            numbers = rows.row_starts, rows.kv_lengths, rows.num_context_rows
            for number, array in enumerate(self.model.plan(*numbers, fixed)):
                arrays[f"plan {number}"] = array
        return arrays

    def _tensors_batch(self, tensors: Mapping[str, Tensor], num_context_rows: int) -> Batch:
        token_ids = self._device_tables.token_cells.index_select(0, tensors["places"]).long()
        return Batch(
            token_ids=token_ids,
            positions=tensors["positions"],
            row_starts=tensors["row_starts"],
            kv_lengths=tensors["kv_lengths"],
            slots=tensors["slots"],
            block_tables=self._tables.block_tensor,
            token_table=self._tables.token_tensor,
            sample_index=tensors["sample_index"],
            sample_rows=tensors["sample_rows"],
            num_context_rows=num_context_rows,
            plan=tuple(value for name, value in tensors.items() if name.startswith("plan")),
        )

    def _step(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """What is recorded: a step without context rows. All recordings share their logits."""
        batch = self._tensors_batch(tensors, 0)
        return self._graph_logits[: len(batch.slots)].copy_(self.model.forward(batch, self.kv_pool))

    def _idle_arrays(self, size: int) -> dict[str, np.ndarray]:
        """A batch of so many rows, none of which has a token."""
        none = np.zeros(0, dtype=np.int64)
        lengths = np.zeros(0, dtype=np.int32)
        rows = PackedRows(
            none, np.zeros(1, dtype=np.int32), lengths, none, none, none, none, num_context_rows=0
        )
        return self._arrays(padded(rows, size), fixed=True)

    # The tokens ------------------------------------------------------------------------------

    def _choose(self, step: TorchStep) -> None:
        if self._is_plain(step):
            self._enqueue_choice(step)
            return
        super()._choose(step)
        cells = self._device_tables.cells(step.lines, step.positions)
        fits = cells < self._tables.tokens.size
        tokens = self._tables.tokens[step.lines[fits], step.positions[fits]]
        sent = self._staging.upload({"cells": cells[fits], "tokens": tokens})
        self._device_tables.token_cells.index_copy_(0, sent["cells"], sent["tokens"])

    def _is_plain(self, step: TorchStep) -> bool:
        """Nothing else is done with its logits than what the device does."""
        return 2 * self.max_beam_width <= MAX_CONTINUATIONS and not self._chooser.sees(step)

    def _enqueue_choice(self, step: TorchStep) -> None:
        tables, upload = self._device_tables, self._staging.upload
        widths = np.ones(len(step.lines), dtype=np.int64)
        if self.max_beam_width > 1:
            widths = np.array([row.beam_width for row in step.rows]).repeat(np.diff(step.firsts))
        searched = widths > 1
        arrays = {
            "lines": step.lines.astype(np.int32),
            "positions": step.positions,
            "cells": tables.cells(step.lines, step.positions),
        }
        most = 0
        if searched.any():  # whose next tokens a fork will bring
            arrays["cells"][searched] = tables.tokens.size
            arrays["counts"] = np.where(searched, 2 * widths, 0).astype(np.int32)
            most = int(arrays["counts"].max())
        places = upload(arrays)
        choice = self._sampler.enqueue(
            step.logits, places, step.lines, tables.token_tensor, upload, most
        )
        tables.token_cells.index_copy_(0, places["cells"], choice.tokens)
        step.arrival = self._send(choice, ~searched, self._num_starts[step.lines])

    def _send(self, choice: Choice, is_single: np.ndarray, starts: np.ndarray) -> _Arrival:
        """Enqueue the way of a choice to the host."""
        memory, copied = self._arrivals[self._turn]
        self._turn = (self._turn + 1) % len(self._arrivals)
        num_bytes = sum(tensor.nbytes for tensor in choice if tensor is not None)
        if num_bytes > len(memory):  # beams: 8 bytes for each continuation
            memory = self._stream.staging(num_bytes)
        arriving: list[Tensor | None] = []
        start = 0
        for tensor in choice:
            if tensor is not None:
                own = memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                own.copy_(tensor, non_blocking=True)
                start += tensor.nbytes
            arriving.append(None if tensor is None else own)
        copied.record()
        return _Arrival(Choice(*arriving), copied, is_single, starts)  # type: ignore[arg-type]

    def _receive(self, step: TorchStep) -> None:
        arrival, step.arrival = step.arrival, None
        if arrival is None:
            return
        arrival.copied.synchronize()
        choice = arrival.choice
        tokens = choice.tokens.numpy().copy()
        heads = step.firsts[:-1]
        step.tokens = tokens[heads, None]
        if choice.log_probs is not None or step.context_logits:
            values = None if choice.log_probs is None else choice.log_probs.numpy()[heads, None]
            step.extras = Extras(values, context_logits=step.context_logits)
        if choice.best_tokens is not None and choice.best_log_probs is not None:
            best = choice.best_tokens.numpy(), choice.best_log_probs.numpy()
            step.beams = tuple(self._candidates(step, *best))
        # another sequence may have started in a line meanwhile
        own = arrival.is_single & (arrival.starts == self._num_starts[step.lines])
        own &= step.positions < self._tables.tokens.shape[1]
        self._tables.tokens[step.lines[own], step.positions[own]] = tokens[own]

    def _candidates(
        self, step: TorchStep, tokens: np.ndarray, log_probs: np.ndarray
    ) -> Iterator[BeamCandidates]:
        """Those of each row of several beams."""
        for row, first, end in zip(
            step.rows, step.firsts.tolist(), step.firsts[1:].tolist(), strict=False
        ):
            if row.beam_width > 1:
                count = min(2 * row.beam_width, self.model.spec.vocab_size)
                own = tokens[first:end, :count], log_probs[first:end, :count]
                yield BeamCandidates(*(tuple(map(tuple, part.tolist())) for part in own))
