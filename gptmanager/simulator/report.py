"""The report of `gptmanager simulate`, as text and as JSON values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from gptmanager.recorder.recording_file import Recording
from gptmanager.simulator.cost_model import CostModel
from gptmanager.simulator.figures import Figures, KvUse, Percentiles
from gptmanager.simulator.load import HostQueue
from gptmanager.terminal.tables import Piece, lines
from gptmanager.terminal.tables import table as table_of


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """Figures of several policies on one load.

    `wall_s` is the number of real seconds that the simulation took. If the load is not a recorded
    load, `recording` and `queue` are None. `queue` is also None unless the requests arrive at the
    times when they arrived in the host's queue.
    """

    figures: Mapping[str, Figures]  # by column name in the table
    cost: CostModel
    wall_s: float
    recording: Recording | None
    queue: HostQueue | None

    def plain(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        return {
            "cost": dataclasses.asdict(self.cost),
            "policies": {name: plain(it) for name, it in self.figures.items()},
            "recorded_makespan_s": None if self.recording is None else self.recording.duration_s,
            "wall_s": self.wall_s,
            "held_back": None if self.queue is None else self.queue.num_held,
            "longest_held_back_s": None if self.queue is None else self.queue.longest_s,
        }

    def parts(self) -> Iterator[Piece]:
        """Yield the comparison as tables and lines of text."""
        yield figures_table(self.figures)
        for name, it in self.figures.items():
            if it.failed:
                yield f"\n{name}: the first request that failed: {it.first_error}"
        numbers = dataclasses.asdict(self.cost).items()
        yield "\nseconds of a step: " + "  ".join(f"{name} {s:.3g}" for name, s in numbers)
        if self.recording is not None:
            yield f"the recorded run took {self.recording.duration_s:.3f} s"
        queue = self.queue
        if queue is not None and queue.num_held:
            yield (
                f"{queue.num_held:,} of {len(queue.arrivals):,} requests had waited in the host's "
                f"queue: they arrive up to {queue.longest_s:.3f} s before Get returned them "
                "(--arrivals time)"
            )
        steps = sum(it.request_steps for it in self.figures.values())
        each = f"{steps / self.wall_s:,.0f} a second"
        yield f"{steps:,} request-steps simulated in {self.wall_s:.1f} s ({each})"


def table(columns: Mapping[str, Figures]) -> str:
    """Return `figures_table` as text."""
    return "\n".join(lines([figures_table(columns)]))


def figures_table(columns: Mapping[str, Figures]) -> Table:
    """Return a table with a row for each figure and a column for each policy."""
    shown = [_shown(figures) for figures in columns.values()]
    rows = [(label, *(column[label] for column in shown)) for label in shown[0]]
    return table_of(("", *columns), rows, left=(0,))


def _shown(figures: Figures) -> dict[str, str]:
    return {
        "requests": f"{figures.requests:,}",
        "failed": f"{figures.failed:,}",
        "iterations": f"{figures.iterations:,}",
        "makespan s": f"{figures.makespan_s:,.3f}",
        "output tokens": f"{figures.output_tokens:,}",
        "output tokens/s": f"{figures.output_tokens_per_s:,.1f}",
        "first token p50 ms": _milliseconds(figures.ttft_s.p50),
        "first token p99 ms": _milliseconds(figures.ttft_s.p99),
        "per token p50 ms": _milliseconds(figures.per_token_s.p50),
        "per token p99 ms": _milliseconds(figures.per_token_s.p99),
        "mean batch": f"{figures.mean_batch:,.1f}",
        "largest batch": f"{figures.max_batch:,}",
        "KV blocks used, mean": f"{figures.kv_use.mean:.1%}",
        "KV blocks used, peak": f"{figures.kv_use.peak:.1%}",
        "pauses": f"{figures.pauses:,}",
        "recomputed tokens": f"{figures.recomputed_tokens:,}",
    }


def _milliseconds(seconds: float) -> str:
    return "-" if seconds != seconds else f"{seconds * 1000:,.2f}"


def plain(figures: Figures) -> dict[str, Any]:
    """Return the figures as JSON values. A figure with several numbers is an object."""
    named = {
        name: value._asdict() if isinstance(value, (Percentiles, KvUse)) else value
        for name, value in dataclasses.asdict(figures).items()
    }
    return {**named, "output_tokens_per_s": figures.output_tokens_per_s}
