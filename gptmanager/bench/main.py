"""`gptmanager bench`, and the commands below it, once their arguments are read."""

from __future__ import annotations

import argparse
import inspect
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
from gptmanager.bench.kernels.benchmark import KernelOptions, bench_kernels
from gptmanager.bench.load import Load
from gptmanager.bench.names import PARTS
from gptmanager.bench.table import end_to_end_table, kernel_table
from gptmanager.bench.throughput import BenchOptions, bench
from gptmanager.errors import GptManagerError
from gptmanager.run.follow import is_follower
from gptmanager.terminal.options import manager_options
from gptmanager.terminal.progress import NOTES, ProgressBars
from gptmanager.terminal.tables import Piece, print_report

_Options = TypeVar("_Options", KernelOptions, EndToEndOptions)


def main(options: argparse.Namespace) -> int:
    """Return the exit status."""
    bars = ProgressBars(options.region, patience_s=0, notes=NOTES)

    def ran(name: str, figures: Figures) -> None:
        options.region.write(f"{name:17} {figures.tokens_per_second:10,.1f} output tokens/s\n")

    given = manager_options(options)
    given.params.on_progress = bars.tell
    report = bench(
        BenchOptions(
            model=options.model,
            shape=options.shape,
            load=Load(options.num_requests, options.prompt_len, options.output_len),
            repeats=options.repeats,
            peer=options.peer,
            peer_python=options.peer_python,
            adapters=options.adapters,
            adapter_size=options.adapter_size,
            params=given.params,
            scheduler=given.scheduler,
            model_type=given.model_type,
        ),
        on_start=partial(_tell_start, bars, "runs"),
        on_run=ran,
    )
    bars.close()
    if not is_follower(given.params):
        print_report(report, as_json=options.json)
    return 0


def kernels(options: argparse.Namespace) -> int:
    """Return the exit status of `bench kernels`."""
    bars = ProgressBars(options.region, patience_s=0)
    report = bench_kernels(
        _as(KernelOptions, options),
        on_report=partial(_keep, options.output),
        on_start=partial(_tell_start, bars, "cases"),
    )
    bars.close()
    bad = {row["engines"]["gptmanager"]["status"] for row in report["kernels"]} - {"ok", "skipped"}
    return _tell(options, report, kernel_table(report), is_right=not bad)


def end_to_end(options: argparse.Namespace) -> int:
    """Return the exit status of `bench e2e`."""
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
        _as(
            EndToEndOptions,
            options,
            scale=replace(scale, **given) if given else None,
            ablations=tuple(dict.fromkeys(options.ablations or ())),
        ),
        on_report=partial(_keep, options.output),
        on_start=partial(_tell_start, bars, "parts"),
        on_progress=bars.tell,
    )
    bars.close()
    parts = [report[name] for name in (*PARTS, "ablations") if name in report]
    bad = any(isinstance(part, Mapping) and part["status"] in ("wrong", "failed") for part in parts)
    return _tell(options, report, end_to_end_table(report), is_right=not bad)


def _as(kind: Callable[..., _Options], options: argparse.Namespace, **others: Any) -> _Options:
    """Options of a benchmark: `others`, and by name what the command line says."""
    others["command"] = ("gptmanager", *sys.argv[1:])
    names = inspect.signature(kind).parameters.keys() - others
    return kind(**others, **{name: getattr(options, name) for name in names})


def _tell(
    options: argparse.Namespace,
    report: Mapping[str, Any],
    parts: Iterable[Piece],
    *,
    is_right: bool,
) -> int:
    _keep(options.output, report)
    print_report(report, parts, as_json=options.json)
    if report.get("interrupted"):
        sys.stdout.flush()
        raise KeyboardInterrupt
    return 0 if is_right else 1


def _tell_start(bars: ProgressBars, what: str, name: str, number: int, count: int) -> None:
    """Shows which of them runs."""
    bars.tell(what, number, count, f"{name}, {number + 1} of {count}")


def _keep(output: Path | None, report: Mapping[str, Any]) -> None:
    if output is None:
        return
    try:
        output.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2) + b"\n")
    except OSError as error:
        raise GptManagerError(f"--output {output}: {error.strerror}") from error
