"""A model with a state, and runs of many requests: chunks, pauses, reused slots, ends, cancels."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch

from gptmanager import (
    CapacitySchedulerPolicy,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.memory.slot_states import StateShape
from gptmanager.testing import RecordingCallbacks
from gptmanager.testing.hosts import ScriptedSpec

MODULUS = 89


@dataclass(frozen=True)
class StatefulSpec(ScriptedSpec):
    states: tuple[StateShape, ...] = field(
        default=(StateShape((2,), torch.int64), StateShape((3, 5)), StateShape((2,), torch.int64))
    )


class Digesting:
    """A model whose next token is a digest of all tokens, which only its states have seen."""

    nbytes = 0

    def __init__(self) -> None:
        self.spec = StatefulSpec(MODULUS, 100)
        self.fails_at: set[int] = set()  # the numbers of forwards that fail after changing states
        self.num_forwards = 0

    def forward(self, batch: Any, kv_pool: Any) -> torch.Tensor:
        self.num_forwards += 1
        states = kv_pool.states.tensors[0]
        digests = []
        for (start, stop), slot in zip(
            pairwise(batch.row_starts.tolist()), batch.slots.tolist(), strict=True
        ):
            count, digest = states[slot].tolist()
            assert count == batch.positions[start]  # cleared where another sequence begins
            for token in batch.token_ids[start:stop].tolist():
                count, digest = count + 1, (31 * digest + token + count) % MODULUS
                digests.append(digest)
            states[slot] = torch.tensor([count, digest])
        if self.num_forwards in self.fails_at:
            raise torch.OutOfMemoryError("out of memory: tried to allocate 2.00 GiB")
        logits = torch.zeros(len(batch.sample_index), MODULUS)
        chosen = [digests[at] for at in batch.sample_index.tolist()]
        logits[range(len(chosen)), chosen] = 1
        return logits


def continued(prompt: Any, count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        digest = 0
        for number, token in enumerate(text):
            digest = (31 * digest + token + number) % MODULUS
        text.append(digest)
    return text[len(prompt) :]


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
    prompts = [
        [drawn.randrange(1, vocab) for _ in range(drawn.choice((1, 2, 5, 9, 17, 30)))]
        for _ in range(40)
    ]
    if cache:  # some have a common beginning
        common = [drawn.randrange(1, vocab) for _ in range(9)]
        prompts = [[*common, *it] if number % 3 else it for number, it in enumerate(prompts)]
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
