"""Formats the reports of `bench kernels` and `bench e2e` as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gptmanager.terminal.tables import Piece, table

_WIDTHS = (22, 9, 7, 5, 7, 6, 7, 6)  # characters per column: the tables of all cases align
_HEAD = ("", "us", "+-", "TB/s", "TFLOP/s", "% copy", "x floor", "x ours", "")
_DEVICE = {"memory_gib": "{:g} GiB", "driver_version": "driver {}", "driver_cuda": "for CUDA {}",
           "clock": "clock up to {}"}  # fmt: skip
_SPEED = {"seconds": ".2f", "output_tokens_per_second": ",.0f"}
_NOTE = 70  # the most characters of a note in a table; the report has the whole note
# manager options that ablations change
_CHANGED = ("deterministic", "cuda_graphs", "weights_dtype", "attention_provider")
_LONG_S = 2.0  # an engine's first use is shown if it took at least this many seconds
_MARKS = {True: "goal met", False: "goal MISSED"}


def kernel_table(report: Mapping[str, Any]) -> Iterator[Piece]:
    """Yield a header, then a section per part, with a table per case and a line per engine."""
    yield from _header(report)
    yield table(_HEAD, widths=_WIDTHS)
    rows = report["kernels"]
    part = ""
    for row in rows:
        if row["part"] != part:
            part = row["part"]
            yield f"\n{part.replace('_', ' ')}"
        goals = " ".join(_goal_text(goal) for goal in row["goals"])
        yield f"  {row['case']}    {goals}".rstrip()
        engines = [
            _engine_cells(name, engine)
            for name, engine in row["engines"].items()
            if engine["status"] != "absent"  # the notes say why
        ]
        yield table([""] * len(_HEAD), engines, widths=_WIDTHS)
    yield _summary(rows)
    yield from _notes(report)


def _header(report: Mapping[str, Any]) -> Iterator[str]:
    device, versions = report["device"], report["versions"]
    details = [text.format(device[key]) for key, text in _DEVICE.items() if key in device]
    yield ", ".join([device["name"], *details])
    yield f"{report['date']}; {report['machine']}"
    yield ", ".join(f"{name} {number}" for name, number in versions.items())
    if report.get("switches"):
        yield f"GPTMANAGER_CUDA={','.join(report['switches'])}"
    ceilings = report.get("ceilings")
    if ceilings:
        yield (
            f"measured ceilings: copy {ceilings['copy_tb_per_s']:.3g} TB/s, "
            f"matmul {ceilings['matmul_tflop_per_s']:.4g} TFLOP/s ({ceilings['matmul_dtype']})"
        )
    if report.get("launch_us"):
        costs = ", ".join(f"{name} {us:.1f} us" for name, us in report["launch_us"].items())
        yield f"host time per launch: {costs}"
    yield ""


def _notes(report: Mapping[str, Any]) -> Iterator[str]:
    for note in report.get("notes", ()):
        yield f"note: {note}"


def _engine_cells(name: str, engine: Mapping[str, Any]) -> tuple[str, ...]:
    note = {"ok": "", "wrong": "WRONG: "}.get(engine["status"], "")
    note += engine.get("note", "")
    if engine["status"] == "failed":
        note = f"FAILED: {note}"
    note = note if len(note) <= _NOTE else f"{note[: _NOTE - 3]}..."
    how = [] if engine.get("timed_by", "graph") == "graph" else [f"by {engine['timed_by']}"]
    if "plan_us" in engine:
        how.append(f"plan {engine['plan_us']:,.1f} us")
    if engine.get("first_use_s", 0) >= _LONG_S:
        how.append(f"first use {engine['first_use_s']:.0f} s")
    return (
        f"    {name}",
        *_cells(engine, {"median_us": ",.1f"}),
        _half_spread(engine, "quartiles_us", ",.1f"),
        *_cells(engine, {"tb_per_s": ".2f"}),
        f"{engine['tflop_per_s']:,.0f}" if engine.get("tflop_per_s", 0) >= 1 else "",
        *_cells(engine, {"share_of_copy": ".0%", "times_floor": ".2f", "times_ours": ".2f"}),
        "; ".join(filter(None, (note, *how))),
    )


def _summary(rows: Sequence[Mapping[str, Any]]) -> str:
    ours = [row["engines"]["gptmanager"]["status"] for row in rows]
    goals = [goal["met"] for row in rows for goal in row["goals"]]
    counts = ", ".join(
        f"{ours.count(status)} {status}"
        for status in ("ok", "wrong", "failed", "skipped")
        if status in ours
    )
    return f"\n{len(rows)} cases: {counts}; {sum(goals)} of {len(goals)} goals met"


def end_to_end_table(report: Mapping[str, Any]) -> Iterator[Piece]:
    """Yield a header, then a section for each part that ran."""
    yield from _header(report)
    if "model" in report:  # else interrupted before the model was loaded
        yield from _model_lines(report["model"], report["construction"])
    for name, parts in (
        ("check", _check_parts),
        ("steps", _step_parts),
        ("load", _load_parts),
        ("ablations", _ablation_parts),
        ("transformers", _peer_parts),
        ("saturated", _load_parts),
        ("pressure", _pressure_parts),
    ):
        if name not in report:
            continue
        part = report[name]
        yield f"\n{name}"
        if isinstance(part, Mapping) and part["status"] in ("skipped", "failed"):
            yield f"  {part['status']}: {part['note']}"
        else:
            yield from parts(part)
    yield ""
    yield from _notes(report)


def _model_lines(model: Mapping[str, Any], construction: Mapping[str, Any]) -> Iterator[str]:
    """Describe the model, and how long each manager took to start."""
    yield (
        f"model: {model['model_type']}, hidden {model['hidden_size']}, {model['num_hidden_layers']}"
        f" layers, vocabulary {model['vocab_size']}, {model['dtype']}, weights: {model['weights']}"
    )
    yield f"construction: weights {construction['weights_s']:.1f} s"
    for own in construction["managers"]:
        name = "".join(f", {field}={own[field]}" for field in _CHANGED if field in own)
        yield (
            f"  a manager of {own['max_batch_size']}{name}: {own['made_s']:.1f} s, "
            f"first request {own['first_request_s']:.2f} s"
        )


def _check_parts(part: Mapping[str, Any]) -> Iterator[str]:
    word = "correct" if part["status"] == "ok" else "WRONG"
    yield (
        f"  {word}: logits differ from a dense reference by {part['error']:.2g} of the largest "
        f"(allowed {part['tolerance']:g}); {part['same_tokens']} tokens agree"
    )


def _step_parts(part: Sequence[Mapping[str, Any]]) -> Iterator[Piece]:
    head = ("  batch x context", "ms", "+-", "floor ms", "x floor", "tokens/s", "")
    rows = [
        (
            f"  {row['batch']} x {row['context']}",
            *_cells(row, {"median_ms": ".2f"}),
            _half_spread(row, "quartiles_ms", ".2f"),
            *_cells(row, {"floor_ms": ".2f", "times_floor": ".2f", "tokens_per_second": ",.0f"}),
            _goal(row) if row["status"] == "ok" else f"{row['status']}: {row['note']}",
        )
        for row in part
        if "trace" not in row
    ]
    yield table(head, rows)
    for trace in (row["trace"] for row in part if "trace" in row):
        if trace["status"] != "ok":
            yield f"  no GPU trace: {trace['note']}"
            continue
        yield (
            f"  GPU busy {trace['busy_share']:.1%}; exposed host time "
            f"{trace['exposed_host_ms']:.3f} ms per step  {_goal(trace)}"
        )
        parts = ", ".join(f"{kind} {ms:.2f} ms" for kind, ms in trace["split_ms"].items())
        yield f"  split of a step of {trace['batch']} x {trace['context']}: {parts}"


def _load_parts(part: Sequence[Mapping[str, Any]]) -> Iterator[Piece]:
    head = ("  requests", "tokens in/out", "s", "out tok/s", "x floor", "first p50/p99 ms",
            "token p50/p99 ms", "batch", "pauses", "host ms", "")  # fmt: skip
    rows: list[tuple[str, ...]] = []
    for row in part:
        name = f"  {row['requests']}" + (f" x {row['name']}" if "name" in row else "")
        name += ", streaming" if row["streaming"] else ""
        if row["status"] != "ok":
            rows.append((name, *[""] * (len(head) - 2), f"{row['status']}: {row['note'][:_NOTE]}"))
            continue
        times = [
            "/".join(f"{row[key].get(cut, 0):,.1f}" for cut in ("p50", "p99"))
            for key in ("time_to_first_token_ms", "time_per_output_token_ms")
        ]
        tokens = f"{row['tokens_in']:,}/{row['tokens_out']:,}"
        speed = _cells(row, {**_SPEED, "times_floor": ".2f"})
        counts = _cells(row, {"mean_batch": ".0f", "pauses": "d", "host_ms_per_iteration": ".2f"})
        rows.append((name, tokens, *speed, *times, *counts, _goal(row)))
    yield table(head, rows)


def _ablation_parts(part: Sequence[Mapping[str, Any]]) -> Iterator[Piece]:
    head = ("  manager", "s", "out tok/s", "x plain", "steps")
    rows: list[tuple[str, ...]] = []
    for row in part:
        if "steps" not in row:
            rows.append((f"  {row['name']}", row["status"], "", "", row["note"][:_NOTE]))
            continue
        steps = ", ".join(
            f"{it['batch']} x {it['context']}: {it['median_ms']:.2f} ms"
            for it in row["steps"]
            if it["status"] == "ok"
        )
        rows.append((f"  {row['name']}", *_cells(row, {**_SPEED, "ratio": ".2f"}), steps))
    yield table(head, rows)


def _peer_parts(part: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"  {part['requests']} requests: gptmanager {part['gptmanager']:,.0f} output tokens/s, "
        f"transformers {part['transformers']:,.0f}: {part['ratio']:.2f} x  {_goal(part)}"
    )
    if "note" in part:
        yield f"  transformers: {part['note']}"


def _pressure_parts(part: Mapping[str, Any]) -> Iterator[Piece]:
    yield (
        f"  {part['requests']} requests that end before their limit, "
        f"KV cache of {part['kv_cache_tokens']:,} tokens"
    )
    head = ("  policy", "s", "out tok/s", "batch", "pauses")
    figures = {**_SPEED, "mean_batch": ".0f", "pauses": "d"}
    rows = [(f"  {name}", *_cells(row, figures)) for name, row in part["policies"].items()]
    yield table(head, rows, left=(0,))
    yield f"  max_utilization / guaranteed_no_evict: {part['ratio']:.2f} x  {_goal(part)}"


def _cells(row: Mapping[str, Any], formats: Mapping[str, str]) -> list[str]:
    """Return a cell for each name in `formats`; the cell is empty if `row` lacks the figure."""
    return [format(row[name], how) if name in row else "" for name, how in formats.items()]


def _half_spread(row: Mapping[str, Any], quartiles: str, how: str) -> str:
    low, high = row.get(quartiles, (0, 0))
    return format((high - low) / 2, how) if quartiles in row else ""


def _goal(row: Mapping[str, Any]) -> str:
    goal = row.get("goal")
    return "" if goal is None else _goal_text(goal)


def _goal_text(goal: Mapping[str, Any]) -> str:
    return f"[{goal['text']}: {_MARKS[goal['met']]}]"
