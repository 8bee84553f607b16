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
from gptmanager.cuda.device.launch import NAMES
from gptmanager.cuda.device.streams import Stream
from gptmanager.cuda.device.uploads import Array, Uploads
from gptmanager.executor.captured_steps import CapturedSteps
from gptmanager.executor.choice.prompt_scores import DevicePromptScorer, Scores
from gptmanager.executor.packed_rows import PackedRows, StepShape, fitted, offsets, padded
from gptmanager.executor.runner import Computed, Runner, has_one_token_each
from gptmanager.executor.sequence_tables import DeviceTables
from gptmanager.executor.step_in_flight import ChoiceInputs
from gptmanager.memory.adapter_pool import AdapterPool
from gptmanager.memory.kv_pool import KvPool
from gptmanager.models.batch import Batch
from gptmanager.models.model import Model, PlanningModel
from gptmanager.statistics import Memory

_TOKENS = 4  # index of the first array of `_fixed_arrays` with an element for each token


class CapturedChooser(Protocol):
    """The part of `DeviceChooser` that captured steps need."""

    def is_plain(self, lines: Array) -> bool: ...

    def choose_captured(self, tokens: Tensor, logits: Tensor, inputs: ChoiceInputs) -> None: ...


class DeviceRunner(Runner):
    """Runs a model on `stream`; `run` returns before the work is done.

    Generation steps of a `PlanningModel` are captured in advance for each number of rows in
    `graph_sizes`, and other steps for each of `shapes`. With an `adapter_pool` they are captured a
    second time, for rows with adapters. A step replays the smallest capture with enough tokens.
    `has_beams`: whether sequences may have several beams. `chooser`: chooses the tokens at the end
    of a captured step if its `is_plain` returns True for the lines of the step. Without a
    `chooser`, or with `has_beams`, captured steps end with the logits. `on_progress`: see
    `StepGraphs.record`.
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
        shapes: Sequence[StepShape] = (),
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
        self._shapes = {shape.tokens: shape for shape in shapes}
        self._device_scorer: DevicePromptScorer | None = None  # created on first use
        self._forget_graphs()
        self._record_graphs()

    def _forget_graphs(self) -> None:
        place = self.stream, self._uploads
        self._generation_steps = CapturedSteps(*place, self._graph_sizes)
        self._mixed_steps = CapturedSteps(*place, tuple(self._shapes))
        self._graph_logits: Tensor | None = None
        self._graph_tokens: Tensor | None = None

    def _record_graphs(self) -> None:
        if not self._graph_sizes or not self._has_fixed_plan(1):
            return
        # the emulator keeps these callbacks: a strong reference would be a cycle
        own, shapes = weakref.proxy(self), self._shapes
        rest = self.adapter_pool is not None, self._on_progress
        with torch.inference_mode():
            # the largest first: the others reuse its memory
            if all(map(self._has_fixed_plan, shapes.values())):
                self._mixed_steps.record(
                    lambda size: own._fixed_arrays(_idle_rows(shapes[size])),
                    lambda tensors, slots: own._step(tensors, slots, shapes[len(tensors[_TOKENS])]),
                    *(*rest, "CUDA graphs of mixed steps"),
                )
            self._generation_steps.record(
                lambda size: own._fixed_arrays(_idle_rows(size)),
                lambda tensors, slots: own._step(tensors, slots),
                *(*rest, "CUDA graphs"),
            )

    def run(self, rows: PackedRows) -> Computed:
        self.tables.flush(self._uploads.upload)
        steps, fixed = self._generation_steps, None
        if has_one_token_each(rows):
            size = steps.size_for(len(rows.lines))
            fixed = None if size is None else padded(rows, size)
        else:
            steps, fixed = self._mixed_steps, self._fitted(rows)
        if fixed is not None:
            return self._replay(steps, fixed, len(rows.sample_index))
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
            self._forget_graphs()  # the weights may have new addresses, even if this pool has not
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
            adapter_page=self._adapter_page_bytes,
        )

    def run_largest(self, num_tokens: int, num_sampled: int) -> None:
        """Run prompts of `num_tokens` tokens in total, with logits of the last `num_sampled`.

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

    def run_captured(self, num_rows: int, shapes: Sequence[StepShape] = ()) -> None:
        """Run, without graphs, each step that is captured for `num_rows` rows and for `shapes`.

        The rows have no tokens, so they access no block.
        """
        if self._has_fixed_plan(1):
            with self.stream, torch.inference_mode():
                self._step(self._uploads.upload(self._fixed_arrays(_idle_rows(num_rows))))
                for shape in filter(self._has_fixed_plan, shapes):
                    arrays = self._fixed_arrays(_idle_rows(shape))
                    self._step(self._uploads.upload(arrays), None, shape)

    def _fitted(self, rows: PackedRows) -> PackedRows | None:
        """Return the rows padded for a captured step; None if they fit no captured step."""
        size = self._mixed_steps.size_for(int(rows.row_starts[-1]))
        if size is None or rows.samples_prompts or self._has_virtual_tokens(rows):
            return None
        return fitted(rows, self._shapes[size])

    def _replay(self, steps: CapturedSteps, rows: PackedRows, num_samples: int) -> Computed:
        """Run padded rows, and return their first `num_samples` samples."""
        own = slice(num_samples)
        # A row with drafts has several samples, of which those after the first wrong draft are
        # discarded. A captured step chooses tokens only if each row has one sample.
        is_single = bool((np.diff(rows.sample_rows[own]) > 0).all())
        lines = rows.token_lines[rows.sample_index[own]]
        chooses = self._chooser is not None and is_single and self._chooser.is_plain(lines)
        arrays = self._fixed_arrays(rows, num_samples if chooses else 0)
        logits, tensors = steps.run(len(rows.positions), arrays, self._adapters_of(rows))
        if self._has_beams:  # tokens are also chosen for lines that are not in the batch
            return Computed(logits[own])
        inputs = ChoiceInputs(*(tensor[own] for tensor in tensors[1:_TOKENS]))
        if chooses and self._graph_tokens is not None:
            inputs = inputs._replace(tokens=self._graph_tokens[own])
        return Computed(logits[own], inputs)

    def _step(
        self,
        tensors: Sequence[Tensor],
        adapter_slots: Tensor | None = None,
        shape: StepShape | None = None,
    ) -> Tensor:
        """Run the part of a step that is captured. `shape`: None for a generation step.

        All captured steps share one logits buffer and one token buffer. Each buffer has as many
        rows as the largest captured step has samples. The first trial run allocates the buffers.

        The captured step contains the sampling that most steps need. Other sampling is launched
        after the replay, because its kernels, its copy of the logits and its downloads depend on
        the requests of the step. For a step with other sampling, all lines of the captured sampling
        are -1, so that the captured sampling does nothing.
        """
        chosen, _, positions, cells, *others = tensors
        adapters = None
        if adapter_slots is not None and self.adapter_pool is not None:
            adapters = self.adapter_pool.step(adapter_slots)
        num_long = 0 if shape is None else shape.long_rows
        batch = self._batch(others, num_long, adapters=adapters, all_sampled=shape is None)
        logits = _for_kernels(self.model.forward(batch, self.kv_pool))
        if self._graph_logits is None or self._graph_tokens is None:
            samples = (shape.samples for shape in self._shapes.values())
            most = max([len(logits), *self._graph_sizes, *samples])
            self._graph_logits = logits.new_empty(most, logits.shape[1])
            self._graph_tokens = chosen.new_zeros(most)
        logits = self._graph_logits[: len(logits)].copy_(logits)
        if self._chooser is not None:
            tokens = self._graph_tokens[: len(logits)]
            inputs = ChoiceInputs(chosen, positions, cells)
            self._chooser.choose_captured(tokens, logits, inputs)
        return logits

    def _fixed_arrays(self, rows: PackedRows, num_chosen: int = 0) -> tuple[Array, ...]:
        """Return the inputs of a captured step, which are uploaded in one copy.

        In this order:

        - the lines for which the captured step chooses tokens: the line of each of the first
          `num_chosen` samples, and -1 for the other samples
        - for the token that follows each sample: the line, the position, and the cell (see
          `DeviceTables.cells`), in three arrays
        - the arrays of the batch
        - the model's plan
        """
        lines, positions = (it[rows.sample_index] for it in (rows.token_lines, rows.positions + 1))
        cells = self.tables.cells(lines, positions)
        lines = lines.astype(np.int32)
        chosen = np.where(np.arange(len(lines)) < num_chosen, lines, np.int32(-1))
        arrays = super()._arrays(rows)
        return (chosen, lines, positions, cells, *arrays, *self._plan(rows, len(rows.positions)))

    def _arrays(self, rows: PackedRows) -> tuple[Array, ...]:
        return (*super()._arrays(rows), *self._plan(rows))

    def _inputs(self, rows: PackedRows) -> Array:
        """Return the cells of the tokens, int64 `[T]`; the CPU may not know the tokens yet."""
        cells = self.tables.cells(rows.token_lines, rows.positions)
        # padding reads the 0 at the end: a cell may hold a virtual token, which has no row in the
        # embedding
        cells[rows.row_starts[-1] :] = self.tables.tokens.size
        return cells

    def _batch(self, tensors: Sequence[Tensor], num_context_rows: int, **given: Any) -> Batch:
        cells, *others = tensors
        token_ids = self.tables.token_cells.index_select(0, cells).long()
        return super()._batch((token_ids, *others), num_context_rows, **given)

    def upload(self, arrays: Sequence[Array]) -> Sequence[Tensor]:
        return self._uploads.upload(arrays)

    def _has_fixed_plan(self, size: int | StepShape) -> bool:
        """Return whether the model has a plan for captured steps with `size` (rows, or a shape)."""
        rows = _idle_rows(size)
        return bool(self._plan(rows, len(rows.positions)))

    def _plan(self, rows: PackedRows, fixed: int = 0) -> tuple[Array, ...]:
        if self._planning is None:
            return ()
        return self._planning.plan(rows.row_starts, rows.kv_lengths, rows.num_context_rows, fixed)


def _for_kernels(logits: Tensor) -> Tensor:
    """Return the logits unchanged if the kernels support their dtype, otherwise as float32."""
    return logits if logits.dtype in NAMES else logits.float()


def _idle_rows(size: int | StepShape) -> PackedRows:
    """Return a batch without tokens, with `size` rows or, if `size` is a shape, of this shape."""
    none, ends = np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int32)
    rows = PackedRows(none, ends, ends[:0], none, none, none, none, 0)
    if isinstance(size, int):
        return padded(rows, size)
    idle = fitted(rows, size)
    assert idle is not None
    return idle
