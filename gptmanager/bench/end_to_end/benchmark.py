"""`gptmanager bench e2e`: benchmarks a whole model behind a manager, in several parts.

One of the parts compares the manager with transformers. This module decides which parts run, in
which order and with which goals. It skips parts when the time is over, and reports parts that fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from gptmanager.bench.end_to_end.dense_reference import compare_logits, unsupported_reason
from gptmanager.bench.end_to_end.serving_parts import (
    compare_policies,
    time_load,
    time_steps,
    trace_steps,
)
from gptmanager.bench.end_to_end.workbench import ON_CPU, EndToEndOptions, Workbench
from gptmanager.bench.load import uniform_requests
from gptmanager.bench.machine import find_gpu, header
from gptmanager.bench.names import PARTS
from gptmanager.bench.peers.transformers_peer import TooSlow, TransformersPeer
from gptmanager.bench.timing import Budget
from gptmanager.config import OptionalParams, ProgressCallback
from gptmanager.errors import ConfigError

_LONG = ("saturated", "pressure")
# Ablation name -> changed parameters of the manager. Ablations run only on request.
ABLATIONS: Mapping[str, Mapping[str, Any]] = {
    "deterministic": {"deterministic": True},
    "no graphs": {"cuda_graphs": False},
    "int8": {"weights_dtype": "int8"},
    "fp8": {"weights_dtype": "fp8"},
    "flashinfer": {"attention_provider": "flashinfer"},
}
_PEER_LIMIT_S = 60.0
# allowed times, as multiples of the floors (roofline times) that `serving_parts` computes
_STEP_GOAL, _LOAD_GOAL = 1.25, 1.43
_PEER_GOAL = 3.0  # we must be at least this many times as fast as transformers, in tokens/s


def bench_end_to_end(
    options: EndToEndOptions,
    *,
    on_start: Callable[[str, int, int], None] = lambda name, number, count: None,
    on_report: Callable[[Mapping[str, Any]], None] = lambda report: None,
    on_progress: ProgressCallback | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, Any]:
    """Run the parts and return the report.

    Raises ConfigError for unknown parts, and if `device` is a GPU that does not exist. A part that
    fails is reported, and the other parts still run. After Ctrl-C the report has the finished parts
    and `interrupted`. `on_report` is called after each part with the report so far, so that these
    results are not lost if the benchmark is killed. `on_start` is called before each part with the
    part's name, the part's number from 0, and the number of parts. Each manager calls `on_progress`
    while it loads.
    """
    for word in options.only:
        if word not in PARTS:
            raise ConfigError(f"--only {word}: must be one of {', '.join(PARTS)}")
    if options.device not in ON_CPU:
        find_gpu("--device cpu runs a small model on the CPU")
    budget = Budget(options.minutes and 60 * options.minutes, clock)
    bench = Workbench(options, on_progress)
    with _current_device(bench.device):
        report = header(options.command, bench.device)
        notes: list[str] = []

        def current_report() -> dict[str, Any]:
            return {**report, "seconds": round(budget.used, 1), "notes": notes}

        try:
            report |= bench.load(budget)
            parts, names = Parts(bench, budget, notes), _part_names(bench)
            for number, name in enumerate(names):
                on_start(name, number, len(names))
                report[name] = parts.run(name)
                on_report(current_report())
        except KeyboardInterrupt:
            report["interrupted"] = True
            notes.append("interrupted")
        finally:
            bench.close()
        return current_report()


def _current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which `device` is torch's current device.

    Timers, traces and queries of the GPU use the current device.
    """
    if device.type != "cuda":
        return nullcontext()
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        raise ConfigError(f"device='{device}' must be one of cuda:0 to cuda:{count - 1}")
    current: AbstractContextManager[Any] = torch.cuda.device(device)
    return current


def _part_names(bench: Workbench) -> list[str]:
    """Return the names of the parts that run, in order."""
    options = bench.options
    names = [name for name in PARTS if not options.only or name in options.only]
    if options.quick and not options.only:
        names = [name for name in names if name not in _LONG]
    if not bench.scale.saturated:
        names = [name for name in names if name != "saturated"]
    if options.ablations:  # they run right after the part "load", or last if "load" does not run
        names.insert(names.index("load") + 1 if "load" in names else len(names), "ablations")
    return names


@dataclass(frozen=True, slots=True)
class Parts:
    """One method per part. `notes` collects sentences about parts that were skipped or failed."""

    bench: Workbench
    budget: Budget
    notes: list[str]

    def run(self, name: str) -> Any:
        """Run a part and return its results. After a failure the next part gets a new manager."""
        if self.budget.is_spent:
            self.notes.append(f"{name}: no time left, skipped")
            return {"status": "skipped", "note": "no time left"}
        try:
            return getattr(self, name)()
        except Exception as error:  # peers raise errors of their own libraries
            text = _first_line(error)
            self.notes.append(f"{name}: failed: {text}")
            self.bench.close()
            return {"status": "failed", "note": f"{type(error).__name__}: {text}"}

    def check(self) -> dict[str, Any]:
        """Compare a manager's logits with the logits of the dense reference."""
        reason = unsupported_reason(self.bench.config)
        if reason or self.bench.weights is None:
            return {"status": "skipped", "note": reason or "the weights are not loaded"}
        vocab_size = self.bench.config["vocab_size"]
        lengths = [(5, 5), (17, 17), (40, 40), (63, 63)]
        requests = [
            (uniform_requests(1, length, (1, 1), vocab_size)[0][0], 16) for length in lengths
        ]
        session = self.bench.target().session
        return compare_logits(session, self.bench.config, self.bench.weights, requests)

    def steps(self) -> list[dict[str, Any]]:
        """Time generation steps for several batch sizes and contexts; trace some steps on a GPU."""
        target, rows = self.bench.target(), []
        quick = self.bench.options.quick
        steps = self.bench.scale.steps // 4 if quick else self.bench.scale.steps
        contexts = self.bench.scale.contexts[:1] if quick else self.bench.scale.contexts
        cases = [(batch, context) for context in contexts for batch in self.bench.scale.batches
                 if context == contexts[0] or batch < max(self.bench.scale.batches)]  # fmt: skip
        for batch, context in cases:
            if self.budget.is_spent:
                self.notes.append(f"steps of {batch} x {context}: no time left, skipped")
                continue
            has_goal = self.bench.is_goal_shape and context == 1024
            goal = _STEP_GOAL if has_goal else None
            rows.append(time_steps(target, batch, context, steps, goal))
        if target.trace is not None and not self.budget.is_spent:
            trace = trace_steps(target, max(self.bench.scale.batches), contexts[0], 4 * steps)
            rows.append({"trace": trace})
        return rows

    def load(self) -> list[dict[str, Any]]:
        """Time all requests without streaming, and unless `quick`, once more with streaming."""
        target, goal = self.bench.target(), _LOAD_GOAL if self.bench.is_goal_shape else None
        rows = [time_load(target, self.bench.requests, goal=goal)]
        if not self.bench.options.quick and not self.budget.is_spent:
            rows.append(time_load(target, self.bench.requests, streaming=True))
        return rows

    def ablations(self) -> list[dict[str, Any]]:
        """Time all requests, and steps of the smallest and the largest batch, for each ablation.

        The first row, "plain", is without an ablation. An ablation that managers refuse on this
        device is reported as skipped. After an ablation that fails, the next ablations still run.
        """
        rows = [self._ablated("plain", {})]
        plain = rows[0]["output_tokens_per_second"]
        for name in self.bench.options.ablations:
            try:
                rows.append(self._ablated(name, ABLATIONS[name]))
            except Exception as error:  # libraries raise errors of their own
                status = "skipped" if isinstance(error, ConfigError) else "failed"
                rows.append({"name": name, "status": status, "note": _first_line(error)})
                self.notes.append(f"{name}: {status}: {rows[-1]['note']}")
        for row in rows:
            if "output_tokens_per_second" in row:
                row["ratio"] = round(row["output_tokens_per_second"] / plain, 3)
        return rows

    def _ablated(self, name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Time one ablation in a new manager."""
        self.bench.close()
        try:
            self.bench.changes = changes
            target, context = self.bench.target(), self.bench.scale.contexts[0]
            batches = sorted({min(self.bench.scale.batches), max(self.bench.scale.batches)})
            steps = [
                time_steps(target, batch, context, self.bench.scale.steps // 4) for batch in batches
            ]
            return {"name": name, **time_load(target, self.bench.requests), "steps": steps}
        finally:
            self.bench.changes = {}
            self.bench.close()

    def transformers(self) -> dict[str, Any]:
        """Run the same requests with gptmanager and with transformers, each alone on the device."""
        if find_spec("transformers") is None:
            self.notes.append("transformers: not installed: skipped")
            return {"status": "skipped", "note": "not installed"}
        requests = self.bench.requests[: self.bench.scale.peer_requests]
        ours = max(self.bench.target().session.run(requests).tokens_per_second for _ in range(2))
        self.bench.close()
        params = OptionalParams(dtype=self.bench.dtype)
        row: dict[str, Any] = {"requests": len(requests), "gptmanager": round(ours, 1)}
        engine = TransformersPeer(self.bench.source, params, self.bench.device)
        try:
            theirs = engine.run(requests, _PEER_LIMIT_S).tokens_per_second
        except TooSlow as error:
            theirs = sum(new_tokens for _, new_tokens in requests) / _PEER_LIMIT_S
            row["note"] = f"{error}: this rate is an upper bound"
        ratio = ours / theirs
        goal = {"text": f">= {_PEER_GOAL:g} x", "met": ratio >= _PEER_GOAL}
        return {
            "status": "ok",
            **row,
            "transformers": round(theirs, 1),
            "ratio": round(ratio, 3),
            **({"goal": goal} if self.bench.is_goal_shape else {}),
        }

    def saturated(self) -> list[dict[str, Any]]:
        """Time loads that fill the KV cache, in batches of up to twice the usual size."""
        rows: list[dict[str, Any]] = []
        self.bench.close()
        target = self.bench.target(2 * self.bench.scale.max_batch_size)
        for prompt, new_tokens, count in self.bench.scale.saturated:
            name = f"{prompt}/{new_tokens}"
            if self.budget.is_spent:
                self.notes.append(f"saturated {name}: no time left, skipped")
                continue
            lengths = (prompt, prompt), (new_tokens, new_tokens)
            requests = uniform_requests(count, *lengths, self.bench.config["vocab_size"])
            rows.append({"name": name, **time_load(target, requests)})
        return rows

    def pressure(self) -> dict[str, Any]:
        """Compare capacity scheduler policies, each in a new manager."""
        self.bench.close()
        params = self.bench.params(self.bench.scale.max_batch_size)
        vocab_size = self.bench.config["vocab_size"]
        return compare_policies(self.bench.source, params, self.bench.scale.pressure, vocab_size)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
