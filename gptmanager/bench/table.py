"""Reports of the GPU benchmarks as tables for people. Knows their keys, and measures nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

_HEAD = ("", "us", "+-", "TB/s", "TFLOP/s", "% copy", "% roof", "x ours", "")
_DEVICE = {"driver_version": "driver", "driver_cuda": "for CUDA", "clock": "clock up to"}
_NOTE = 70  # characters; the report has all
_CHANGED = ("deterministic", "cuda_graphs")  # of a manager's parameters
_LONG_S = 2.0  # a first use that is told
_MARKS = {True: "goal met", False: "goal MISSED"}


def kernel_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """A block a part, a line an engine; ours first."""
    yield from header_lines(report)
    rows = report["kernels"]
    table: list[tuple[str, ...]] = [_HEAD]
    places: list[tuple[int, str]] = []
    part = ""
    for row in rows:
        if row["part"] != part:
            part = row["part"]
            places.append((len(table), f"\n{part.replace('_', ' ')}"))
        places.append((len(table), _case_line(row)))
        table += [
            _engine_cells(name, engine)
            for name, engine in row["engines"].items()
            if engine["status"] != "absent"  # the notes say why
        ]
    lines = list(aligned(table))
    yield lines[0]
    for number, line in enumerate(lines[1:], start=1):
        for place, text in places:
            if place == number:
                yield text
        yield line
    yield from _summary(rows)
    yield from notes(report)


def header_lines(report: Mapping[str, Any]) -> Iterator[str]:
    device, versions = report["device"], report["versions"]
    details = [f"{device[key]:g} GiB" for key in ("memory_gib",) if key in device]
    details += [f"{text} {device[key]}" for key, text in _DEVICE.items() if key in device]
    yield ", ".join([device["name"], *details])
    yield f"{report['date']}; {report['machine']}"
    yield ", ".join(f"{name} {number}" for name, number in versions.items())
    ceilings = report.get("ceilings")
    if ceilings:
        yield (
            f"measured ceilings: copy {ceilings['copy_tb_per_s']:.3g} TB/s, "
            f"product {ceilings['product_tflop_per_s']:.4g} TFLOP/s ({ceilings['product_dtype']})"
        )
    if report.get("launch_us"):
        costs = ", ".join(f"{name} {us:.1f} us" for name, us in report["launch_us"].items())
        yield f"host time of a launch: {costs}"
    yield ""


def notes(report: Mapping[str, Any]) -> Iterator[str]:
    for note in report.get("notes", ()):
        yield f"note: {note}"


def aligned(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The first column and the last to the left, the others to the right."""
    table = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = [
            cell.ljust(width) if place in (0, len(row) - 1) else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _case_line(row: Mapping[str, Any]) -> str:
    goals = " ".join(_told(goal) for goal in row["goals"])
    return f"  {row['case']}    {goals}".rstrip()


def _engine_cells(name: str, engine: Mapping[str, Any]) -> tuple[str, ...]:
    note = {"ok": "", "wrong": "WRONG: "}.get(engine["status"], "")
    note += engine.get("note", "")
    if engine["status"] == "failed":
        note = f"FAILED: {note}"
    note = note if len(note) <= _NOTE else f"{note[: _NOTE - 3]}..."
    if "median_us" not in engine:
        return (f"    {name}", *[""] * 7, note)
    low, high = engine["quartiles_us"]
    how = [] if engine["timed_by"] == "graph" else [f"by {engine['timed_by']}"]
    if "plan_us" in engine:
        how.append(f"plan {engine['plan_us']:,.1f} us")
    if engine["first_use_s"] >= _LONG_S:
        how.append(f"first use {engine['first_use_s']:.0f} s")
    return (
        f"    {name}",
        f"{engine['median_us']:,.1f}",
        f"{(high - low) / 2:,.1f}",
        f"{engine['tb_per_s']:.2f}",
        f"{engine['tflop_per_s']:,.0f}" if engine["tflop_per_s"] >= 1 else "",
        f"{engine['share_of_copy']:.0%}",
        f"{engine['share_of_roofline']:.0%}",
        f"{engine['times_ours']:.2f}" if "times_ours" in engine else "",
        "; ".join(filter(None, (note, *how))),
    )


def _summary(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    ours = [row["engines"]["gptmanager"]["status"] for row in rows]
    goals = [goal["met"] for row in rows for goal in row["goals"]]
    counts = ", ".join(
        f"{ours.count(status)} {status}"
        for status in ("ok", "wrong", "failed", "skipped")
        if status in ours
    )
    yield ""
    yield f"{len(rows)} cases: {counts}; {sum(goals)} of {len(goals)} goals met"


def end_to_end_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """A block a part, in the order in which they ran."""
    yield from header_lines(report)
    model = report["model"]
    yield (
        f"model: {model['model_type']}, hidden {model['hidden_size']}, {model['num_hidden_layers']}"
        f" layers, vocabulary {model['vocab_size']}, {model['dtype']}, weights: {model['weights']}"
    )
    yield from _construction_lines(report)
    for name, lines in (
        ("check", _check_lines),
        ("steps", _step_lines),
        ("load", _load_lines),
        ("ablations", _ablation_lines),
        ("transformers", _peer_lines),
        ("saturated", _load_lines),
        ("pressure", _pressure_lines),
    ):
        if name not in report:
            continue
        part = report[name]
        yield f"\n{name}"
        if isinstance(part, Mapping) and part["status"] in ("skipped", "failed"):
            yield f"  {part['status']}: {part['note']}"
        else:
            yield from lines(part)
    yield ""
    yield from notes(report)


def _construction_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """The first manager compiles; the others find what it compiled."""
    if "construction" not in report:
        return
    yield f"made: weights {report['construction']['weights_s']:.1f} s"
    for own in report["construction"]["managers"]:
        name = "".join(f", {field}={own[field]}" for field in _CHANGED if field in own)
        yield (
            f"  a manager of {own['max_batch_size']}{name} {own['made_s']:.1f} s, "
            f"its first request {own['first_request_s']:.2f} s"
        )


def _check_lines(part: Mapping[str, Any]) -> Iterator[str]:
    word = "right" if part["status"] == "ok" else "WRONG"
    yield (
        f"  {word}: logits differ from a dense reference by {part['error']:.2g} of the largest, "
        f"allowed {part['tolerance']:g}; {part['same_tokens']} tokens are its own"
    )


def _step_lines(part: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [
        ("  batch x context", "ms", "+-", "floor ms", "x floor", "tokens/s", "")
    ]
    for row in part:
        if "trace" in row:
            continue
        name = f"  {row['batch']} x {row['context']}"
        if row["status"] != "ok":
            rows.append((name, "", "", "", "", "", f"{row['status']}: {row['note']}"))
            continue
        low, high = row["quartiles_ms"]
        floor = ("", "")
        if "floor_ms" in row:
            floor = (f"{row['floor_ms']:.2f}", f"{row['times_floor']:.2f}")
        figures = (f"{row['median_ms']:.2f}", f"{(high - low) / 2:.2f}", *floor)
        rows.append((name, *figures, f"{row['tokens_per_second']:,.0f}", _goal(row)))
    yield from aligned(rows)
    for trace in (row["trace"] for row in part if "trace" in row):
        if trace["status"] != "ok":
            yield f"  GPU not watched: {trace['note']}"
            continue
        yield (
            f"  GPU busy {trace['busy_share']:.1%}; exposed host time "
            f"{trace['exposed_host_ms']:.3f} ms a step  {_goal(trace)}"
        )
        parts = ", ".join(f"{kind} {ms:.2f} ms" for kind, ms in trace["split_ms"].items())
        yield f"  of a step of {trace['batch']} x {trace['context']}: {parts}"


def _load_lines(part: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    waits = ("first p50/p99 ms", "token p50/p99 ms")
    speed = ("  requests", "tokens in/out", "s", "out tok/s", "% roof")
    rows: list[tuple[str, ...]] = [(*speed, *waits, "batch", "pauses", "host ms", "")]
    for row in part:
        times = [
            "/".join(f"{row[key].get(cut, 0):,.1f}" for cut in ("p50", "p99"))
            for key in ("time_to_first_token_ms", "time_per_output_token_ms")
        ]
        share = f"{row['share_of_roofline']:.0%}" if "share_of_roofline" in row else ""
        host = f"{row['host_ms_per_iteration']:.2f}" if "host_ms_per_iteration" in row else ""
        name = f"{row['requests']} x {row['name']}" if "name" in row else f"{row['requests']}"
        figures = (
            f"{row['tokens_in']:,}/{row['tokens_out']:,}",
            f"{row['seconds']:.2f}",
            f"{row['output_tokens_per_second']:,.0f}",
        )
        counts = (f"{row['mean_batch']:.0f}", str(row["pauses"]), host)
        name += ", streaming" if row["streaming"] else ""
        rows.append((f"  {name}", *figures, share, *times, *counts, _goal(row)))
    yield from aligned(rows)


def _ablation_lines(part: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [("  manager", "s", "out tok/s", "x plain", "steps")]
    for row in part:
        steps = ", ".join(
            f"{it['batch']} x {it['context']}: {it['median_ms']:.2f} ms"
            for it in row["steps"]
            if it["status"] == "ok"
        )
        speed = f"{row['output_tokens_per_second']:,.0f}"
        rows.append(
            (f"  {row['name']}", f"{row['seconds']:.2f}", speed, f"{row['ratio']:.2f}", steps)
        )
    yield from aligned(rows)


def _peer_lines(part: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"  {part['requests']} requests: gptmanager {part['gptmanager']:,.0f} output tokens/s, "
        f"transformers {part['transformers']:,.0f}: {part['ratio']:.2f} x  {_goal(part)}"
    )
    if "note" in part:
        yield f"  transformers: {part['note']}"


def _pressure_lines(part: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"  {part['requests']} requests that may get long and end early, "
        f"KV cache of {part['kv_cache_tokens']:,} tokens"
    )
    rows: list[tuple[str, ...]] = [("  policy", "s", "out tok/s", "batch", "pauses", "")]
    for name, row in part["policies"].items():
        speed = f"{row['output_tokens_per_second']:,.0f}"
        counts = (f"{row['mean_batch']:.0f}", str(row["pauses"]))
        rows.append((f"  {name}", f"{row['seconds']:.2f}", speed, *counts, ""))
    yield from aligned(rows)
    yield f"  max_utilization is {part['ratio']:.2f} times as fast  {_goal(part)}"


def _goal(row: Mapping[str, Any]) -> str:
    goal = row.get("goal")
    return "" if goal is None else _told(goal)


def _told(goal: Mapping[str, Any]) -> str:
    return f"[{goal['text']}: {_MARKS[goal['met']]}]"
