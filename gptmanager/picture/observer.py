"""`observe`: traces a running `TokenLoop`.

The loop's scheduler, executor and host are wrapped in objects that pass every call on unchanged.
"""

from __future__ import annotations

from gptmanager.errors import DuplicateRequestIdError, error_class
from gptmanager.loop.responses import finish_reason_name
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.picture.builder import TraceBuilder
from gptmanager.picture.trace import Bounds
from gptmanager.picture.wait_reporter import WaitReporter
from gptmanager.recorder.taps import ExecutorTap, HostTap
from gptmanager.request.inference_request import NamedTensor
from gptmanager.step import Intake, Schedule, Step, StepResult


def observe(loop: TokenLoop, *, policy: str = "", chunk_unit: int | None = None) -> TraceBuilder:
    """Return a builder that follows `loop` from now on. Its `build()` may be called at any time."""
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
    host, executor = loop.table.host, loop.executor
    host_tap, executor_tap = HostTap(host), ExecutorTap(executor)
    scheduler, now = WaitReporter(loop.scheduler), 0.0

    def fetch(room: int | None, num_active: int) -> Intake:
        nonlocal now
        intake = host.fetch(room, num_active)
        now = intake.now
        return intake

    def respond(request_id: int, tensors: list[NamedTensor], is_final: bool, error: str) -> None:
        host.respond(request_id, tensors, is_final, error)
        if is_final and error_class(error) != DuplicateRequestIdError.__name__:
            builder.end(request_id, error or finish_reason_name(tensors, ""))

    def forward(schedule: Schedule) -> Step:
        for request in loop.table.by_id.values():
            if request.request_id not in builder:
                builder.arrive(
                    request.request_id,
                    request.orig_prompt_len,
                    request.end_rule.max_new_tokens,
                    request.priority,
                )
        builder.step(schedule, now, scheduler.take())
        return executor.forward(schedule)

    def result(step: Step) -> StepResult:
        found = executor.result(step)
        builder.confirm(step.schedule, found)
        return found

    host_tap.fetch, host_tap.respond = fetch, respond
    executor_tap.forward, executor_tap.result = forward, result
    loop.scheduler, loop.table.host, loop.executor = scheduler, host_tap, executor_tap
    return builder
