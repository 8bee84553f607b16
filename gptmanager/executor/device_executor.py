"""`DeviceExecutor`: a step enqueued on a device, whose tokens arrive while the next one runs.

Decides what stays on the device between steps: sequences' tokens, block tables and parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gptmanager.config import ProgressCallback
from gptmanager.cuda.downloads import Arrivals
from gptmanager.cuda.graphs import GenerationGraphs
from gptmanager.cuda.streams import Stream
from gptmanager.cuda.uploads import Staging
from gptmanager.decoding.device_sampling import DeviceSampler
from gptmanager.decoding.logits import PostProcessing
from gptmanager.executor.device_chooser import DeviceChooser
from gptmanager.executor.packed_rows import PackedRows, padded
from gptmanager.executor.sequence_tables import DeviceTables
from gptmanager.executor.step_in_flight import TorchStep
from gptmanager.executor.torch_executor import TorchExecutor
from gptmanager.memory.kv_pool import KvPool
from gptmanager.models.batch import Batch
from gptmanager.models.model import Model, PlanningModel
from gptmanager.statistics import Memory
from gptmanager.step import Schedule, StepResult


class DeviceExecutor(TorchExecutor):
    """Runs schedules on `stream`. `graph_sizes`: numbers of rows for which a generation step of a
    `PlanningModel` is recorded at the start; steps of so many rows at most run as a recording.

    Nothing waits for the device before `result`, but where the `DeviceChooser` says so.
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
        on_progress: ProgressCallback | None = None,
        **options: Any,
    ) -> None:
        self._stream = stream
        self._staging = Staging(stream)
        # of each line a token, and its log probability
        self._arrivals = Arrivals(stream, 8 * num_slots * max_beam_width)
        self._places: Mapping[str, Tensor] = {}  # of a recording's rows
        self._planning = model if isinstance(model, PlanningModel) else None
        with stream:
            super().__init__(
                model, kv_pool, num_slots=num_slots, max_beam_width=max_beam_width, **options
            )
            self._graphs = GenerationGraphs(stream, self._staging, graph_sizes)
            if graph_sizes and any(name.startswith("plan") for name in self._idle_arrays(1)):
                shape = (max(graph_sizes), model.spec.vocab_size)
                self._graph_logits = torch.empty(shape, device=stream.device)
                with torch.inference_mode():
                    # a recording of the emulator runs it again, and would hold its owner
                    own = weakref.proxy(self)
                    self._graphs.record(
                        self._idle_arrays, lambda tensors: own._step(tensors), on_progress
                    )
            stream.synchronize()

    def forward(self, schedule: Schedule) -> TorchStep:
        self._places = {}
        with self._stream:
            step = super().forward(schedule)
        if self._places and len(self._places["lines"]) == len(step.lines):
            step.places = self._places  # the whole step was one recording
        return step

    def sample(self, step: TorchStep) -> None:
        with self._stream:
            super().sample(step)

    def result(self, step: TorchStep) -> StepResult:
        with self._stream:
            return super().result(step)

    @property
    def memory(self) -> Memory:
        return Memory(
            cpu=self._tables.nbytes,
            gpu=self.model.nbytes + self.kv_pool.nbytes + self._device_tables.device_nbytes,
            pinned=self._staging.nbytes + self._arrivals.nbytes + self.kv_pool.host_nbytes,
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

    def _new_chooser(self, processing: PostProcessing) -> DeviceChooser:
        tables, stream = self._device_tables, self._stream
        sampler = DeviceSampler(
            *(len(tables.tokens), self.model.spec.vocab_size, tables.tokens),
            *(stream.launcher, stream.device),
        )
        return DeviceChooser(
            *(tables, sampler, self.max_beam_width, self._outputs, processing),
            staging=self._staging,
            arrivals=self._arrivals,
        )

    def _bring(self, logits: Tensor) -> Tensor:
        return self._arrivals.bring(logits)

    def _load(self, schedule: Schedule) -> None:
        super()._load(schedule)
        self._device_tables.flush(self._staging.upload)

    # The model -------------------------------------------------------------------------------

    def _compute(self, rows: PackedRows) -> Tensor:
        num_rows = len(rows.lines)
        if rows.num_context_rows == 0 and len(rows.sample_index) == rows.row_starts[-1] == num_rows:
            size = self._graphs.size_for(num_rows)
            if size is not None:
                arrays = self._arrays(padded(rows, size), fixed=True)
                logits, inputs = self._graphs.run(size, arrays)
                if self.max_beam_width == 1:
                    names = {"lines": "slots", "positions": "next positions", "cells": "next cells"}
                    self._places = {name: inputs[own][:num_rows] for name, own in names.items()}
                return logits[:num_rows]
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
        sent = self._staging.upload({"places": places.numpy(), "embeddings": embeddings.numpy()})
        places, embeddings = sent["places"], sent["embeddings"]
        batch.token_ids.index_fill_(0, places, 0)
        return replace(batch, prompt_index=places, prompt_embeddings=embeddings)

    def _arrays(self, rows: PackedRows, fixed: bool = False) -> dict[str, np.ndarray]:
        """What the device gets of a batch."""
        places = self._device_tables.cells(rows.token_lines, rows.positions)
        # padding reads nobody's cell: a sequence may begin with a virtual token
        places[rows.row_starts[-1] :] = self._tables.tokens.size
        arrays = {
            "places": places,
            "positions": rows.positions,
            "row_starts": rows.row_starts,
            "kv_lengths": rows.kv_lengths,
            "slots": rows.lines.astype(np.int32),
            "sample_index": rows.sample_index,
            "sample_rows": rows.sample_rows,
        }
        if fixed:  # and for the choice that follows
            arrays["next positions"] = rows.positions + 1
            arrays["next cells"] = self._device_tables.cells(rows.token_lines, rows.positions + 1)
        if self._planning is not None:
            numbers = rows.row_starts, rows.kv_lengths, rows.num_context_rows
            for number, array in enumerate(self._planning.plan(*numbers, fixed)):
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
        """What is recorded: a step without context rows. All recordings share their logits, which
        the copy widens to float32.
        """
        batch = replace(self._tensors_batch(tensors, 0), all_sampled=True)
        return self._graph_logits[: len(batch.slots)].copy_(self.model.forward(batch, self.kv_pool))

    def _idle_arrays(self, size: int) -> dict[str, np.ndarray]:
        """A batch of so many rows, none of which has a token."""
        none = np.zeros(0, dtype=np.int64)
        lengths = np.zeros(0, dtype=np.int32)
        rows = PackedRows(
            none, np.zeros(1, dtype=np.int32), lengths, none, none, none, none, num_context_rows=0
        )
        return self._arrays(padded(rows, size), fixed=True)
