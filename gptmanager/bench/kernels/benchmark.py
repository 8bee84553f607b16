"""`gptmanager bench kernels`: which cases there are, and the report they make."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gptmanager.bench.kernels.adapter_cases import adapter_cases
from gptmanager.bench.kernels.attention_cases import attention_cases
from gptmanager.bench.kernels.cases import OURS, Bed, Case, Sizes
from gptmanager.bench.kernels.kernel_runs import NO_TIME, CaseResult, report, run_case
from gptmanager.bench.kernels.logits_cases import logits_cases
from gptmanager.bench.kernels.matmul_cases import matmul_cases
from gptmanager.bench.kernels.sampling_cases import sampling_cases
from gptmanager.bench.kernels.token_cases import token_cases
from gptmanager.bench.machine import cache_bytes, find_gpu, free_bytes, header
from gptmanager.bench.roofline import measure_ceilings
from gptmanager.bench.timing import Budget, DeviceTimer, Timer, host_seconds
from gptmanager.cuda.device.launch import DeviceLauncher
from gptmanager.cuda.norms import rms_norm
from gptmanager.errors import ConfigError

_ROUNDS, _QUICK_ROUNDS = 20, 5
_COPY_BYTES, _PRODUCT_WIDTH = 4 << 30, 8192
_LAUNCHES = 50  # so few that no queue fills


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """`only`: words, of which a part's or a case's name has one. `peers`: beginnings of names."""

    only: tuple[str, ...] = ()
    peers: tuple[str, ...] | None = None
    quick: bool = False
    minutes: float | None = None
    command: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Ground:
    """The device, timer and sizes of a run; `bench_kernels` makes those of the current device."""

    bed: Bed
    timer: Timer
    copy_bytes: int = _COPY_BYTES
    product_width: int = _PRODUCT_WIDTH
    launch_us: Callable[[Bed], dict[str, float]] = field(default=lambda bed: {})
    clock: Callable[[], float] = time.monotonic


def bench_kernels(
    options: KernelOptions,
    ground: Ground | None = None,
    *,
    on_report: Callable[[Mapping[str, Any]], None] = lambda report: None,
    on_start: Callable[[str, int, int], None] = lambda name, number, count: None,
) -> dict[str, Any]:
    """The report; ConfigError without a GPU, and for an `only` that nothing has.

    Interrupted, the report is of what was measured until then and has `interrupted`. `on_report`
    gets the report so far after each case: it is not lost if the benchmark is killed. `on_start`
    gets the name of each case before it, its number from 0, and how many there are.
    """
    cases = selected(all_cases(ground.bed.sizes if ground else Sizes()), options)
    if ground is None:
        find_gpu("the kernel benchmark needs one")
        device = torch.device("cuda", torch.cuda.current_device())
        bed = Bed(device, DeviceLauncher(), cache_bytes=cache_bytes(), free_bytes=free_bytes)
        ground = Ground(bed, DeviceTimer(), launch_us=launch_costs)
    bed, budget = ground.bed, Budget(options.minutes and 60 * options.minutes, ground.clock)
    started = header(options.command, bed.device)
    ceilings = measure_ceilings(
        ground.timer, bed.device, bed.sizes.dtype, ground.copy_bytes, ground.product_width
    )
    launch_us = ground.launch_us(bed)
    rounds = _QUICK_ROUNDS if options.quick else _ROUNDS
    results: list[CaseResult] = []

    def told(notes: Sequence[str] = ()) -> dict[str, Any]:
        return {
            **started,
            "seconds": round(budget.used, 1),
            "ceilings": ceilings.report(),
            "launch_us": launch_us,
            "kernels": report(results, ceilings),
            "notes": [*notes, *_missing_peers(results)],
        }

    try:
        for number, case in enumerate(cases):
            on_start(f"{case.part}, {case.name}", number, len(cases))
            share = budget.share(len(cases) - number)
            results.append(
                run_case(case, bed, ground.timer, rounds=rounds, budget=share, peers=options.peers)
            )
            on_report(told())
    except KeyboardInterrupt:
        notes = [f"interrupted after {len(results)} of {len(cases)} cases"]
        return {**told(notes + _skipped(results, options)), "interrupted": True}
    return told(_skipped(results, options))


def all_cases(sizes: Sizes) -> list[Case]:
    return [
        *attention_cases(sizes),
        *matmul_cases(sizes),
        *adapter_cases(sizes),
        *token_cases(sizes),
        *sampling_cases(sizes),
        *logits_cases(sizes),
    ]


def selected(cases: Sequence[Case], options: KernelOptions) -> list[Case]:
    chosen = [case for case in cases if case.quick or not options.quick]
    for word in options.only:
        if not any(_has(case, word) for case in cases):
            parts = ", ".join(dict.fromkeys(case.part for case in cases))
            raise ConfigError(f"--only {word}: no kernel is called so; there are {parts}")
    if options.only:
        chosen = [case for case in chosen if any(_has(case, word) for word in options.only)]
    return chosen


def launch_costs(bed: Bed) -> dict[str, float]:
    """Host microseconds of one launch: a kernel of ours, an op of torch, a recorded kernel."""
    x = torch.zeros(1, 64, dtype=bed.sizes.dtype, device=bed.device)
    out = torch.empty_like(x)

    def kernel() -> None:
        rms_norm(bed.launcher, out, x, x[0], 1e-5)

    kernel()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel()
    work = {"kernel": kernel, "torch op": lambda: torch.neg(x, out=out), "graph": graph.replay}
    costs = {name: host_seconds(run, bed.device, _LAUNCHES) for name, run in work.items()}
    return {name: round(seconds * 1e6, 2) for name, seconds in costs.items()}


def _has(case: Case, word: str) -> bool:
    return word.lower() in case.part or word.lower() in case.name.lower()


def _skipped(results: Sequence[CaseResult], options: KernelOptions) -> list[str]:
    """A line for each reason."""
    counts = Counter(it.ours.note for it in results if it.ours.status == "skipped")
    late = counts.pop(NO_TIME, 0)
    notes = [f"time limit of {options.minutes:g} minutes: {late} cases skipped"] if late else []
    return notes + [f"{count} cases skipped: {why}" for why, count in counts.items()]


def _missing_peers(results: Sequence[CaseResult]) -> list[str]:
    """A line for each peer that took no part anywhere."""
    found: dict[str, list[str]] = {}
    for result in results:
        for name, entry in result.entries.items():
            if name != OURS:
                found.setdefault(name, []).append(entry.note if entry.spread is None else "")
    return [f"{name}: {notes[0]}" for name, notes in found.items() if all(notes)]
