"""A `TokenLoop` watched from outside while it runs, for a `Trace` of it.

Stands between the loop and its executor and host; changes nothing that passes through.
"""

from __future__ import annotations

from gptmanager.config import FinishReason
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.picture.builder import TraceBuilder
from gptmanager.picture.trace import Bounds
from gptmanager.recorder.taps import ExecutorTap, HostTap
from gptmanager.request.inference_request import NamedTensor
from gptmanager.step import Executor, Host, Intake, Schedule, Step


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


class _ObservedHost(HostTap):
    def __init__(self, host: Host, builder: TraceBuilder) -> None:
        super().__init__(host)
        self.now = 0.0
        self._builder = builder
        self._fetch, self.fetch = host.fetch, self._see_fetch
        self._respond, self.respond = host.respond, self._see_respond

    def _see_fetch(self, room: int | None, num_active: int) -> Intake:
        intake = self._fetch(room, num_active)
        self.now = intake.now
        return intake

    def _see_respond(
        self, request_id: int, tensors: list[NamedTensor], is_final: bool, error: str
    ) -> None:
        self._respond(request_id, tensors, is_final, error)
        if is_final:
            self._builder.end(request_id, error or finish_reason(tensors))


class _ObservedExecutor(ExecutorTap):
    def __init__(
        self, executor: Executor, loop: TokenLoop, host: _ObservedHost, builder: TraceBuilder
    ) -> None:
        super().__init__(executor)
        self._loop = loop
        self._host = host
        self._builder = builder
        self._forward, self.forward = executor.forward, self._see_forward

    def _see_forward(self, schedule: Schedule) -> Step:
        for request in self._loop.table.by_id.values():
            if request.request_id not in self._builder:
                self._builder.arrive(
                    request.request_id,
                    request.orig_prompt_len,
                    request.length_limit - request.orig_prompt_len,
                    request.priority,
                )
        self._builder.step(schedule, self._host.now)
        return self._forward(schedule)


def finish_reason(tensors: list[NamedTensor]) -> str:
    """The name of the first beam's finish reason; "" if the response tells none."""
    for name, tensor in tensors:
        if name == "finish_reasons":
            return FinishReason(int(tensor.flatten()[0])).name
    return ""
