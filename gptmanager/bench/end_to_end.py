"""`gptmanager bench e2e`: a whole model behind a manager, part by part, beside transformers.

Decides which parts run and in what order, what is left out when time runs short, and what becomes
of a part that fails. The model is a checkpoint, or one of random weights made on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from gptmanager.bench.machine import find_gpu, header
from gptmanager.bench.parts import Parts
from gptmanager.bench.timing import Budget
from gptmanager.bench.workbench import ON_CPU, EndToEndOptions, Workbench
from gptmanager.config import ProgressCallback
from gptmanager.errors import ConfigError

PARTS = ("check", "steps", "load", "transformers", "saturated", "pressure")
_LONG = ("saturated", "pressure")


def bench_end_to_end(
    options: EndToEndOptions,
    *,
    on_start: Callable[[str, int, int], None] = lambda name, number, count: None,
    on_part: Callable[[str, Any], None] = lambda name, result: None,
    on_report: Callable[[Mapping[str, Any]], None] = lambda report: None,
    on_progress: ProgressCallback | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """The report. ConfigError without a GPU, where `device` asks for one, and for unknown parts.

    A part that fails is told and the others run. Interrupted, the report is of the parts until
    then and has `interrupted`. `on_report` gets the report so far after each part: it is not lost
    if the benchmark is killed. `on_start` gets the name of each part before it, its number from 0,
    and how many there are; `on_progress`: as in OptionalParams, for each manager.
    """
    for word in options.only:
        if word not in PARTS:
            raise ConfigError(f"--only {word}: there is no such part; there are {', '.join(PARTS)}")
    if options.device not in ON_CPU:
        find_gpu("--device cpu runs a small model on the CPU")
    budget = Budget(None if options.minutes is None else 60 * options.minutes, clock)
    bench = Workbench(options, on_progress)
    with _current(bench.device):
        report = header(options.command, bench.device)
        notes: list[str] = []

        def part_done(name: str, result: Any) -> None:
            report[name] = result
            on_part(name, result)
            on_report({**report, "seconds": round(budget.used, 1), "notes": notes})

        try:
            report |= bench.load(budget)
            _run(bench, budget, notes, on_start, part_done)
        except KeyboardInterrupt:
            report["interrupted"] = True
            notes.append("interrupted")
        finally:
            bench.close()
        return {**report, "seconds": round(budget.used, 1), "notes": notes}


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Timers, the trace and what a card is asked are those of torch's current device."""
    if device.type != "cuda":
        return nullcontext()
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        raise ConfigError(f"device='{device}': there are {count} CUDA devices")
    current: AbstractContextManager[Any] = torch.cuda.device(device)
    return current


def _run(
    bench: Workbench,
    budget: Budget,
    notes: list[str],
    on_start: Callable[[str, int, int], None],
    on_part: Callable[[str, Any], None],
) -> None:
    """Every part that is asked for. One that fails is told, and the next gets a new manager."""
    parts = Parts(bench, budget, notes)
    names = _names(bench)
    for number, name in enumerate(names):
        on_start(name, number, len(names))
        if budget.is_spent:
            notes.append(f"{name}: no time left, skipped")
            result: Any = {"status": "skipped", "note": "no time left"}
        else:
            try:
                result = getattr(parts, name)()
            except Exception as error:  # of whatever library a peer comes from
                text = (str(error).splitlines() or [""])[0]
                notes.append(f"{name}: failed: {text}")
                bench.close()
                result = {"status": "failed", "note": f"{type(error).__name__}: {text}"}
        on_part(name, result)


def _names(bench: Workbench) -> list[str]:
    """The parts that run, in their order."""
    options = bench.options
    names = [name for name in PARTS if not options.only or name in options.only]
    if options.quick and not options.only:
        names = [name for name in names if name not in _LONG]
    if not bench.scale.saturated:
        names = [name for name in names if name != "saturated"]
    if options.ablations:  # before what takes long
        names.insert(names.index("load") + 1 if "load" in names else len(names), "ablations")
    return names
