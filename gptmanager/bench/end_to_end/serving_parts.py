"""The parts of the end-to-end benchmark: generation steps, loads, policies under pressure.

Managers are used only through their public interface. `roofline` computes floors, the lower bounds
of times, from the measured ceilings. A time is compared with its floor if `roofline` knows the
model's family.
"""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from gptmanager.bench.end_to_end.device_trace import DeviceEvent, idle_share, split
from gptmanager.bench.engine import IterationLog, Session
from gptmanager.bench.load import Request, Source, uniform_requests
from gptmanager.bench.roofline import Ceilings, ModelShape
from gptmanager.bench.timing import Spread
from gptmanager.callbacks import RequestQueue
from gptmanager.config import CapacitySchedulerPolicy, OptionalParams, SchedulerConfig
from gptmanager.request.inference_request import NamedTensor, SendResponseCallback

_SETTLING = 4  # first steps of a batch, which are not counted
_TRACE_S = 0.25
_START_S = 60.0  # limit of the time until a batch generates
_PRESSURE_GOAL = 0.95
_POLICIES = (CapacitySchedulerPolicy.GUARANTEED_NO_EVICT, CapacitySchedulerPolicy.MAX_UTILIZATION)


@dataclass(frozen=True, eq=False)
class Target:
    """A started manager, its limits, and the ceilings with which its figures are compared.

    `shape` is None if the floors of the model are not known. `trace(seconds)` traces the GPU; it is
    None without a GPU.
    """

    session: Session
    log: IterationLog
    vocab_size: int
    max_num_tokens: int
    max_batch_size: int
    ceilings: Ceilings
    shape: ModelShape | None
    trace: Callable[[float], Sequence[DeviceEvent]] | None = None


@dataclass(frozen=True, slots=True)
class Pressure:
    """A load of requests that end before their limit, with a small KV cache.

    There are `requests` requests, each with `prompt_len` prompt tokens and a limit of
    `max_new_tokens` generated tokens. A request is cancelled after a random number of generated
    tokens, from `ends[0]` to `ends[1]` (included). The KV cache has space for `kv_cache_tokens`.
    """

    requests: int
    prompt_len: int
    max_new_tokens: int
    ends: tuple[int, int]
    kv_cache_tokens: int


def time_steps(
    target: Target, batch_size: int, context: int, num_steps: int, goal: float | None = None
) -> dict[str, Any]:
    """Time generation steps of a batch with about `context` tokens per sequence.

    A step's time is the time between the statistics callbacks of two iterations. `goal` is the
    allowed multiple of the floor. A batch that the KV cache cannot hold is skipped.
    """
    requests = _equal_requests(target, batch_size, context, num_steps)
    reason = _reason_not_to_fit(target, requests)
    if reason:
        return {"batch": batch_size, "context": context, "status": "skipped", "note": reason}
    start = len(target.log)
    target.session.results(requests)
    seconds = target.log.step_seconds(batch_size, start)[_SETTLING:]
    row: dict[str, Any] = {"batch": batch_size, "context": context}
    if not seconds:
        return {**row, "status": "failed", "note": "the batch never ran at its full size"}
    spread = Spread.of(seconds)
    row |= {
        "status": "ok",
        "median_ms": round(spread.median * 1e3, 4),
        "best_ms": round(spread.best * 1e3, 4),
        "quartiles_ms": [round(cut * 1e3, 4) for cut in spread.quartiles],
        "steps": spread.rounds,
        "tokens_per_second": round(batch_size / spread.median, 1),
    }
    if target.shape is not None:
        floor = target.shape.step_s(target.ceilings, batch_size, context)
        row |= {"floor_ms": round(floor * 1e3, 4), **_ratio(spread.median / floor, goal)}
    return row


def _ratio(times: float, goal: float | None) -> dict[str, Any]:
    """Return `times`, the ratio of a time to its floor, as a field, and any goal as another."""
    row: dict[str, Any] = {"times_floor": round(times, 3)}
    if goal is not None:
        row["goal"] = {"text": f"<= {goal:g} x floor", "met": times <= goal}
    return row


def _reason_not_to_fit(target: Target, requests: Sequence[Request]) -> str:
    """Return why the KV cache cannot hold all requests at once; "" if it can."""
    last = target.log.last()
    if last is None:
        return ""
    block = last["Tokens per KV cache block"]
    needed = sum(-(-(len(prompt) + new_tokens) // block) for prompt, new_tokens in requests)
    if needed <= last["Max KV cache blocks"]:
        return ""
    return f"needs {needed} blocks of the KV cache, which has {last['Max KV cache blocks']}"


def trace_steps(target: Target, batch_size: int, context: int, num_steps: int) -> dict[str, Any]:
    """Trace the GPU to measure how long it waits for the host in each step.

    The profiler slows the traced steps down, so `time_steps` measures steps without a trace.
    """
    if target.trace is None:
        return {"status": "skipped", "note": "no GPU to trace"}
    requests = _equal_requests(target, batch_size, context, num_steps)
    reason = _reason_not_to_fit(target, requests)
    if reason:
        return {"status": "skipped", "note": reason}
    try:
        target.trace(0.0)  # the first trace takes seconds to start
    except RuntimeError as error:
        return {"status": "failed", "note": f"no trace: {error}"}
    start = len(target.log)
    generations = target.session.start(requests)
    deadline = time.monotonic() + _START_S
    while len(target.log.step_seconds(batch_size, start)) < _SETTLING:
        if time.monotonic() > deadline or all(own.done() for own in generations):
            break
        time.sleep(0.02)
    try:
        events = target.trace(_TRACE_S)
        idle, waited = idle_share([(it.begin, it.end) for it in events])
    except (RuntimeError, ValueError) as error:
        return {"status": "failed", "note": f"no trace: {error}"}
    finally:
        for generation in generations:
            generation.result()
    seconds = target.log.step_seconds(batch_size, start)[_SETTLING:]
    if not seconds:
        return {"status": "failed", "note": "the batch never ran at its full size"}
    step_ms = statistics.median(seconds) * 1e3
    exposed = waited * step_ms
    return {
        "status": "ok",
        "batch": batch_size,
        "context": context,
        "busy_share": round(1 - idle, 4),
        "exposed_host_ms": round(exposed, 4),
        "split_ms": {kind: round(share * step_ms, 4) for kind, share in split(events).items()},
        "goal": {"text": "<= 0.3 ms", "met": exposed <= 0.3},
    }


def time_load(
    target: Target,
    requests: Sequence[Request],
    *,
    streaming: bool = False,
    goal: float | None = None,
) -> dict[str, Any]:
    """Time all requests at once, from the first submit to the last final response.

    `goal` is the allowed multiple of the floor.
    """
    target.log.restart()
    figures = target.session.run(requests, is_streaming=streaming)
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
        **target.log.counts(),
        **figures.latencies,
    }
    host_ms = target.log.host_milliseconds()
    if target.trace is not None and host_ms is not None:  # on a CPU this would be the model's time
        row["host_ms_per_iteration"] = round(host_ms, 3)
    if target.shape is not None:
        lengths = [(len(prompt), new_tokens) for prompt, new_tokens in requests]
        floor = target.shape.load_s(target.ceilings, lengths, target.max_batch_size)
        row |= {
            "floor_s": round(floor, 3),
            "share_of_roofline": round(floor / figures.seconds, 4),
            **_ratio(figures.seconds / floor, goal),
        }
    return row


def compare_policies(
    source: Source, params: OptionalParams, pressure: Pressure, vocab_size: int
) -> dict[str, Any]:
    """Run the load with both policies, each in a new manager; return figures and their ratio.

    Requests end before their limit, as in real traffic. So GUARANTEED_NO_EVICT reserves memory for
    tokens that are never generated. MAX_UTILIZATION runs more requests at once, and pauses some.
    """
    lengths = (pressure.prompt_len,) * 2
    requests = uniform_requests(
        pressure.requests, lengths, (pressure.max_new_tokens,) * 2, vocab_size
    )
    generator = random.Random(1)
    ends = [generator.randint(*pressure.ends) for _ in requests]
    cache = replace(params.kv_cache_config, max_tokens=pressure.kv_cache_tokens)
    params = replace(params, kv_cache_config=cache)
    rows = {
        policy.name.lower(): _run_policy(source, params, policy, requests, ends)
        for policy in _POLICIES
    }
    no_evict, max_utilization = (row["output_tokens_per_second"] for row in rows.values())
    ratio = max_utilization / no_evict
    return {
        "status": "ok",
        "requests": pressure.requests,
        "kv_cache_tokens": pressure.kv_cache_tokens,
        "policies": rows,
        "ratio": round(ratio, 3),
        "goal": {"text": f">= {_PRESSURE_GOAL:g} x", "met": ratio >= _PRESSURE_GOAL},
    }


def _run_policy(
    source: Source,
    params: OptionalParams,
    policy: CapacitySchedulerPolicy,
    requests: Sequence[Request],
    ends: Sequence[int],
) -> dict[str, Any]:
    log = IterationLog()
    send = functools.partial(_ending_early, lengths=ends)
    with Session(source, params, SchedulerConfig(policy), log=log, send=send) as session:
        session.warm_up()
        log.restart()
        started = time.monotonic()
        generations = [
            session.queue.submit(prompt, new_tokens, request_id=number, is_streaming=True)
            for number, (prompt, new_tokens) in enumerate(requests)
        ]
        outputs = [generation.result().generated_ids[0] for generation in generations]
        seconds = time.monotonic() - started
    return {
        "seconds": round(seconds, 3),
        "output_tokens_per_second": round(sum(map(len, outputs)) / seconds, 1),
        **log.counts(),
    }


def _ending_early(queue: RequestQueue, lengths: Sequence[int]) -> SendResponseCallback:
    """Return a SendResponse callback that passes responses to `queue`, and cancels request i once
    it has generated `lengths[i]` tokens.
    """
    left = dict(enumerate(lengths))

    def send(request_id: int, tensors: list[NamedTensor], is_final: bool, error: str) -> None:
        queue.send_response(request_id, tensors, is_final, error)
        if is_final or request_id not in left:
            return
        for name, tensor in tensors:
            if name == "sequence_length":
                left[request_id] -= int(tensor.item())
        if left[request_id] <= 0:
            del left[request_id]
            queue.cancel(request_id)

    return send


def _equal_requests(target: Target, batch_size: int, context: int, num_steps: int) -> list[Request]:
    """Return requests that all generate during `num_steps` steps, with about `context` tokens."""
    per_iteration = max(1, target.max_num_tokens // context)
    filling = -(-batch_size // per_iteration) + _SETTLING  # iterations until all requests generate
    new_tokens = num_steps + filling + 1
    length = max(1, context - filling - num_steps // 2)
    generator = torch.Generator().manual_seed(batch_size)
    prompts = torch.randint(0, target.vocab_size, (batch_size, length), generator=generator)
    return [(prompt, new_tokens) for prompt in prompts.tolist()]
