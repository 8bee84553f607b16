"""`DeviceChooser`: the `TokenChooser` of a device, that nothing waits for before the result.

Decides what of a step's choice stays on the device and what travels to the host; kernels choose.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gptmanager.cuda.downloads import Arrival, Arrivals
from gptmanager.cuda.uploads import Staging
from gptmanager.decoding.device_sampling import MAX_CONTINUATIONS, Choice, DeviceSampler
from gptmanager.decoding.logits import PostProcessing
from gptmanager.executor.gathered_logits import GatheredLogits
from gptmanager.executor.sequence_tables import DeviceTables
from gptmanager.executor.step_in_flight import TorchStep, candidates, settle
from gptmanager.executor.token_chooser import TokenChooser
from gptmanager.step import Extras, SequenceStart


class _Arriving(NamedTuple):
    """A step's choice on its way to the host, and the logits that its rows want.

    Of its sequences those `is_single` have one beam; `starts`: what had started in their lines
    when it left. `counts` `[rows]`: candidates of each beam, 0: none is searched.
    """

    arrival: Arrival
    is_single: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    logits: tuple[tuple[int, Tensor], ...]  # by row


class DeviceChooser(TokenChooser):
    """Enqueues choices, whose tokens are the next inputs on the device.

    A step with guesses of which one can be verified only when the one before it is known is left
    to the host: those for rows with a logits post-processor, and those that a host has drawn.
    """

    def __init__(
        self,
        tables: DeviceTables,
        sampler: DeviceSampler,
        max_beam_width: int,
        outputs: GatheredLogits,
        processing: PostProcessing,
        *,
        staging: Staging,
        arrivals: Arrivals,
    ) -> None:
        super().__init__(tables, sampler, max_beam_width, outputs, processing)
        self._device_tables = tables
        self._device_sampler = sampler
        self._staging = staging
        self._arrivals = arrivals
        self._num_starts = np.zeros(len(tables.tokens), dtype=np.int64)

    def load(self, start: SequenceStart) -> None:
        super().load(start)
        self._num_starts[start.slot * self.max_beam_width] += 1

    def choose(self, step: TorchStep) -> None:
        counts = self._num_candidates[step.slots]
        if self._depends_on_order(step) or counts.max(initial=0) > MAX_CONTINUATIONS:
            self._choose_on_host(step)
            return
        logits = self._outputs.generation_logits(
            step.slots, step.firsts, step.logits, self._arrivals.bring
        )
        with torch.inference_mode():
            self._prepare(step)
            choice, is_single = self._enqueue(step, counts)
            arrival = self._arrivals.send(choice[1:])  # inputs stay
        starts = self._num_starts[step.lines]
        step.arrival = _Arriving(arrival, is_single, starts, counts, logits)
        self._forget_drawn(step)

    def receive(self, step: TorchStep) -> None:
        arriving: _Arriving | None
        arriving, step.arrival = step.arrival, None
        if arriving is None:
            return
        arriving.arrival.copied.synchronize()
        tokens, log_probs, *best = (
            None if tensor is None else tensor.numpy() for tensor in arriving.arrival.tensors
        )
        assert tokens is not None
        values = settle(step, tokens, log_probs)
        logits = tuple((row, own.clone()) for row, own in arriving.logits)
        if values is not None or logits or step.context_logits:
            step.extras = Extras(values, logits, step.context_logits)
        if not arriving.is_single.all():
            step.beams = candidates(step, arriving.counts, tokens, log_probs, *best)
        # another sequence may have started in a line meanwhile
        table = self._tables.tokens
        own = arriving.is_single & (arriving.starts == self._num_starts[step.lines])
        own &= step.positions < table.shape[1]
        table[step.lines[own], step.positions[own]] = np.maximum(tokens[own], 0)

    def _enqueue(self, step: TorchStep, counts: np.ndarray) -> tuple[Choice, np.ndarray]:
        """Choose for all S, `counts[row]` candidates; which belong to requests of one beam."""
        tables, upload = self._device_tables, self._staging.upload
        tables.flush(upload)  # the histories of beams that part here
        is_single, most = np.ones(len(step.lines), dtype=np.bool_), 0
        places = step.places
        if places is None:
            arrays = {
                "lines": step.lines.astype(np.int32),
                "positions": step.positions,
                "cells": tables.cells(step.lines, step.positions),
            }
            if self.max_beam_width > 1:
                widths = np.array([row.beam_width for row in step.rows], dtype=np.int64)
                num_beams = np.diff(step.firsts)
                widths = widths.repeat(num_beams)
                is_single = widths == 1
                arrays["cells"][~is_single] = tables.tokens.size  # a fork will bring them
                arrays["counts"] = counts.repeat(num_beams)
                most = int(counts.max(initial=0))
            places = upload(arrays)
        choice = self._device_sampler.enqueue(
            step.logits, places, step.lines, tables.token_tensor, upload, most
        )
        # behind a wrong guess they are overwritten before anything reads them
        tables.token_cells.index_copy_(0, places["cells"], choice.inputs)
        return choice, is_single

    def _choose_on_host(self, step: TorchStep) -> None:
        """Wait for the logits; the tokens go back to the device."""
        super().choose(step)
        tables = self._device_tables
        tables.flush(self._staging.upload)
        cells = tables.cells(step.lines, step.positions)
        fits = cells < tables.tokens.size
        tokens = tables.tokens[step.lines[fits], step.positions[fits]]
        sent = self._staging.upload({"cells": cells[fits], "tokens": tokens})
        tables.token_cells.index_copy_(0, sent["cells"], sent["tokens"])
        if step.context_logits:
            self._arrivals.send(()).copied.synchronize()
