"""The rules of a scheduler's contract, and the check of one answer against them.

This module checks single calls of `RequestScheduler.schedule_request`. `scenario_run` checks
whether requests end, and with which tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from gptmanager.assembly.blueprint import Blueprint
from gptmanager.errors import response_text
from gptmanager.kv_cache import KvCacheManager
from gptmanager.loop.active_request import ActiveRequest
from gptmanager.request.llm_request import LlmRequest, LlmRequestState, RequestList
from gptmanager.scheduler import RequestScheduler, SchedulerOutput

RULES: dict[str, str] = {
    "raises-nothing": "schedule_request does not raise",
    "three-lists": "the answer is three lists of requests: context, generation, paused",
    "own-requests": "every request of the answer is one of active_requests",
    "each-once": "no request is in the answer twice",
    "not-in-flight": "no request in inflight_request_ids is scheduled",
    "right-list": "context requests are in CONTEXT_INIT, generation requests in "
    "GENERATION_IN_PROGRESS",
    "chunk-size": "a chunk has at least one token, and is a multiple of tokens_per_block unless it "
    "ends the context",
    "batch-size": "no more than max_batch_size requests run in a step",
    "token-budget": "no more than max_num_tokens tokens run in a step",
    "slots": "no more requests are started at a time than the manager has slots",
    "memory": "requests that run get the KV cache blocks that they need",
    "pauses-the-started": "only a request that holds memory is paused",
    "never-pauses": "evicts=False: no request is paused",
    "list-untouched": "active_requests is not changed",
    "requests-untouched": "no field of a request is written except context_chunk_size, "
    "num_draft_tokens and estimated_reusable_tokens",
    "memory-untouched": "the KV cache manager is read, not changed",
    "progress": "a request runs when nothing is in flight",
    "no-starvation": "every accepted request ends",
    "same-decisions": "the same inputs lead to the same decisions",
    "one-final": "every accepted request gets one final response, and streamed tokens in order",
    "same-tokens": "a request generates the same tokens as when it runs alone",
    "accounts": "every block has the right owners, and is free at the end",
    "accepted": "the token loop can execute the answer",
}

_CONTEXT_INIT = LlmRequestState.CONTEXT_INIT
_IN_PROGRESS = LlmRequestState.GENERATION_IN_PROGRESS
_WRITABLE = {"_context_chunk_size", "num_draft_tokens", "estimated_reusable_tokens"}
_FIELDS = tuple(
    name for cls in (LlmRequest, ActiveRequest) for name in cls.__slots__ if name not in _WRITABLE
)

Complaint = tuple[str, int | None, str]  # rule, request id, details
Decision = tuple[tuple[tuple[int, int | None], ...], tuple[int, ...], tuple[int, ...]]


class Breach(Exception):
    """Raised when a rule is broken and the scenario cannot continue. `args` is the Complaint."""


@dataclass(slots=True, eq=False)
class JudgedScheduler(RequestScheduler):
    """Checks each answer of a scheduler, and raises Breach if it breaks a rule.

    `now` returns the number of the iteration. `decisions` has the answers that broke no rule, each
    with its iteration. `minor` has at most one complaint, with its iteration: the first call that
    changed the list active_requests. This breach raises nothing, so that the scenario continues.
    """

    scheduler: RequestScheduler
    blueprint: Blueprint
    kv_cache: KvCacheManager
    may_pause: bool
    now: Callable[[], int]
    decisions: list[tuple[int, Decision]] = field(default_factory=list)
    minor: list[tuple[int, Complaint]] = field(default_factory=list)

    def schedule_request(
        self, active_requests: RequestList, inflight_request_ids: Set[int]
    ) -> SchedulerOutput:
        given, requests = list(active_requests), list(active_requests)
        fields = [_fields(request) for request in requests]
        memory = _memory(self.kv_cache, requests)
        try:
            answer = self.scheduler.schedule_request(given, inflight_request_ids)
        except Exception as error:
            raise Breach("raises-nothing", None, f"it raised {response_text(error)}") from error
        self._check_untouched(requests, fields, memory)
        if not self.minor and [*map(id, given)] != [*map(id, requests)]:
            text = f"it received requests {_ids(requests)}, and left {_ids(given)} in the list"
            self.minor.append((self.now(), ("list-untouched", None, text)))
        output = _three_lists(answer)
        for complaint in self._complaints(output, requests, inflight_request_ids):
            raise Breach(*complaint)
        contexts = tuple((r.request_id, r.context_chunk_size) for r in output.context_requests)
        others = tuple(_ids(output.generation_requests)), tuple(_ids(output.paused_requests))
        self.decisions.append((self.now(), (contexts, *others)))
        return output

    def _check_untouched(
        self, requests: RequestList, fields: list[dict[str, Any]], memory: object
    ) -> None:
        if _memory(self.kv_cache, requests) != memory:
            text = "the blocks that requests hold changed during the call"
            raise Breach("memory-untouched", None, text)
        for request, before in zip(requests, fields, strict=True):
            for name, new in _fields(request).items():
                old = before[name]
                if old != new:
                    text = f"{name} was {old!r} before the call and is {new!r} after it"
                    raise Breach("requests-untouched", request.request_id, text)

    def _complaints(
        self, output: SchedulerOutput, given: RequestList, in_flight: Set[int]
    ) -> Iterator[Complaint]:
        """Yield the rules that an answer breaks, causes before consequences."""
        params = self.blueprint.params
        yield from _foreign(output, given)
        yield from _in_flight_or_wrong_list(output, in_flight)
        yield from self._wrong_chunks(output.context_requests)
        running = [*output.context_requests, *output.generation_requests]
        if len(running) > params.max_batch_size:
            text = (
                f"{len(running)} requests are to run (contexts {_ids(output.context_requests)}, "
                f"generation {_ids(output.generation_requests)}), "
                f"max_batch_size = {params.max_batch_size}"
            )
            yield "batch-size", running[params.max_batch_size].request_id, text
        costs = {r.request_id: _cost(r) for r in output.context_requests}
        num_tokens = sum(costs.values()) + len(output.generation_requests)
        if num_tokens > params.max_num_tokens:
            text = (
                f"{num_tokens} tokens are to run (contexts {_sizes(costs)}, generation "
                f"{len(output.generation_requests)}), max_num_tokens = {params.max_num_tokens}"
            )
            yield "token-budget", running[0].request_id, text
        for request in output.paused_requests:
            if not self.may_pause:
                yield "never-pauses", request.request_id, f"{request!r} is to be paused"
            if request.request_id not in self.kv_cache:
                text = f"{request!r} is to be paused, but holds no KV cache blocks"
                yield "pauses-the-started", request.request_id, text
        yield from self._too_many_started(output, given)

    def _wrong_chunks(self, contexts: RequestList) -> Iterator[Complaint]:
        unit = self.blueprint.sizes.tokens_per_block
        for request in contexts:
            size, remaining = request.context_chunk_size, request.context_remaining_length
            if size == 0:
                text = f"{remaining} tokens of its context remain, but its chunk has 0 tokens"
                yield "chunk-size", request.request_id, text
            elif size is not None and size < remaining and size % unit:
                text = (
                    f"a chunk of {size} of the {remaining} tokens that remain is to run, "
                    f"tokens_per_block = {unit}"
                )
                yield "chunk-size", request.request_id, text

    def _too_many_started(self, output: SchedulerOutput, given: RequestList) -> Iterator[Complaint]:
        paused = {request.request_id for request in output.paused_requests}
        started = [r for r in given if r.slot >= 0 and r.request_id not in paused]
        starting = [r for r in output.context_requests if r.slot < 0]
        if starting and len(started) + len(starting) > self.blueprint.num_slots:
            text = (
                f"requests {_ids(starting)} are to start while {_ids(started)} have "
                f"started and not ended: the manager has {self.blueprint.num_slots} slots"
            )
            yield "slots", starting[-1].request_id, text


def _three_lists(answer: Any) -> SchedulerOutput:
    try:
        context, generation, paused = map(list, answer)
    except (TypeError, ValueError):
        raise Breach("three-lists", None, f"it returned {answer!r}") from None
    for request in (*context, *generation, *paused):
        if not isinstance(request, LlmRequest):
            raise Breach("three-lists", None, f"{request!r} in its answer must be an LlmRequest")
    return SchedulerOutput(context, generation, paused)


def _foreign(output: SchedulerOutput, given: RequestList) -> Iterator[Complaint]:
    own = set(map(id, given))
    seen: set[int] = set()
    for request in chain(*output):
        if id(request) not in own:
            yield "own-requests", request.request_id, f"{request!r} was not among {_ids(given)}"
        if id(request) in seen:
            lists = [name for name, part in output._asdict().items() if request in part]
            text = f"it is in {' and '.join(lists)}" + " twice" * (len(lists) == 1)
            yield "each-once", request.request_id, text
        seen.add(id(request))


def _in_flight_or_wrong_list(output: SchedulerOutput, in_flight: Set[int]) -> Iterator[Complaint]:
    for requests, name, state in (
        (output.context_requests, "context", _CONTEXT_INIT),
        (output.generation_requests, "generation", _IN_PROGRESS),
    ):
        for request in requests:
            if request.request_id in in_flight:
                text = f"{request!r} is to run while it is in flight with {sorted(in_flight)}"
                yield "not-in-flight", request.request_id, text
            if request.state is not state:
                text = f"{request!r} is in the list of {name} requests"
                yield "right-list", request.request_id, text


def _cost(request: LlmRequest) -> int:
    """Return how many tokens of a context run in this step. Cached tokens do not count."""
    size, remaining = request.context_chunk_size, request.context_remaining_length
    if not request.context_current_position:
        remaining -= request.estimated_reusable_tokens
    return remaining if size is None or size > remaining else size


def _memory(kv_cache: KvCacheManager, requests: RequestList) -> object:
    held = [r.request_id for r in requests if r.request_id in kv_cache]
    tables = [(i, kv_cache.num_tokens(i), kv_cache.block_ids(i)) for i in held]
    return kv_cache.get_num_free_blocks(), tables


def _fields(request: LlmRequest) -> dict[str, Any]:
    values = {name: getattr(request, name, None) for name in _FIELDS}
    values["tokens"] = request.tokens.copy()
    if isinstance(request, ActiveRequest):
        values["times"], values["drafts"] = request.times.state(), request.drafts.state()
    return values


def _ids(requests: RequestList) -> list[int]:
    return [request.request_id for request in requests]


def _sizes(costs: dict[int, int]) -> str:
    return " + ".join(f"{cost} of request {i}" for i, cost in costs.items()) or "none"
