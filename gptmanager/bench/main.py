"""Runs `gptmanager bench` and its sub-commands with parsed arguments."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import orjson

from gptmanager.bench.end_to_end.benchmark import bench_end_to_end
from gptmanager.bench.end_to_end.workbench import CPU_SCALE, GPU_SCALE, ON_CPU, EndToEndOptions
from gptmanager.bench.engine import Figures
from gptmanager.bench.experts import bench_experts, expert_rows
from gptmanager.bench.kernels.benchmark import KernelOptions, bench_kernels
from gptmanager.bench.load import Load
from gptmanager.bench.names import PARTS
from gptmanager.bench.peer_throughput import BenchOptions, bench
from gptmanager.bench.table import end_to_end_table, kernel_table
from gptmanager.commands.follow import is_follower
from gptmanager.errors import write_error
from gptmanager.terminal.options import manager_options
from gptmanager.terminal.progress import NOTES, ProgressBars
from gptmanager.terminal.tables import Piece, print_report, report_json, table

_Options = TypeVar("_Options", KernelOptions, EndToEndOptions)


def main(options: argparse.Namespace) -> int:
    """Run `gptmanager bench` and return its exit status."""
    bars = ProgressBars(options.region, patience_s=0, notes=NOTES)

    def show_figures(name: str, figures: Figures) -> None:
        options.region.write(f"{name:19} {figures.tokens_per_second:10,.1f} output tokens/s\n")

    given = manager_options(options)
    given.params.on_progress = bars.update
    report = bench(
        BenchOptions(
            model=options.model,
            shape=options.shape,
            load=Load(options.num_requests, options.prompt_len, options.output_len),
            repeats=options.repeats,
            peer=options.peer,
            peer_python=options.peer_python,
            peer_binary=options.peer_binary,
            text=options.text,
            adapters=options.adapters,
            adapter_size=options.adapter_size,
            params=given.params,
            scheduler=given.scheduler,
            model_type=given.model_type,
        ),
        on_start=partial(_show_start, bars, "runs"),
        on_run=show_figures,
    )
    bars.close()
    if not is_follower(given.params):
        print_report(report, as_json=options.json)
    return 0


def kernels(options: argparse.Namespace) -> int:
    """Run `gptmanager bench kernels` and return its exit status."""
    bars = ProgressBars(options.region, patience_s=0)
    report = bench_kernels(
        _make_options(KernelOptions, options),
        on_report=partial(_write_report, options.output),
        on_start=partial(_show_start, bars, "cases"),
    )
    bars.close()
    bad = {row["engines"]["gptmanager"]["status"] for row in report["kernels"]} - {"ok", "skipped"}
    return _finish(options, report, kernel_table(report), is_correct=not bad)


def experts(options: argparse.Namespace) -> int:
    """Run `gptmanager bench experts` and return its exit status."""
    bars = ProgressBars(options.region, patience_s=0)
    given = options.tokens, options.dtype or "bfloat16", options.weights_dtype, options.rounds
    report = bench_experts(*given, on_case=partial(bars.update, "cases"))
    bars.close()
    head, *rows = expert_rows(report)
    print_report(report, [table(head, rows, left=())], as_json=options.json)
    return 0


def end_to_end(options: argparse.Namespace) -> int:
    """Run `gptmanager bench e2e` and return its exit status."""
    scale = CPU_SCALE if options.device in ON_CPU else GPU_SCALE
    given = {
        name: getattr(options, name) for name in ("requests", "lengths", "batches", "contexts")
    }
    given = {name: value for name, value in given.items() if value is not None}
    if "lengths" in given:
        longest = options.lengths[1]
        given["max_seq_len"] = max(scale.max_seq_len, 2 * longest)
        given["max_num_tokens"] = max(scale.max_num_tokens, longest)
    if "requests" in given:
        given["peer_requests"] = min(scale.peer_requests, options.requests)
    bars = ProgressBars(options.region, patience_s=0)
    report = bench_end_to_end(
        _make_options(
            EndToEndOptions,
            options,
            scale=replace(scale, **given) if given else None,
            ablations=tuple(dict.fromkeys(options.ablations or ())),
        ),
        on_report=partial(_write_report, options.output),
        on_start=partial(_show_start, bars, "parts"),
        on_progress=bars.update,
    )
    bars.close()
    parts = [report[name] for name in (*PARTS, "ablations") if name in report]
    rows = [row for part in parts for row in ([part] if isinstance(part, Mapping) else part)]
    bad = any(row.get("status") in ("wrong", "failed") for row in rows)
    return _finish(options, report, end_to_end_table(report), is_correct=not bad)


def _make_options(
    kind: Callable[..., _Options], options: argparse.Namespace, **others: Any
) -> _Options:
    """Return a benchmark's options: `others`, and all other fields from `options` by name."""
    others["command"] = ("gptmanager", *sys.argv[1:])
    names = inspect.signature(kind).parameters.keys() - others
    return kind(**others, **{name: getattr(options, name) for name in names})


def _finish(
    options: argparse.Namespace,
    report: Mapping[str, Any],
    parts: Iterable[Piece],
    *,
    is_correct: bool,
) -> int:
    _write_report(options.output, report)
    print_report(report, parts, as_json=options.json)
    if report.get("interrupted"):
        raise KeyboardInterrupt
    return 0 if is_correct else 1


def _show_start(bars: ProgressBars, what: str, name: str, number: int, count: int) -> None:
    """Show the run, case or part that starts now."""
    bars.update(what, number, count, f"{name}, {number + 1} of {count}")


def _write_report(output: Path | None, report: Mapping[str, Any]) -> None:
    """Write `report` to `output`, which is complete at any moment: it replaces the last report."""
    if output is None:
        return
    is_file = output.is_file() or not output.exists()  # else a device or a pipe
    file = Path(os.path.realpath(output)) if is_file else output
    new = file.with_name(f"{file.name}.part") if is_file else file
    try:
        new.write_bytes(report_json(report, orjson.OPT_INDENT_2) + b"\n")
        if is_file:
            new.replace(file)
    except OSError as error:
        if is_file:
            new.unlink(missing_ok=True)
        raise write_error(f"--output {output}", error) from error
