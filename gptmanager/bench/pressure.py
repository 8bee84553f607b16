"""Two policies on a KV cache that is too small for what its requests may become.

Requests may get long and end early, as those of people do: GUARANTEED_NO_EVICT keeps room for what
never comes, MAX_UTILIZATION takes more at a time and pauses some. Each in a manager of its own.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gptmanager.bench.engine import IterationLog, Session
from gptmanager.bench.load import Request, Source, uniform_requests
from gptmanager.callbacks import RequestQueue
from gptmanager.config import CapacitySchedulerPolicy, OptionalParams, SchedulerConfig
from gptmanager.request.inference_request import NamedTensor

_GOAL = 0.95
_POLICIES = (CapacitySchedulerPolicy.GUARANTEED_NO_EVICT, CapacitySchedulerPolicy.MAX_UTILIZATION)


@dataclass(frozen=True, slots=True)
class Pressure:
    """`requests` of `prompt_len` tokens that may get `max_new_tokens` and end after `ends`, both
    ends of the range included, over a KV cache of `kv_cache_tokens`.
    """

    requests: int
    prompt_len: int
    max_new_tokens: int
    ends: tuple[int, int]
    kv_cache_tokens: int


class EarlyEnds:
    """A SendResponse callback before a queue: a request is stopped once it has its tokens."""

    def __init__(self, queue: RequestQueue, lengths: Sequence[int]) -> None:
        self._queue = queue
        self._left = dict(enumerate(lengths))

    def __call__(
        self, request_id: int, tensors: list[NamedTensor], is_final: bool, error: str
    ) -> None:
        self._queue.send_response(request_id, tensors, is_final, error)
        if is_final or request_id not in self._left:
            return
        for name, tensor in tensors:
            if name == "sequence_length":
                self._left[request_id] -= int(tensor.item())
        if self._left[request_id] <= 0:
            del self._left[request_id]
            self._queue.cancel(request_id)


def compare_policies(
    source: Source, params: OptionalParams, pressure: Pressure, vocab_size: int
) -> dict[str, Any]:
    """Output tokens a second under both, and the ratio."""
    lengths = (pressure.prompt_len,) * 2
    requests = uniform_requests(
        pressure.requests, lengths, (pressure.max_new_tokens,) * 2, vocab_size
    )
    chance = random.Random(1)
    ends = [chance.randint(*pressure.ends) for _ in requests]
    cache = replace(params.kv_cache_config, max_tokens=pressure.kv_cache_tokens)
    params = replace(params, kv_cache_config=cache)
    rows = {
        policy.name.lower(): _run(source, params, policy, requests, ends) for policy in _POLICIES
    }
    no_evict, max_utilization = (row["output_tokens_per_second"] for row in rows.values())
    ratio = max_utilization / no_evict
    return {
        "status": "ok",
        "requests": pressure.requests,
        "kv_cache_tokens": pressure.kv_cache_tokens,
        "policies": rows,
        "ratio": round(ratio, 3),
        "goal": {"text": f">= {_GOAL:g} x", "met": ratio >= _GOAL},
    }


def _run(
    source: Source,
    params: OptionalParams,
    policy: CapacitySchedulerPolicy,
    requests: Sequence[Request],
    ends: Sequence[int],
) -> dict[str, Any]:
    log = IterationLog()
    send = functools.partial(EarlyEnds, lengths=ends)
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
