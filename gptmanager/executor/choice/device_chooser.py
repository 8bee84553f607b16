"""`DeviceChooser`: the `TokenChooser` that works on a device.

`choose` usually only enqueues kernels, which choose the tokens, and returns a function that waits
for the tokens. This module decides which results stay on the device and which are downloaded.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gptmanager.cuda.device.downloads import Downloads
from gptmanager.cuda.device.uploads import Uploads
from gptmanager.decoding.lines import Lines
from gptmanager.decoding.processors.logits import PostProcessing
from gptmanager.decoding.sampling.device_sampling import MAX_CONTINUATIONS, Choice, DeviceSampler
from gptmanager.executor.choice.token_chooser import TokenChooser
from gptmanager.executor.choice.top_tokens import TopTokens
from gptmanager.executor.sequence_tables import DeviceTables
from gptmanager.executor.step_in_flight import (
    ChoiceInputs,
    ChosenTokens,
    PendingTokens,
    SamplingRows,
    StepInFlight,
    candidates,
)
from gptmanager.step import BeamCandidates, SequenceStart


class DeviceChooser(TokenChooser):
    """Enqueues the kernels that choose a step's tokens.

    The tokens are written to the inputs of the next step without leaving the device. The tokens of
    a step are chosen on the CPU if a beam needs more than MAX_CONTINUATIONS candidates, or if
    drafts must be verified one by one. Drafts must be verified one by one if their request has a
    logits post-processor, or if the host has passed the logits from which it sampled them. A
    line is the index of a sequence, or of one of its beams, in the tables; see `Lines`.
    """

    _tables: DeviceTables
    _sampler: DeviceSampler

    def __init__(
        self,
        lines: Lines,
        tables: DeviceTables,
        sampler: DeviceSampler,
        processing: PostProcessing,
        *,
        uploads: Uploads,
        downloads: Downloads,
    ) -> None:
        super().__init__(lines, tables, sampler, processing)
        self._uploads = uploads
        self._downloads = downloads
        self._num_starts = np.zeros(lines.count, dtype=np.int64)

    def load(self, start: SequenceStart) -> None:
        super().load(start)
        self._num_starts[self.lines.of(start.slot)] += 1

    def is_plain(self, lines: np.ndarray) -> bool:
        """Return whether `choose_captured` can choose the tokens of these lines.

        Returns False if a request has a logits post-processor, asks for logits, or has a draft with
        logits for its next token. Otherwise uploads the sampling parameters that have changed,
        because the captured step reads them. There must be no beams, so that each line is also a
        slot.
        """
        slots = lines
        if self._processing.serves(slots) or self.gathered.wants_logits(slots):
            return False
        if self._drawn.by_slot and self._drawn.has_any(slots):
            return False
        self._sampler.flush(self._uploads.upload)
        return self._sampler.is_plain(lines)

    def choose_captured(self, tokens: Tensor, logits: Tensor, inputs: ChoiceInputs) -> None:
        """Enqueue the choice of one token for each of `inputs.lines`, without beams.

        The tokens are written to `tokens` and to `inputs.cells`. A line or a cell of -1 is skipped.
        """
        places = inputs.lines, inputs.positions, inputs.cells
        self._sampler.sample_there(tokens, self._tables.token_cells, logits, *places)

    def choose(self, step: StepInFlight) -> PendingTokens:
        if step.inputs is not None and step.inputs.tokens is not None:
            return self._download(step.rows, step.inputs.tokens)
        rows = step.rows
        counts = self._num_candidates[rows.slots]
        if self._depends_on_order(rows) or counts.max(initial=0) > MAX_CONTINUATIONS:
            return self._choose_on_cpu(step)
        logits = step.logits
        raw: tuple[tuple[int, Tensor], ...] = ()
        if self.gathered.any_generation or self._processing.sequences:
            with torch.inference_mode():
                logits = logits.float()  # the dtype of post-processors and of returned logits
        if self.gathered.any_generation:
            raw = self.gathered.generation_logits(
                rows.slots, rows.firsts, logits, self._downloads.fetch
            )
        with torch.inference_mode():
            rows, logits, failed = self._prepare(rows, logits)
            top = self._top_tokens(rows)
            choice, is_single = self._enqueue(rows, logits, step.inputs, counts, top)
            download = self._downloads.send(choice)
        starts = self._num_starts[rows.lines]

        def receive() -> ChosenTokens:
            download.copied.synchronize()
            tokens, log_probs, *best = (  # None for outputs that were not requested
                None if tensor is None else tensor.numpy() for tensor in download.tensors
            )
            assert tokens is not None
            if log_probs is not None:
                if top is not None:
                    is_searched = counts.repeat(np.diff(rows.firsts)) > 0
                    _put(top, log_probs[:, 1:], is_searched, best[0], best[1])
                log_probs = log_probs[:, 0]
            beams: tuple[BeamCandidates, ...] = ()
            if not is_single.all():
                beams = candidates(rows, counts, tokens, log_probs, *best)
            # A line is skipped if another sequence has started in it since this step.
            self._write(rows, tokens, is_single & (starts == self._num_starts[rows.lines]))
            pieces = tuple((row, pinned.clone()) for row, pinned in raw)
            found = self._by_row(rows, tokens, log_probs)
            ranked = () if top is None else top.by_row()
            return ChosenTokens(*found, beams, failed, pieces, ranked)

        return receive

    def _download(self, rows: SamplingRows, chosen: Tensor) -> PendingTokens:
        """Download the tokens that `choose_captured` has chosen."""
        with torch.inference_mode():
            download = self._downloads.send((chosen,))
        starts = self._num_starts[rows.lines]

        def receive() -> ChosenTokens:
            download.copied.synchronize()
            (pinned,) = download.tensors
            assert pinned is not None
            tokens = pinned.numpy()
            self._write(rows, tokens, starts == self._num_starts[rows.lines])
            return ChosenTokens(*self._by_row(rows, tokens, None))

        return receive

    def _enqueue(
        self,
        rows: SamplingRows,
        logits: Tensor,
        inputs: ChoiceInputs | None,
        counts: np.ndarray,
        top: TopTokens | None,
    ) -> tuple[Choice, np.ndarray]:
        """Enqueue the choice of S tokens, with `counts[row]` candidates for each beam of a row.

        Returns the results on the device, and a mask `[S]` of the tokens of rows with one beam.
        """
        most_top = most = 0
        if top is not None or self.lines.max_beam_width > 1:
            each = counts.repeat(np.diff(rows.firsts))
            if top is not None:
                each, most_top = np.maximum(each, top.wanted), top.most
            most = int(each.max(initial=0))
        tables, upload = self._tables, self._uploads.upload
        tables.flush(upload)  # uploads the histories of beams that `_prepare` has forked
        is_single = np.ones(len(rows.lines), dtype=np.bool_)
        if inputs is None:
            cells = tables.cells(rows.lines, rows.positions)
            arrays = [rows.lines.astype(np.int32), rows.positions, cells]
            if self.lines.max_beam_width > 1:
                widths = np.array([row.beam_width for row in rows.rows], dtype=np.int64)
                is_single = widths.repeat(np.diff(rows.firsts)) == 1
                cells[~is_single] = -1  # the next beam fork writes the tokens of beams
            if most:
                arrays.append(each)
            inputs = ChoiceInputs(*upload(arrays))
        elif most:
            inputs = inputs._replace(counts=upload((each,))[0])
        # choices after a wrong draft are overwritten before anything reads them
        choice = self._sampler.enqueue(
            *(logits, rows.lines, *inputs[:4], most, most_top),
            *(tables.token_tensor, tables.token_cells, upload),
        )
        return choice, is_single

    def _choose_on_cpu(self, step: StepInFlight) -> PendingTokens:
        """Wait for the logits, choose on the CPU, and copy the tokens back to the device."""
        step.logits = step.logits.float()
        pending = super().choose(step)
        tables, upload, rows = self._tables, self._uploads.upload, step.rows
        tables.flush(upload)
        cells = tables.cells(rows.lines, rows.positions)
        fits = cells >= 0
        tokens = tables.tokens[rows.lines[fits], rows.positions[fits]]
        tables.token_cells.index_copy_(0, *upload((cells[fits], tokens)))
        if step.context_logits or step.prompt_log_probs:
            self._downloads.send(()).copied.synchronize()
        return pending


def _put(
    top: TopTokens,
    log_probs: np.ndarray,
    is_searched: np.ndarray,
    best_tokens: np.ndarray | None,
    best_log_probs: np.ndarray | None,
) -> None:
    """Store the top tokens and their log probabilities in `top`.

    For searched beams (`is_searched` `[S]`), the log probabilities are the scores by which the
    search ranks tokens.
    """
    assert best_tokens is not None and best_log_probs is not None
    ids = best_tokens[:, : top.most]
    searched = best_log_probs[:, : top.most]
    log_probs = np.where(is_searched[:, None], searched, log_probs)
    log_probs[ids < 0] = -np.inf  # beyond the number that the row asks for
    # the kernel ranks by log probabilities of lower precision
    order = np.lexsort((np.where(ids < 0, np.iinfo(np.int32).max, ids), -log_probs))
    ranked = (np.take_along_axis(array, order, 1) for array in (log_probs, ids))
    top.put(np.arange(len(ids)), *ranked)
