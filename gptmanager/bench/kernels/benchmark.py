"""`gptmanager bench kernels`: selects the cases, runs them and returns the report."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from gptmanager.bench.kernels.adapter_cases import adapter_cases
from gptmanager.bench.kernels.attention_cases import attention_cases
from gptmanager.bench.kernels.cases import OURS, Case, Rig, Sizes
from gptmanager.bench.kernels.expert_cases import expert_cases
from gptmanager.bench.kernels.kernel_runs import NO_TIME, CaseResult, report, run_case
from gptmanager.bench.kernels.logits_cases import logits_cases
from gptmanager.bench.kernels.matmul_cases import matmul_cases
from gptmanager.bench.kernels.recurrent_cases import recurrent_cases
from gptmanager.bench.kernels.sampling_cases import sampling_cases
from gptmanager.bench.kernels.token_cases import token_cases
from gptmanager.bench.machine import cache_bytes, find_gpu, free_bytes, header
from gptmanager.bench.roofline import measure_ceilings
from gptmanager.bench.timing import Budget, DeviceTimer, Timer, host_seconds
from gptmanager.cuda.device.launch import DeviceLauncher
from gptmanager.cuda.norms import norm
from gptmanager.errors import ConfigError

_ROUNDS, _QUICK_ROUNDS = 20, 5
_COPY_BYTES, _MATMUL_WIDTH = 4 << 30, 8192
_LAUNCHES = 50  # few enough that the launch queue never fills


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """The options of `bench_kernels`.

    A case runs if its name, or the name of its part, contains a word of `only`; if `only` is empty,
    all cases run. `peers` are prefixes of the names of the peers that run; None means all peers.
    With `quick`, only the quick cases run, with fewer rounds. `minutes` is the time limit, if any.
    """

    only: tuple[str, ...] = ()
    peers: tuple[str, ...] | None = None
    quick: bool = False
    minutes: float | None = None
    command: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class BenchSetup:
    """The device, timer and sizes of a run.

    `copy_bytes`, `matmul_width`: see `measure_ceilings`. `launch_us` returns the microseconds per
    launch of each kind; see `launch_costs`. `clock` returns seconds.
    """

    rig: Rig
    timer: Timer
    copy_bytes: int = _COPY_BYTES
    matmul_width: int = _MATMUL_WIDTH
    launch_us: Callable[[Rig], dict[str, float]] = field(default=lambda rig: {})
    clock: Callable[[], float] = time.monotonic


def bench_kernels(
    options: KernelOptions,
    setup: BenchSetup | None = None,
    *,
    on_report: Callable[[Mapping[str, Any]], None] = lambda report: None,
    on_start: Callable[[str, int, int], None] = lambda name, number, count: None,
) -> dict[str, Any]:
    """Run the cases and return the report.

    Without `setup`, the cases run on torch's current GPU. Raises ConfigError if there is none, and
    for a word of `only` that matches no case. After Ctrl-C the report has the cases so far and
    `interrupted`.
    `on_report` is called with the report before each case, so that the report of a killed benchmark
    is not lost; `running` is then the name of the case. `on_start` is called before each case with
    its name, its number from 0, and the number of cases.
    """
    cases = select_cases(all_cases(setup.rig.sizes if setup else Sizes()), options)
    if setup is None:
        find_gpu("the kernel benchmark needs one")
        device = torch.device("cuda", torch.cuda.current_device())
        rig = Rig(device, DeviceLauncher(), cache_bytes=cache_bytes(), free_bytes=free_bytes)
        setup = BenchSetup(rig, DeviceTimer(), launch_us=launch_costs)
    rig, budget = setup.rig, Budget(options.minutes and 60 * options.minutes, setup.clock)
    started = header(options.command, rig.device)
    ceilings = measure_ceilings(
        setup.timer, rig.device, rig.sizes.dtype, setup.copy_bytes, setup.matmul_width
    )
    launch_us = setup.launch_us(rig)
    rounds = _QUICK_ROUNDS if options.quick else _ROUNDS
    results: list[CaseResult] = []

    def current_report(notes: Sequence[str] = ()) -> dict[str, Any]:
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
            name = f"{case.part}, {case.name}"
            on_report({**current_report(), "running": name})
            on_start(name, number, len(cases))
            share = budget.share(len(cases) - number)
            results.append(
                run_case(case, rig, setup.timer, rounds=rounds, budget=share, peers=options.peers)
            )
    except KeyboardInterrupt:
        notes = [f"interrupted after {len(results)} of {len(cases)} cases"]
        return {**current_report(notes + _skipped(results, options)), "interrupted": True}
    return current_report(_skipped(results, options))


def all_cases(sizes: Sizes) -> list[Case]:
    """Return the cases of all kernels, in the order in which they run."""
    return [
        *attention_cases(sizes),
        *matmul_cases(sizes),
        *expert_cases(sizes),
        *recurrent_cases(sizes),
        *adapter_cases(sizes),
        *token_cases(sizes),
        *sampling_cases(sizes),
        *logits_cases(sizes),
    ]


def select_cases(cases: Sequence[Case], options: KernelOptions) -> list[Case]:
    """Return the cases that `only` and `quick` select.

    Raises ConfigError for a word of `only` that matches no case.
    """
    chosen = [case for case in cases if case.quick or not options.quick]
    for word in options.only:
        if not any(_matches(case, word) for case in cases):
            parts = ", ".join(dict.fromkeys(case.part for case in cases))
            raise ConfigError(f"--only {word}: no kernel has this in its name; parts are {parts}")
    if options.only:
        chosen = [case for case in chosen if any(_matches(case, word) for word in options.only)]
    return chosen


def launch_costs(rig: Rig) -> dict[str, float]:
    """Return the host's microseconds per launch of our kernel, a torch op, and a CUDA graph."""
    x = torch.zeros(1, 64, dtype=rig.sizes.dtype, device=rig.device)
    out = torch.empty_like(x)

    def kernel() -> None:
        norm(rig.launcher, out, x, x[0], None, 1e-5)

    kernel()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel()
    work = {"kernel": kernel, "torch op": lambda: torch.neg(x, out=out), "graph": graph.replay}
    costs = {name: host_seconds(run, rig.device, _LAUNCHES) for name, run in work.items()}
    return {name: round(seconds * 1e6, 2) for name, seconds in costs.items()}


def _matches(case: Case, word: str) -> bool:
    return word.lower() in case.part or word.lower() in case.name.lower()


def _skipped(results: Sequence[CaseResult], options: KernelOptions) -> list[str]:
    """Return a note for each reason why cases were skipped."""
    counts = Counter(it.ours.note for it in results if it.ours.status == "skipped")
    late = counts.pop(NO_TIME, 0)
    notes = [f"time limit of {options.minutes:g} minutes: {_cases(late)} skipped"] if late else []
    return notes + [f"{_cases(count)} skipped: {why}" for why, count in counts.items()]


def _cases(count: int) -> str:
    return f"{count} case" if count == 1 else f"{count} cases"


def _missing_peers(results: Sequence[CaseResult]) -> list[str]:
    """Return a note for each peer that ran in no case."""
    found: dict[str, list[str]] = {}
    for result in results:
        for name, entry in result.entries.items():
            if name != OURS:
                found.setdefault(name, []).append(entry.note if entry.spread is None else "")
    return [f"{name}: {notes[0]}" for name, notes in found.items() if all(notes)]
