"""What the end-to-end benchmark times on one manager: generation steps, and whole loads.

Knows managers by their public interface alone. Figures stand beside the floors of the measured
ceilings where the model is one that floors are known of.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gptmanager.bench.device_trace import Ran, idle_share, split
from gptmanager.bench.engine import IterationLog, Session
from gptmanager.bench.load import Request
from gptmanager.bench.roofline import Ceilings, ModelShape
from gptmanager.bench.timing import Spread

_SETTLING = 4  # steps of a batch that are not counted
_TRACE_S = 0.25
_START_S = 60.0  # until a batch generates, at most


@dataclass(frozen=True, eq=False)
class Stage:
    """A manager at work, and what its figures are compared with. `trace`: None: no GPU."""

    session: Session
    log: IterationLog
    vocab_size: int
    max_num_tokens: int
    max_batch_size: int
    ceilings: Ceilings
    shape: ModelShape | None
    trace: Callable[[float], Sequence[Ran]] | None = None


def time_steps(
    stage: Stage, batch_size: int, context: int, num_steps: int, goal_ms: float | None = None
) -> dict[str, Any]:
    """Generation steps of a batch, of about `context` tokens each, by the clock of the host."""
    requests = _same_length(stage, batch_size, context, num_steps)
    start = len(stage.log)
    stage.session.results(requests)
    seconds = stage.log.step_seconds(batch_size, start)[_SETTLING:]
    row: dict[str, Any] = {"batch": batch_size, "context": context}
    if not seconds:
        return {**row, "status": "failed", "note": "the batch never ran as a whole"}
    spread = Spread.of(seconds)
    row |= {
        "status": "ok",
        "median_ms": round(spread.median * 1e3, 4),
        "best_ms": round(spread.best * 1e3, 4),
        "quartiles_ms": [round(cut * 1e3, 4) for cut in spread.quartiles],
        "steps": spread.rounds,
        "tokens_per_second": round(batch_size / spread.median, 1),
    }
    if stage.shape is not None:
        floor = stage.shape.step_s(stage.ceilings, batch_size, context)
        row |= {"floor_ms": round(floor * 1e3, 4), "times_floor": round(spread.median / floor, 3)}
    if goal_ms is not None:
        row["goal"] = {"text": f"<= {goal_ms:g} ms", "met": spread.median * 1e3 <= goal_ms}
    return row


def trace_steps(stage: Stage, batch_size: int, context: int, num_steps: int) -> dict[str, Any]:
    """In how much of such a step the device waits for the host. Other steps than those timed: a
    profiler looks on.
    """
    if stage.trace is None:
        return {"status": "skipped", "note": "no GPU to watch"}
    try:
        stage.trace(0.0)  # its first use takes seconds
    except RuntimeError as error:
        return {"status": "failed", "note": f"no trace: {error}"}
    start = len(stage.log)
    generations = stage.session.start(_same_length(stage, batch_size, context, num_steps))
    deadline = time.monotonic() + _START_S
    while len(stage.log.step_seconds(batch_size, start)) < _SETTLING:
        if time.monotonic() > deadline or all(own.done() for own in generations):
            break
        time.sleep(0.02)
    try:
        ran = stage.trace(_TRACE_S)
        idle, waited = idle_share([(it.begin, it.end) for it in ran])
    except (RuntimeError, ValueError) as error:
        return {"status": "failed", "note": f"no trace: {error}"}
    finally:
        for generation in generations:
            generation.result()
    seconds = stage.log.step_seconds(batch_size, start)[_SETTLING:]
    if not seconds:
        return {"status": "failed", "note": "the batch never ran as a whole"}
    step_ms = statistics.median(seconds) * 1e3
    exposed = waited * step_ms
    return {
        "status": "ok",
        "batch": batch_size,
        "context": context,
        "busy_share": round(1 - idle, 4),
        "exposed_host_ms": round(exposed, 4),
        "split_ms": {kind: round(share * step_ms, 4) for kind, share in split(ran).items()},
        "goal": {"text": "<= 0.3 ms", "met": exposed <= 0.3},
    }


def time_load(
    stage: Stage, requests: Sequence[Request], *, streaming: bool = False, goal: float | None = None
) -> dict[str, Any]:
    """All requests at once, from the first submit to the last final response."""
    stage.log.restart()
    figures = stage.session.run(requests, is_streaming=streaming)
    tokens_in = sum(len(prompt) for prompt, _ in requests)
    tokens_out = sum(map(len, figures.outputs))
    speed = tokens_out / figures.seconds
    row: dict[str, Any] = {
        "status": "ok",
        "requests": len(requests),
        "tokens_in": tokens_in,
        "tokens_out": tokens_out,
        "streaming": streaming,
        "seconds": round(figures.seconds, 3),
        "output_tokens_per_second": round(speed, 1),
        "total_tokens_per_second": round((tokens_in + tokens_out) / figures.seconds, 1),
        "requests_per_second": round(len(requests) / figures.seconds, 2),
        **stage.log.counts(),
        **figures.latencies,
    }
    host_ms = stage.log.host_milliseconds()
    if stage.trace is not None and host_ms is not None:  # on a CPU it would be the model's
        row["host_ms_per_iteration"] = round(host_ms, 3)
    if stage.shape is not None:
        lengths = [(len(prompt), new_tokens) for prompt, new_tokens in requests]
        floor = stage.shape.load_s(stage.ceilings, lengths, stage.max_batch_size)
        row |= {
            "floor_s": round(floor, 3),
            "share_of_roofline": round(floor / figures.seconds, 4),
        }
    if goal is not None:
        row["goal"] = {"text": f">= {goal:,.0f} output tokens/s", "met": speed >= goal}
    return row


def _same_length(stage: Stage, batch_size: int, context: int, num_steps: int) -> list[Request]:
    """Requests that all generate at once for `num_steps` steps, around `context` tokens each."""
    per_iteration = max(1, stage.max_num_tokens // context)
    filling = -(-batch_size // per_iteration) + _SETTLING  # iterations until the last one generates
    new_tokens = num_steps + filling + 1
    length = max(1, context - filling - num_steps // 2)
    generator = torch.Generator().manual_seed(batch_size)
    prompts = torch.randint(0, stage.vocab_size, (batch_size, length), generator=generator)
    return [(prompt, new_tokens) for prompt in prompts.tolist()]
