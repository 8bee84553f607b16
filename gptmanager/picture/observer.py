"""A `TokenLoop` watched from outside while it runs, for a `Trace` of it.

Stands between the loop and its executor and host; changes nothing that passes through.
"""

from __future__ import annotations

from typing import Any

from gptmanager.config import FinishReason
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.picture.builder import TraceBuilder
from gptmanager.picture.trace import Bounds
from gptmanager.request.inference_request import NamedTensor
from gptmanager.request.post_processor import RequestProcessor
from gptmanager.statistics import Counts, PhaseTimes
from gptmanager.step import Executor, Failure, Host, Intake, Schedule, StepResult


def observe(loop: TokenLoop, *, policy: str = "", chunk_unit: int | None = None) -> TraceBuilder:
    """The builder that follows `loop` from now on; call `build()` whenever a trace is wanted."""
    kv_cache = loop.allocator.kv_cache
    builder = TraceBuilder(
        Bounds(
            max_batch_size=loop.max_batch_size,
            max_num_tokens=loop.max_num_tokens,
            num_blocks=kv_cache.get_max_resource_count(),
            tokens_per_block=kv_cache.tokens_per_block,
            policy=policy,
            chunk_unit=chunk_unit,
        )
    )
    clock = _ObservedHost(loop.host, builder)
    loop.executor = _ObservedExecutor(loop.executor, loop, clock, builder)
    loop.host = clock
    return builder


class _ObservedHost:
    def __init__(self, host: Host, builder: TraceBuilder) -> None:
        self._host = host
        self._builder = builder
        self.now = 0.0

    def fetch(self, room: int | None, num_active: int) -> Intake:
        intake = self._host.fetch(room, num_active)
        self.now = intake.now
        return intake

    def respond(
        self, request_id: int, tensors: list[NamedTensor], is_final: bool, error: str
    ) -> None:
        self._host.respond(request_id, tensors, is_final, error)
        if is_final:
            self._builder.end(request_id, error or finish_reason(tensors))

    def prepare(self, request_id: int, processor: RequestProcessor) -> None:
        self._host.prepare(request_id, processor)

    def fail(self, failure: Failure) -> None:
        self._host.fail(failure)

    def poll(self) -> None:
        self._host.poll()

    def report(self, counts: Counts, phase_times: PhaseTimes) -> None:
        self._host.report(counts, phase_times)


class _ObservedExecutor:
    def __init__(
        self, executor: Executor, loop: TokenLoop, host: _ObservedHost, builder: TraceBuilder
    ) -> None:
        self._executor = executor
        self._loop = loop
        self._host = host
        self._builder = builder

    def forward(self, schedule: Schedule) -> Any:
        for request in self._loop.table.by_id.values():
            if request.request_id not in self._builder:
                self._builder.arrive(
                    request.request_id,
                    request.orig_prompt_len,
                    request.length_limit - request.orig_prompt_len,
                    request.priority,
                )
        self._builder.step(schedule, self._host.now)
        return self._executor.forward(schedule)

    def sample(self, step: Any) -> None:
        self._executor.sample(step)

    def result(self, step: Any) -> StepResult:
        return self._executor.result(step)


def finish_reason(tensors: list[NamedTensor]) -> str:
    """The name of the first beam's finish reason; "" if the response tells none."""
    for name, tensor in tensors:
        if name == "finish_reasons":
            return FinishReason(int(tensor.flatten()[0])).name
    return ""
