"""`draw`: draws a schedule as one SVG, in which rows are requests and columns are iterations.

At most `MAX_ROWS` requests of a `Trace` are drawn. `zoom_page` returns a page on which the SVG
can be zoomed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gptmanager.picture.layout import MARGIN, Layout, Look, lay_out, nice_step
from gptmanager.picture.load import draw_panel, panels
from gptmanager.picture.rows import DASHES, draw_row, row_names
from gptmanager.picture.svg import STYLE, element, label, number, path, rect
from gptmanager.picture.trace import Phase, Reason, Trace

MAX_ROWS = 2000  # browsers scroll slowly through more rows


def draw(trace: Trace, title: str = "") -> str:
    """Return a self-contained SVG that follows the reader's light or dark theme."""
    shown = shorten(trace)
    layout = layout_of(trace)
    parts = [
        f"<style>{STYLE}</style>",
        rect(0, 0, layout.full_width, layout.full_height, "paper", round_=8),
        label(MARGIN, MARGIN + 14, title or "Schedule", "title"),
        label(MARGIN, MARGIN + 34, _subtitle(trace), "faint"),
        *_legend(shown, layout),
        *_axis(shown, layout),
        *_rows(shown, layout),
    ]
    if shown.columns:
        for index, panel in enumerate(panels(shown)):
            parts += draw_panel(panel, index, layout)
    width, height = number(layout.full_width), number(layout.full_height)
    return element(
        "svg",
        *("\n" + part for part in parts),
        "\n",
        xmlns="http://www.w3.org/2000/svg",
        class_="picture" + " dense" * (layout.row <= 10) + " thin" * (layout.row < 4),
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
        role="img",
        aria_label=f"{title or 'Schedule'}. {_subtitle(trace)}",
    )


def shorten(trace: Trace) -> Trace:
    """Return the trace with only its first `MAX_ROWS` requests."""
    return replace(trace, rows=trace.rows[:MAX_ROWS])


def layout_of(trace: Trace) -> Layout:
    """Return the layout of the drawing of a trace."""
    return lay_out(shorten(trace), top=MARGIN + 84)


def _subtitle(trace: Trace) -> str:
    """Return a summary of the schedule in numbers."""
    bounds = trace.bounds
    pauses = sum(column.num_paused for column in trace.columns)
    texts = [bounds.policy] if bounds.policy else []
    requests, iterations = len(trace.rows), len(trace.columns)
    texts.append(f"{_count(requests, 'request')} in {_count(iterations, 'iteration')}")
    texts.append(_count(pauses, "pause"))
    texts.append(f"chunks of {bounds.chunk_unit}" if bounds.chunk_unit else "whole contexts")
    if len(trace.rows) > MAX_ROWS:
        texts.append(f"the first {MAX_ROWS} are drawn")
    return " \u00b7 ".join(texts)


def _count(number_of: int, noun: str) -> str:
    return f"{number_of} {noun}" if number_of == 1 else f"{number_of} {noun}s"


def _legend(trace: Trace, layout: Layout) -> Iterator[str]:
    """Yield the kinds of marks that occur, each with its name."""
    spans = {(s.phase, s.reason) for row in trace.rows for s in row.spans}
    phases = {phase for phase, _ in spans}
    x, y = float(MARGIN), MARGIN + 44.0
    names = {
        Phase.CONTEXT: "context (prompt)" if layout.look is Look.BARS else "context: prompt tokens",
        Phase.GENERATION: "generation",
    }
    for phase, name in names.items():
        if phase in phases:
            share = 0.84 if phase is Phase.CONTEXT else 0.6
            yield rect(x, y + 8 - 8 * share, 22, 16 * share, phase.value)
            yield label(x + 28, y + 12, name)
            x += 44 + 6.6 * len(name)
    lines = []
    if Phase.PAUSED in phases:
        lines.append(("paused", "paused", f"M{{}} {number(y + 5)}h26m-26 6h26"))
    waits = sorted({r for p, r in spans if p is Phase.WAITING}, key=lambda r: list(Reason).index(r))
    straight = f"M{{}} {number(y + 8)}h26"
    lines += [(f"waiting {DASHES[r]}".strip(), f"waits: {r.value}", straight) for r in waits]
    if Phase.HELD in phases:
        lines.append(("held", "not in this batch", straight))
    if any(row.end is not None for row in trace.rows):
        lines.append(("finish", "end", f"M{{}} {number(y)}v16"))
    for kind, name, commands in lines:
        yield path(commands.format(number(x)), kind)
        indent = 8 if kind == "finish" else 32
        yield label(x + indent, y + 12, name)
        x += indent + 16 + 6.6 * len(name)


def _axis(trace: Trace, layout: Layout) -> Iterator[str]:
    """Yield grid lines, their iteration numbers above and below the drawing, and captions."""
    bottom = layout.axis_y
    first = trace.first_iteration
    heights = (layout.top - 6, bottom + 16)
    ticks = []
    is_bars = layout.look is Look.BARS
    step, middle = (nice_step(layout.num_columns, 12), 0.0) if is_bars else (1, 0.5)
    for column in range(-first % step, layout.num_columns + 1, step):
        x = number(layout.x(column))
        ticks.append(path(f"M{x} {number(layout.top)}V{number(bottom)}", "grid"))
        if column + middle <= layout.num_columns:
            x_of_name = layout.x(column + middle)
            ticks += [label(x_of_name, y, str(first + column), "mid small faint") for y in heights]
    yield element("g", *ticks, class_="ticks")
    yield label(layout.left + layout.width / 2, bottom + 34, "iteration", "mid")
    yield label(MARGIN, layout.rows_top - 6, "prompt + output", "small faint")


def _rows(trace: Trace, layout: Layout) -> Iterator[str]:
    marks = [
        mark for index, row in enumerate(trace.rows) for mark in draw_row(trace, row, index, layout)
    ]
    yield from row_names(trace, layout)
    if layout.look is not Look.BARS:
        yield from marks
        return
    height = layout.row * layout.num_rows
    yield element(
        "svg",
        *("\n" + mark for mark in marks),
        class_="plot",
        x=layout.left,
        y=layout.rows_top,
        width=layout.width,
        height=height,
        viewBox=f"0 0 {layout.num_columns} {number(height)}",
        preserveAspectRatio="none",
    )
