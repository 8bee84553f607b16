"""Runs of many requests on a model with a state: chunks, pauses, reused slots, ends, cancels."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from gptmanager import (
    CapacitySchedulerPolicy,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.testing import RecordingCallbacks

Continue = Callable[[Sequence[Sequence[int]], int], list[list[int]]]


class CancellingHost(RecordingCallbacks):
    """A host that stops some of its streams once they have two responses."""

    def __init__(self, requests: Sequence[InferenceRequest], cancelled: set[int]) -> None:
        super().__init__(requests)
        self.cancelled = cancelled

    def send_response(self, request_id: int, *rest: Any) -> None:
        super().send_response(request_id, *rest)
        if request_id in self.cancelled and len(self.of(request_id)) == 2:
            self.stop(request_id)

    def total(self, name: str) -> int:
        """The sum of one of the statistics over all iterations."""
        return sum(json.loads(record)[name] for record in self.statistics)


def run_many(
    model: Any,
    continued: Continue,
    count: int = 200,
    *,
    policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.MAX_UTILIZATION,
    cache: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> CancellingHost:
    """Run `count` greedy requests over few slots and blocks; each must be as if it were alone."""
    drawn = random.Random(3)
    vocab = model.spec.vocab_size if hasattr(model, "spec") else 96
    common = [drawn.randrange(1, vocab) for _ in range(9)] if cache else []
    prompts = [
        [*common[: drawn.choice((0, 9, 9))]]
        + [drawn.randrange(1, vocab) for _ in range(drawn.choice((1, 2, 5, 9, 17, 30)))]
        for _ in range(40)
    ]
    outputs = continued(prompts, 30)
    requests, wanted, cancelled = [], {}, set()
    for number in range(count):
        prompt, length = prompts[number % len(prompts)], drawn.randint(12, 30)
        full = outputs[number % len(prompts)][:length]
        given: dict[str, Any] = {}
        if number % 4 == 1:  # ends early, by a token or by a text
            at = drawn.randrange(len(full))
            end, full = full[at], full[: full.index(full[at])]
            given = {"end_id": end} if number % 8 == 1 else {"stop_words_list": [[end]]}
        elif number % 10 == 4:
            cancelled.add(number)
            given = {"is_streaming": True}
        requests.append(InferenceRequest.from_tokens(number, prompt, length, **given))
        wanted[number] = full
    host = CancellingHost(requests, cancelled)
    params = OptionalParams(
        kv_cache_config=KvCacheConfig(**{"max_tokens": 72, "tokens_per_block": 8, **cache}),
        max_batch_size=7,
        max_num_tokens=24,
        exclude_input_in_output=True,
        **options,
    )
    config = SchedulerConfig(policy)
    given_model = model, ModelType.INFLIGHT_FUSED_BATCHING
    with GptManager(
        *given_model, scheduler_config=config, optional_params=params, **host.keywords()
    ) as manager:
        manager.wait_idle()
        assert manager.audit().ok
    for number, full in wanted.items():
        assert not host.final(number).error
        own = host.output(number)
        assert own == (full[: len(own)] if number in cancelled else full), number
    return host
