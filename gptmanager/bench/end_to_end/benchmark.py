"""`gptmanager bench e2e`: benchmarks a whole model behind a manager, in several parts.

One of the parts compares the manager with transformers. This module decides which parts run, in
which order and with which goals. It skips parts when the time is over, and reports parts that fail.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from gptmanager.bench.end_to_end.dense_reference import compare_logits, unsupported_reason
from gptmanager.bench.end_to_end.serving_parts import (
    Target,
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

    Raises ConfigError for unknown parts, and if `device` is a GPU that does not exist. A part or a
    row that fails is reported, and all others still run. After Ctrl-C the report has the results so
    far and `interrupted`. `on_report` is called with the report before each part and after each row
    of a part, so that results are not lost if the benchmark is killed; `running` is then the name
    of the part. `on_start` is called before each part with the part's name, the part's number from
    0, and the number of parts. Each manager calls `on_progress` while it loads.
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
                on_report({**current_report(), "running": name})
                on_start(name, number, len(names))
                for results in parts.run(name):
                    report[name] = results
                    on_report({**current_report(), "running": name})
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
    """One method per part; it returns the results, or yields them row by row.

    `notes` collects sentences about parts and rows that were skipped or failed.
    """

    bench: Workbench
    budget: Budget
    notes: list[str]

    def run(self, name: str) -> Iterator[Any]:
        """Run a part and yield its results; if these are rows, yield all rows so far after each."""
        if self.budget.is_spent:
            self.notes.append(f"{name}: no time left, skipped")
            yield {"status": "skipped", "note": "no time left"}
            return
        try:
            results = getattr(self, name)()
            if isinstance(results, Mapping):
                yield results
                return
            rows: list[Any] = []
            yield rows
            for row in results:
                rows.append(row)
                yield rows
        except Exception as error:  # peers raise errors of their own libraries
            yield self._failed(name, error)

    def _failed(self, what: str, error: Exception) -> dict[str, Any]:
        """Return a result that says why `what` failed. The next part or row gets a new manager."""
        text = _first_line(error)
        self.notes.append(f"{what}: failed: {text}")
        self.bench.close()
        return {"status": "failed", "note": f"{type(error).__name__}: {text}"}

    def _row(
        self,
        what: str,
        fields: Mapping[str, Any],
        work: Callable[[Target], Mapping[str, Any]],
        max_batch_size: int | None = None,
    ) -> dict[str, Any]:
        """Return `fields` with the results of `work`, or with the reason why it failed."""
        try:
            return {**fields, **work(self.bench.target(max_batch_size))}
        except Exception as error:
            return {**fields, **self._failed(what, error)}

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

    def steps(self) -> Iterator[dict[str, Any]]:
        """Time generation steps for several batch sizes and contexts; trace some steps on a GPU."""
        has_trace = self.bench.target().trace is not None
        quick = self.bench.options.quick
        steps = self.bench.scale.steps // 4 if quick else self.bench.scale.steps
        contexts = self.bench.scale.contexts[:1] if quick else self.bench.scale.contexts
        cases = [(batch, context) for context in contexts for batch in self.bench.scale.batches
                 if context == contexts[0] or batch < max(self.bench.scale.batches)]  # fmt: skip
        for batch, context in cases:
            what = f"steps of {batch} x {context}"
            if self.budget.is_spent:
                self.notes.append(f"{what}: no time left, skipped")
                continue
            has_goal = self.bench.is_goal_shape and context == 1024
            goal = _STEP_GOAL if has_goal else None
            work = partial(
                time_steps, batch_size=batch, context=context, num_steps=steps, goal=goal
            )
            yield self._row(what, {"batch": batch, "context": context}, work)
        if has_trace and not self.budget.is_spent:
            batch, context = max(self.bench.scale.batches), contexts[0]
            work = partial(trace_steps, batch_size=batch, context=context, num_steps=4 * steps)
            yield {"trace": self._row("trace", {}, work)}

    def load(self) -> Iterator[dict[str, Any]]:
        """Time all requests without streaming, and unless `quick`, once more with streaming."""
        self.bench.target()
        goal = _LOAD_GOAL if self.bench.is_goal_shape else None
        yield self._load("load", goal=goal)
        if not self.bench.options.quick and not self.budget.is_spent:
            yield self._load("load, streaming", streaming=True)

    def _load(
        self, what: str, streaming: bool = False, goal: float | None = None
    ) -> dict[str, Any]:
        requests = self.bench.requests
        work = partial(time_load, requests=requests, streaming=streaming, goal=goal)
        return self._row(what, {"requests": len(requests), "streaming": streaming}, work)

    def ablations(self) -> Iterator[dict[str, Any]]:
        """Time all requests, and steps of the smallest and the largest batch, for each ablation.

        The first row, "plain", is without an ablation. An ablation that managers refuse on this
        device is reported as skipped.
        """
        plain = None
        for name in ("plain", *self.bench.options.ablations):
            changes = ABLATIONS.get(name, {})
            try:
                row = self._ablated(name, changes)
            except Exception as error:  # libraries raise errors of their own
                status = "skipped" if changes and isinstance(error, ConfigError) else "failed"
                row = {"name": name, "status": status, "note": _first_line(error)}
                self.notes.append(f"{name}: {status}: {row['note']}")
            speed = row.get("output_tokens_per_second")
            plain = speed if name == "plain" else plain
            if speed and plain:
                row["ratio"] = round(speed / plain, 3)
            yield row

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

    def saturated(self) -> Iterator[dict[str, Any]]:
        """Time loads that fill the KV cache, in batches of up to twice the usual size."""
        self.bench.close()
        max_batch_size = 2 * self.bench.scale.max_batch_size
        self.bench.target(max_batch_size)
        for prompt, new_tokens, count in self.bench.scale.saturated:
            name = f"{prompt}/{new_tokens}"
            if self.budget.is_spent:
                self.notes.append(f"saturated {name}: no time left, skipped")
                continue
            lengths = (prompt, prompt), (new_tokens, new_tokens)
            requests = uniform_requests(count, *lengths, self.bench.config["vocab_size"])
            fields = {"name": name, "requests": count, "streaming": False}
            work = partial(time_load, requests=requests)
            yield self._row(f"saturated {name}", fields, work, max_batch_size)

    def pressure(self) -> dict[str, Any]:
        """Compare capacity scheduler policies, each in a new manager."""
        self.bench.close()
        params = self.bench.params(self.bench.scale.max_batch_size)
        vocab_size = self.bench.config["vocab_size"]
        return compare_policies(self.bench.source, params, self.bench.scale.pressure, vocab_size)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
