"""`BatchSplitter`: runs a batch that exceeds memory in parts, and reports rows that never fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from gptmanager.decoding.lines import Lines
from gptmanager.errors import CapacityError
from gptmanager.executor.packed_rows import PackedRows, halves
from gptmanager.executor.runner import Computed
from gptmanager.lifecycle.log import logger
from gptmanager.step import Failure, Schedule


class BatchSplitter:
    """Runs a batch that does not fit into memory as two halves, which may be split again.

    It logs a warning for the 1st, 2nd, 4th, 8th ... batch that is split. `vocab_size`: the number
    of logits per token. `device`: the device of the logits.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._count = 0

    def run(self, rows: PackedRows, reason: str, run: Callable[[PackedRows], Computed]) -> Computed:
        """Run the rows in parts with `run`, and join the results.

        `reason`: the error of the whole batch. If `rows` is a single token, it cannot be split: the
        logits of the token are NaN, and `Computed.lost` has its line and `reason`.
        """
        parts = halves(rows)
        if not parts:
            shape = len(rows.sample_index), self._vocab_size
            nothing = torch.full(shape, torch.nan, device=self._device)
            return Computed(nothing, lost=((int(rows.lines[0]), reason),))
        self._count += 1
        if self._count & (self._count - 1) == 0:
            logger.warning(
                "a batch of %d sequences and %d tokens does not fit into memory and runs in parts; "
                "this is batch %d that was split (lower max_num_tokens or max_batch_size): %s",
                *(len(rows.lines), rows.row_starts[-1], self._count, reason),
            )
        results = []
        for part, _ in parts:
            computed = run(part)
            # copied, because captured steps write their logits to the same memory
            results.append(computed._replace(logits=computed.logits.clone()))
        whole = joined(results)
        order = np.argsort(np.concatenate([samples for _, samples in parts]))
        return whole._replace(logits=whole.logits[torch.from_numpy(order)])


def joined(results: Sequence[Computed]) -> Computed:
    """Concatenate the results of batches that ran one after the other, without their `inputs`."""
    lost = tuple(line for computed in results for line in computed.lost)
    return Computed(torch.cat([computed.logits for computed in results]), lost=lost)


def failures(lines: Lines, schedule: Schedule, computed: Computed) -> tuple[Failure, ...]:
    """Return a failure for each request with a row that could not be computed."""
    reasons = {lines.slot_of(line): reason for line, reason in computed.lost}
    return tuple(
        Failure(row.request_id, CapacityError(f"no memory for one token: {reasons[row.slot]}"))
        for row in schedule.rows
        if row.slot in reasons
    )
