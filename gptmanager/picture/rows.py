"""The rows of a schedule's picture, one for each request.

A context is drawn as a full bar, generation as a thinner bar, a pause as two parallel lines, and
waiting as one thin line with dashes that depend on the reason.
"""

from __future__ import annotations

from collections.abc import Iterator

from gptmanager.picture.layout import SQUARE, Layout, Look, nice_step
from gptmanager.picture.svg import label, number, path, rect
from gptmanager.picture.trace import Phase, Reason, RequestRow, Span, Trace

DASHES = {
    Reason.NONE: "",
    Reason.BLOCKS: "",
    Reason.TOKENS: "tokens",
    Reason.BATCH: "batch",
    Reason.STATIC: "static",
    Reason.OTHER: "other",
}


def draw_row(trace: Trace, row: RequestRow, index: int, layout: Layout) -> Iterator[str]:
    """Yield the marks of a row.

    Coordinates are in pixels of the picture, except in the look BARS. Bars are drawn in a scaled
    plot: their x counts columns, and their y counts pixels from the top of the first row.
    """
    y = layout.row_y(index)
    if layout.look is Look.BARS:
        for span in _joined(row.spans):
            yield _bar(trace, row, span, index * layout.row, layout.row)
        if row.end is not None:
            yield _finish(row, row.end, index * layout.row, layout.row)
        return
    for span in row.spans:
        for column in range(span.begin, span.end):
            cell = span._replace(begin=column, end=column + 1)
            if span.phase is Phase.GENERATION and span.end - span.begin > 1:
                cell = cell._replace(position=span.position + column - span.begin, num_tokens=1)
            if layout.look is Look.TOKENS:
                yield from _squares(trace, row, cell, y, layout)
            else:
                yield from _cell(trace, row, cell, y, layout)
    if row.end is not None:
        yield _finish(row, layout.x(row.end) - 2, y + 3, layout.row - 6)


def row_names(trace: Trace, layout: Layout) -> Iterator[str]:
    """Yield the names of all rows, or of every n-th row if space is short."""
    step = nice_step(len(trace.rows), int(layout.row * len(trace.rows) / 13) or 1)
    for index, row in enumerate(trace.rows):
        if index % step == 0:
            y = layout.row_y(index) + layout.row / 2 + 4
            yield label(layout.left - 62, y, _name(row.request_id), "end")
            known = row.max_new_tokens > 0  # 0 if the request arrived before the first column
            lengths = f"{row.prompt_len}+{row.max_new_tokens}" if known else "?"
            width = 50 if len(lengths) > 7 else ""  # the width of the column of lengths
            yield label(layout.left - 6, y, lengths, "end faint small", width)


def _name(request_id: int) -> str:
    """Return the name of a row, which is short enough for its column."""
    digits = str(request_id)
    if len(digits) <= 5:
        return f"request {digits}"
    return digits if len(digits) <= 12 else f"\u2026{digits[-11:]}"


def _joined(spans: tuple[Span, ...]) -> Iterator[Span]:
    """Join consecutive chunks of a context, and generation spans at most one column apart.

    In the column between two generation spans, the request is not in the iteration's batch.
    """
    held: Span | None = None
    for span in spans:
        if held is None:
            held = span
        elif span.phase is held.phase is Phase.CONTEXT and span.begin == held.end:
            held = held._replace(end=span.end, num_tokens=held.num_tokens + span.num_tokens)
        elif held.phase is Phase.GENERATION and (
            span.phase is Phase.GENERATION
            or (span.phase is Phase.HELD and span.end - span.begin == 1)
        ):
            held = held._replace(end=span.end, num_tokens=held.num_tokens + span.num_tokens)
        else:
            yield held
            held = span
    if held is not None:
        yield held


def _bar(trace: Trace, row: RequestRow, span: Span, y: float, height: float) -> str:
    tip = describe(trace, row, span)
    width = span.end - span.begin
    if span.phase is Phase.CONTEXT:
        return rect(span.begin, y + height * 0.08, width, height * 0.84, "context", tip)
    if span.phase is Phase.GENERATION:
        return rect(span.begin, y + height * 0.2, width, height * 0.6, "generation", tip)
    return _line(span, span.begin, span.end, y, height, tip)


def _line(span: Span, x0: float, x1: float, y: float, height: float, tip: str) -> str:
    def across(share: float) -> str:
        return f"M{number(x0)} {number(y + height * share)}H{number(x1)}"

    if span.phase is Phase.PAUSED:
        return path(across(0.3) + across(0.7), "paused", tip)
    kind = "held" if span.phase is Phase.HELD else "waiting"
    return path(across(0.5), f"{kind} {DASHES[span.reason]}".strip(), tip)


def _finish(row: RequestRow, x: float, y: float, height: float) -> str:
    tip = f"request {row.request_id} ends: {_tokens(row.num_generated)}, {row.outcome}"
    return path(f"M{number(x)} {number(y)}v{number(height)}", "finish", tip)


def _squares(trace: Trace, row: RequestRow, cell: Span, y: float, layout: Layout) -> Iterator[str]:
    """Yield a named square for each computed token, and the name of the sampled token, if any."""
    x = layout.x(cell.begin) + 6
    tip = describe(trace, row, cell)
    side = SQUARE - 2
    if cell.phase not in (Phase.CONTEXT, Phase.GENERATION):
        yield _line(cell, x, x + layout.column - 12, y, layout.row, tip)
        words = cell.reason.value or cell.phase.value
        middle = x + layout.column / 2 - 6
        yield rect(middle - 4 - 3.1 * len(words), y + 8, 8 + 6.2 * len(words), 16, "paper")
        yield label(middle, y + 20, words, "small mid faint")
        return
    kind = cell.phase.value
    for offset in range(cell.num_tokens):
        yield rect(x, y + 7, side, side, kind, tip, 3)
        name = _token_name(row, cell.position + offset)
        yield label(x + side / 2, y + 20, name, f"small mid on-{kind}")
        x += SQUARE
    total = cell.position + cell.num_tokens
    if total >= row.prompt_len:
        yield label(x + 2, y + 20, f"\u2192 G{total - row.prompt_len + 1}", "small faint")


def _cell(trace: Trace, row: RequestRow, cell: Span, y: float, layout: Layout) -> Iterator[str]:
    x, width = layout.x(cell.begin), layout.column
    tip = describe(trace, row, cell)
    if cell.phase not in (Phase.CONTEXT, Phase.GENERATION):
        yield _line(cell, x, x + width, y, layout.row, tip)
        return
    kind = cell.phase.value
    inset = 2 if cell.phase is Phase.CONTEXT else 4
    yield rect(x + 1, y + inset, width - 2, layout.row - 2 * inset, kind, tip, 2)
    words = f"C{cell.num_tokens}"
    if cell.phase is Phase.GENERATION:
        words = _token_name(row, cell.position)
    yield label(x + width / 2, y + layout.row / 2 + 4, words, f"small mid on-{kind}")


def _token_name(row: RequestRow, position: int) -> str:
    """Return "C" for a token of the prompt, and "G1", "G2", ... for generated ones."""
    generated = position - row.prompt_len
    return "C" if generated < 0 else f"G{generated + 1}"


def _tokens(count: int) -> str:
    return f"{count} token" if count == 1 else f"{count} tokens"


def describe(trace: Trace, row: RequestRow, span: Span) -> str:
    """Describe a span in words and numbers."""
    first = trace.first_iteration + span.begin
    last = trace.first_iteration + span.end - 1
    when = f"iteration {first}" if first == last else f"iterations {first} to {last}"
    subject = f"request {row.request_id}, {when}"
    begin, end = span.position, span.position + span.num_tokens
    if span.phase is Phase.CONTEXT:
        again = min(end, max(begin, row.prompt_len))
        text = f"{subject}: context, {_tokens(span.num_tokens)} (positions {begin} to {end - 1})"
        return text if end == again else f"{text}; {end - again} were generated before a pause"
    if span.phase is Phase.GENERATION:
        from_token = begin - row.prompt_len + 2
        last_token = from_token + span.num_tokens - 1
        tokens = f"token {from_token}"
        if last_token > from_token:
            tokens = f"tokens {from_token} to {last_token}"
        return f"{subject}: generation, yields {tokens}"
    if span.phase is Phase.WAITING:
        return f"{subject}: waiting {span.why}"
    return f"{subject}: {span.phase.value}, waits {span.why}"
