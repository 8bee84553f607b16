"""`DeviceRunner`: launches packed rows on a device.

This module decides when a captured step (a CUDA graph) is replayed, and which arrays of a batch are
copied to the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from gptmanager.config import ProgressCallback
from gptmanager.cuda.device.downloads import Downloads
from gptmanager.cuda.device.graphs import GenerationGraphs
from gptmanager.cuda.device.launch import NAMES
from gptmanager.cuda.device.streams import Stream
from gptmanager.cuda.device.uploads import Array, Uploads
from gptmanager.executor.choice.prompt_scores import DevicePromptScorer, Scores
from gptmanager.executor.packed_rows import PackedRows, offsets, padded
from gptmanager.executor.runner import Computed, Runner, has_one_token_each
from gptmanager.executor.sequence_tables import DeviceTables
from gptmanager.executor.step_in_flight import ChoiceInputs
from gptmanager.memory.adapter_pool import AdapterPool
from gptmanager.memory.kv_pool import KvPool
from gptmanager.models.batch import Batch
from gptmanager.models.model import Model, PlanningModel
from gptmanager.statistics import Memory


class CapturedChooser(Protocol):
    """The part of `DeviceChooser` that captured steps need."""

    def is_plain(self, lines: Array) -> bool: ...

    def choose_captured(self, tokens: Tensor, logits: Tensor, inputs: ChoiceInputs) -> None: ...


class DeviceRunner(Runner):
    """Runs a model on `stream`; calls return before the work is done.

    Generation steps of a `PlanningModel` are captured in advance for each number of rows in
    `graph_sizes`. With an `adapter_pool` they are captured a second time, for rows with adapters. A
    step replays the smallest capture with enough rows. `has_beams`: whether sequences may have
    several beams. `chooser`: chooses the tokens at the end of a captured step, if its `is_plain` is
    true for the lines of the step; if it is None, captured steps end with the logits.
    `on_progress`: see `GenerationGraphs.record`.
    """

    stream: Stream
    tables: DeviceTables
    tokens_on_device = True

    def __init__(
        self,
        model: Model,
        kv_pool: KvPool,
        tables: DeviceTables,
        stream: Stream,
        uploads: Uploads,
        downloads: Downloads,
        *,
        adapter_pool: AdapterPool | None = None,
        graph_sizes: Sequence[int] = (),
        has_beams: bool = False,
        chooser: CapturedChooser | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> None:
        super().__init__(model, kv_pool, tables, adapter_pool)
        self.stream = stream
        self._uploads = uploads
        self._downloads = downloads
        self._has_beams = has_beams
        # with beams, tokens are also chosen for lines that are not rows of the batch
        self._chooser = None if has_beams else chooser
        self._planning = model if isinstance(model, PlanningModel) else None
        self._graph_sizes, self._on_progress = graph_sizes, on_progress
        self._device_scorer: DevicePromptScorer | None = None  # created on first use
        self._forget_graphs()
        self._record_graphs()

    def _forget_graphs(self) -> None:
        arguments = self.stream, self._uploads, self._graph_sizes
        self._graphs, self._adapter_graphs = (GenerationGraphs(*arguments) for _ in range(2))
        self._graph_logits: Tensor | None = None
        self._graph_tokens: Tensor | None = None

    def _record_graphs(self) -> None:
        if not self._graph_sizes or not self._plan(_idle_rows(1), fixed=True):
            return
        with torch.inference_mode():
            # the emulator keeps this callback: a strong reference would be a cycle
            own = weakref.proxy(self)
            self._graphs.record(
                lambda size: own._fixed_arrays(_idle_rows(size)),
                lambda tensors: own._step(tensors),
                self._on_progress,
            )
            if self.adapter_pool is not None:
                no_slots = np.full(max(self._graph_sizes), -1, dtype=np.int32)
                self._adapter_graphs.record(
                    lambda size: (no_slots[:size], *own._fixed_arrays(_idle_rows(size))),
                    lambda tensors: own._step(tensors[1:], tensors[0]),
                    self._on_progress,
                    "CUDA graphs with adapters",
                )

    def run(self, rows: PackedRows) -> Computed:
        self.tables.flush(self._uploads.upload)
        if has_one_token_each(rows):
            size = self._graphs.size_for(len(rows.lines))
            if size is not None:
                return self._replay(rows, size)
        return Computed(_for_kernels(self._launch(rows)))

    def to_cpu(self, logits: Tensor) -> Tensor:
        return self._downloads.fetch(logits.float())

    def score(self, logits: Tensor, targets: Array, count: int, normalized: bool) -> Scores:
        if self._device_scorer is None:
            place = self.stream.launcher, logits.device
            self._device_scorer = DevicePromptScorer(*place, logits.shape[1], self._uploads.upload)
        scores, ids = self._device_scorer.score(logits, targets, count, normalized=normalized)
        scores, ids = self._downloads.fetch(scores), self._downloads.fetch(ids)
        return scores[:, 0], scores[:, 1:], ids

    def relieve(self) -> None:
        self.stream.relieve()

    def catch_up(self) -> None:
        self.stream.catch_up()

    def release(self) -> None:
        with self.stream:
            self.stream.synchronize()
            self._forget_graphs()  # graphs contain addresses in the memory that is released
            super().release()
            self.stream.relieve()

    def restore(self) -> None:
        with self.stream:
            super().restore()
            self._record_graphs()
            self.stream.synchronize()

    @property
    def memory(self) -> Memory:
        adapters = 0 if self.adapter_pool is None else self.adapter_pool.nbytes
        tables = self.tables.token_cells.nbytes + self.tables.block_tensor.nbytes
        return Memory(
            cpu=self.tables.nbytes,
            gpu=self.model.nbytes + self.kv_pool.nbytes + tables + adapters,
            pinned=self._uploads.nbytes + self._downloads.nbytes + self.kv_pool.host_nbytes,
        )

    def run_largest(self, num_tokens: int, num_sampled: int) -> None:
        """Run prompts of `num_tokens` tokens in total, with logits for `num_sampled` of them.

        The prompts access only block 0 of the KV cache.
        """
        longest = self.tables.tokens.shape[1]
        counts = np.full(-(-num_tokens // longest), longest, dtype=np.int64)
        counts[-1] = num_tokens - counts[:-1].sum()
        ends = np.cumsum(counts)
        sampled = np.arange(num_tokens - min(num_sampled, num_tokens), num_tokens)
        rows = PackedRows(
            lines=np.zeros(len(counts), dtype=np.int64),
            row_starts=np.concatenate(([0], ends)).astype(np.int32),
            kv_lengths=counts.astype(np.int32),
            positions=offsets(counts),
            token_lines=np.zeros(num_tokens, dtype=np.int64),
            sample_index=sampled,
            sample_rows=np.searchsorted(ends, sampled, side="right"),
            num_context_rows=len(counts),
        )
        with self.stream, torch.inference_mode():
            self._launch(rows).float()  # some steps need this copy; see `DeviceChooser.choose`

    def run_captured(self, num_rows: int) -> None:
        """Run the step that is captured for `num_rows` rows, without access to any block."""
        if self._plan(_idle_rows(1), fixed=True):
            with self.stream, torch.inference_mode():
                self._step(self._uploads.upload(self._fixed_arrays(_idle_rows(num_rows))))

    def _replay(self, rows: PackedRows, size: int) -> Computed:
        num_rows, rows = len(rows.lines), padded(rows, size)
        chooses = self._chooser is not None and self._chooser.is_plain(rows.lines[:num_rows])
        arrays, slots = self._fixed_arrays(rows, chooses), self._adapters_of(rows)
        if slots is None:
            logits, tensors = self._graphs.run(size, arrays)
        else:
            logits, tensors = self._adapter_graphs.run(size, (slots, *arrays))
            tensors = tensors[1:]
        if self._has_beams:  # tokens are also chosen for lines that are not rows of the batch
            return Computed(logits[:num_rows])
        _, positions, cells, _, lines = (tensor[:num_rows] for tensor in tensors[:5])
        inputs = ChoiceInputs(lines, positions, cells)
        if chooses and self._graph_tokens is not None:
            inputs = inputs._replace(tokens=self._graph_tokens[:num_rows])
        return Computed(logits[:num_rows], inputs)

    def _step(self, tensors: Sequence[Tensor], adapter_slots: Tensor | None = None) -> Tensor:
        """Run the part of a generation step that is captured.

        All captured steps share one logits buffer and one token buffer. The first capture, which
        has the most rows, allocates the buffers in its trial run.

        The captured step contains the sampling that most steps need. Other sampling is launched
        separately, because its kernels, its copy of the logits and its downloads depend on the
        requests of a step. Then all lines of the captured sampling are -1, so it does nothing.
        """
        chosen, positions, cells, *others = tensors
        adapters = None
        if adapter_slots is not None and self.adapter_pool is not None:
            adapters = self.adapter_pool.step(adapter_slots)
        batch = self._batch(others, 0, adapters=adapters, all_sampled=True)
        logits = _for_kernels(self.model.forward(batch, self.kv_pool))
        if self._graph_logits is None or self._graph_tokens is None:
            self._graph_logits = torch.empty_like(logits)
            self._graph_tokens = torch.zeros_like(chosen)
        logits = self._graph_logits[: len(logits)].copy_(logits)
        if self._chooser is not None:
            tokens = self._graph_tokens[: len(logits)]
            inputs = ChoiceInputs(chosen, positions, cells)
            self._chooser.choose_captured(tokens, logits, inputs)
        return logits

    def _fixed_arrays(self, rows: PackedRows, chooses: bool = False) -> tuple[Array, ...]:
        """Return the inputs of a captured step, which are uploaded in one copy.

        They are the lines to choose tokens for, the positions and cells (indices into
        `DeviceTables.token_cells`) of these tokens, and the arrays of the batch.
        """
        positions = rows.positions + 1
        cells = self.tables.cells(rows.token_lines, positions)
        chosen = rows.token_lines.astype(np.int32)
        num_chosen = rows.row_starts[-1] if chooses else 0
        chosen[num_chosen:] = -1  # rows for which the captured step chooses no token
        arrays = super()._arrays(rows)
        return (chosen, positions, cells, *arrays, *self._plan(rows, fixed=True))

    def _arrays(self, rows: PackedRows) -> tuple[Array, ...]:
        return (*super()._arrays(rows), *self._plan(rows))

    def _inputs(self, rows: PackedRows) -> Array:
        """Return the cells of the tokens, int64 `[T]`; the CPU may not know the tokens yet."""
        cells = self.tables.cells(rows.token_lines, rows.positions)
        # padding reads the spare last cell: another cell may hold a virtual token, which has no
        # row in the embedding
        cells[rows.row_starts[-1] :] = self.tables.tokens.size
        return cells

    def _batch(self, tensors: Sequence[Tensor], num_context_rows: int, **given: Any) -> Batch:
        cells, *others = tensors
        token_ids = self.tables.token_cells.index_select(0, cells).long()
        return super()._batch((token_ids, *others), num_context_rows, **given)

    def upload(self, arrays: Sequence[Array]) -> Sequence[Tensor]:
        return self._uploads.upload(arrays)

    def _plan(self, rows: PackedRows, fixed: bool = False) -> tuple[Array, ...]:
        if self._planning is None:
            return ()
        return self._planning.plan(rows.row_starts, rows.kv_lengths, rows.num_context_rows, fixed)


def _for_kernels(logits: Tensor) -> Tensor:
    """Return the logits unchanged if the kernels support their dtype, otherwise as float32."""
    return logits if logits.dtype in NAMES else logits.float()


def _idle_rows(size: int) -> PackedRows:
    """Return a batch of `size` rows without tokens."""
    none, ends = np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int32)
    return padded(PackedRows(none, ends, ends[:0], none, none, none, none, 0), size)
