"""The panels of a schedule's picture: batch, tokens and memory over the iterations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from gptmanager.picture.layout import PANEL, PANEL_STEP, Layout, Look
from gptmanager.picture.svg import element, label, number, path
from gptmanager.picture.trace import Trace


class Panel(NamedTuple):
    """A panel of stacked areas.

    `series` has (CSS class, one value per column) for each area, from the bottom up.
    """

    caption: str
    limit: int
    limit_name: str
    series: tuple[tuple[str, Sequence[int]], ...]


def panels(trace: Trace) -> tuple[Panel, ...]:
    """Return the panels of a trace: requests, tokens and blocks."""
    bounds, columns = trace.bounds, trace.columns
    generation = [column.num_generation for column in columns]
    return (
        Panel(
            "Requests in the batch",
            bounds.max_batch_size,
            "max_batch_size",
            (("generation", generation), ("context", [c.num_context for c in columns])),
        ),
        Panel(
            "Tokens computed",
            bounds.max_num_tokens,
            "max_num_tokens",
            (
                ("generation", [c.generation_tokens for c in columns]),
                ("context", [c.context_tokens for c in columns]),
            ),
        ),
        Panel(
            f"KV cache blocks in use ({bounds.tokens_per_block} tokens each)",
            bounds.num_blocks,
            "blocks of the pool",
            (("memory", [column.used_blocks for column in columns]),),
        ),
    )


def draw_panel(panel: Panel, index: int, layout: Layout) -> Iterator[str]:
    """Yield the SVG elements of a panel, which is the `index`-th from the top."""
    top = layout.panels_top + index * PANEL_STEP + 18
    totals = [sum(values) for values in zip(*(values for _, values in panel.series), strict=True)]
    peak = max(totals, default=0)
    # drawing a limit far above the peak would flatten the areas
    seen = panel.limit <= 4 * peak
    headroom = 1.08 if layout.look is Look.BARS else 1.35  # for the numbers on the columns
    height = max(1.0, headroom * max(peak, panel.limit if seen else 0))
    yield label(layout.left, top - 6, f"{panel.caption}; peak {peak}")
    where = "dashed line: " if seen else "above the scale: "
    words = f"{where}{panel.limit_name} = {panel.limit}"
    yield label(layout.left + layout.width, top - 6, words, "end faint small")
    yield label(layout.left - 6, top + PANEL, "0", "end faint small")
    mark = panel.limit if seen else peak
    yield label(
        layout.left - 6, top + PANEL * (1 - mark / height) + 4, str(mark), "end faint small"
    )
    yield element(
        "svg",
        *_areas(panel, height, layout),
        class_="plot",
        x=layout.left,
        y=top,
        width=layout.width,
        height=PANEL,
        viewBox=f"0 0 {layout.num_columns} {PANEL}",
        preserveAspectRatio="none",
    )
    yield path(f"M{number(layout.left)} {number(top + PANEL)}h{number(layout.width)}", "frame")
    if layout.look is not Look.BARS:
        for column, total in enumerate(totals):
            y = top + PANEL * (1 - total / height) - 4
            yield label(layout.x(column + 0.5), y, str(total), "mid small halo")


def _areas(panel: Panel, height: float, layout: Layout) -> Iterator[str]:
    floor = [0] * layout.num_columns
    for kind, values in panel.series:
        roof = [low + value for low, value in zip(floor, values, strict=False)]
        if any(values):
            yield path(_area(floor, roof, height), kind)
        floor = roof
    if panel.limit <= height:
        y = number(PANEL * (1 - panel.limit / height))
        yield path(f"M0 {y}H{layout.num_columns}", "limit")


def _area(floor: Sequence[int], roof: Sequence[int], height: float) -> str:
    """Return the path of the area between two step curves, a rectangle per run of equal values."""

    def y(value: int) -> str:
        return number(PANEL * (1 - value / height))

    commands = []
    begin = 0
    for (low, high), run in groupby(zip(floor, roof, strict=False)):
        end = begin + sum(1 for _ in run)
        if high > low:
            commands.append(f"M{begin} {y(low)}V{y(high)}H{end}V{y(low)}Z")
        begin = end
    return "".join(commands)
