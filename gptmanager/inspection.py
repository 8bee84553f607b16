"""Answers about a loop between two iterations: who owns which block, and why a request waits.

Reads only; every number comes from the objects that decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from gptmanager.active import ActiveRequest
from gptmanager.admission import admit
from gptmanager.api import InferenceRequest
from gptmanager.errors import GptManagerError, RequestError, response_text
from gptmanager.loop import TokenLoop
from gptmanager.request import LlmRequest, LlmRequestState
from gptmanager.scheduler import (
    GuaranteedNoEvictScheduler,
    MaxUtilizationScheduler,
    SimpleScheduler,
    StaticBatchScheduler,
)
from gptmanager.scheduler.start_headroom import StartHeadroom


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The KV cache's ledger. `owners` maps a used block to the requests that hold it.

    Blocks of the host tier are used by what is cached in them.
    """

    ok: bool
    problems: tuple[str, ...]
    total_blocks: int
    free_blocks: int
    used_blocks: int
    owners: Mapping[int, tuple[int, ...]]
    host_total_blocks: int = 0
    host_free_blocks: int = 0
    host_used_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a request runs or waits. Counts in requests, blocks and tokens.

    `reason`: "unknown", "preparing", "running", "batch_full", "static_batch" (the batch before it
    must end), "kv_blocks", "behind" (the waiting request `behind`, which stands before it, lacks
    blocks, and nobody overtakes it), or "not_chosen". `ahead`: waiting requests that stand before
    it. `needed_blocks`: until its end, beyond what it holds; under MAX_UTILIZATION for its next
    step. `reserved_blocks`: what those before it may still need, running ones and others; under
    MAX_UTILIZATION in their next step, and what must stay free for it and them to go on. Of a
    request that waits behind another both are the other's.
    """

    request_id: int
    reason: str
    text: str
    state: str = ""
    ahead: int = 0
    running: int = 0
    max_batch_size: int = 0
    needed_blocks: int = 0
    free_blocks: int = 0
    reserved_blocks: int = 0
    pause_count: int = 0
    behind: int | None = None


class _Demand(NamedTuple):
    """Blocks that a request waits for. `lacking`: the first waiting one that is short of them."""

    needed: int
    reserved: int
    lacking: ActiveRequest | None


@dataclass(frozen=True, slots=True)
class Fit:
    """Would a request be accepted, and could it start now? `text` is the rejection, if any."""

    accepted: bool
    text: str
    needed_blocks: int = 0
    free_blocks: int = 0
    total_blocks: int = 0


def audit(loop: TokenLoop) -> AuditReport:
    """Prove that every block has the owners it should have, and no other."""
    kv_cache = loop.allocator.kv_cache
    problems = []
    try:
        loop.allocator.check()
    except GptManagerError as error:
        problems.append(str(error))
    ledger = kv_cache.audit()
    for block, owners in ledger.owners.items():
        problems += [
            f"block {block} is held by request {owner}, which is not active"
            for owner in owners
            if owner not in loop.requests
        ]
    if ledger.free + ledger.used != ledger.total:
        problems.append(f"{ledger.free} free + {ledger.used} used of {ledger.total} blocks")
    host = ledger.host_free, ledger.host_used, ledger.host_total
    if host[0] + host[1] != host[2]:
        problems.append(f"{host[0]} free + {host[1]} used of {host[2]} host blocks")
    return AuditReport(
        not problems,
        tuple(problems),
        ledger.total,
        ledger.free,
        ledger.used,
        MappingProxyType(dict(ledger.owners)),
        ledger.host_total,
        ledger.host_free,
        ledger.host_used,
    )


def explain(loop: TokenLoop, request_id: int) -> Explanation:
    """What keeps a request from running, in numbers."""
    request = loop.requests.get(request_id)
    if request is None:
        return Explanation(request_id, "unknown", f"request {request_id} is not active")
    kv_cache = loop.allocator.kv_cache
    running = [other for other in loop.active if other.slot >= 0 and other is not request]
    waiting = [other for other in loop.active if other.slot < 0]
    ahead = waiting.index(request) if request in waiting else 0
    needed, reserved, lacking = _demand(loop, running, [*waiting[:ahead], request])
    free = kv_cache.get_num_free_blocks()
    reason = _reason(loop, request, len(running), lacking)
    processor = "" if request.processor is None else request.processor.name
    numbers = {
        "preparing": f"{request_id} waits until its logits post-processor {processor} is ready",
        "running": f"{request_id} runs: {request.num_tokens} of {request.length_limit} tokens",
        "batch_full": f"{request_id} waits: {len(running)} requests run, max_batch_size = "
        f"{loop.max_batch_size}",
        "static_batch": f"{request_id} waits until the batch has ended: {len(running)} requests "
        "of it run",
        "kv_blocks": f"{request_id} waits for KV cache blocks: it needs {needed}, {free} are free, "
        f"{reserved} must stay free for {len(running)} running requests, short by "
        f"{needed - (free - reserved)}",
        "behind": f"{request_id} waits behind request {lacking and lacking.request_id}, which "
        f"waits for KV cache blocks: that needs {needed}, {free} are free, {reserved} must stay "
        f"free for {len(running)} running requests",
        "not_chosen": f"{request_id} waits to be chosen: {needed} blocks needed, "
        f"{free - reserved} available; max_num_tokens = {loop.max_num_tokens}",
    }
    text = f"request {numbers[reason]}"
    if request.slot < 0:
        text += f"; {ahead} waiting requests stand before it, it was paused "
        text += f"{request.pause_count} times"
    return Explanation(
        request_id,
        reason,
        text,
        state=request.state.name,
        ahead=ahead,
        running=len(running),
        max_batch_size=loop.max_batch_size,
        needed_blocks=needed,
        free_blocks=free,
        reserved_blocks=reserved,
        pause_count=request.pause_count,
        behind=lacking.request_id if lacking is not None and reason == "behind" else None,
    )


def would_fit(loop: TokenLoop, inference_request: InferenceRequest) -> Fit:
    """What admission says of a request, without admitting it."""
    kv_cache = loop.allocator.kv_cache
    try:
        request = admit(inference_request, loop.limits, now=0.0)
    except RequestError as error:
        total, free = kv_cache.get_max_resource_count(), kv_cache.get_num_free_blocks()
        return Fit(False, response_text(error), free_blocks=free, total_blocks=total)
    return Fit(
        True,
        "",
        kv_cache.get_needed_resource_to_completion(request),
        kv_cache.get_num_free_blocks(),
        kv_cache.get_max_resource_count(),
    )


def _demand(
    loop: TokenLoop, running: Sequence[ActiveRequest], waiting: Sequence[ActiveRequest]
) -> _Demand:
    """Of the last of `waiting`, or of the one before it that lets nobody pass.

    As the capacity schedulers count: they take the waiting in order, up to the first misfit.
    """
    kv_cache, scheduler = loop.allocator.kv_cache, _capacity_scheduler(loop)
    cost, headroom = kv_cache.get_remaining_blocks_to_completion, None
    if isinstance(scheduler, MaxUtilizationScheduler):
        lookahead = scheduler.two_step_lookahead
        cost = partial(kv_cache.get_needed_blocks_one_step, two_step_lookahead=lookahead)
        resume, steps = scheduler.resume_headroom_blocks, scheduler.start_headroom_steps
        headroom = StartHeadroom(kv_cache, resume, steps)
    elif not isinstance(scheduler, GuaranteedNoEvictScheduler):
        waiting = waiting[-1:]  # who may overtake whom is the host's own scheduler's to say
    taken: list[LlmRequest] = [*running]
    kv_cache.start_scheduling()  # what a pass of the scheduler supposed is past
    free, reserved, needed = kv_cache.get_num_free_blocks(), sum(map(cost, running)), 0
    for request in waiting:
        if request.state is LlmRequestState.PREPARING:
            continue
        needed, kept = cost(request), reserved
        if headroom is not None and taken:
            kept += headroom.blocks_beside(request, taken)
        if needed > free - kept:
            return _Demand(needed, kept, request)
        if request is not waiting[-1]:
            taken.append(request)
            reserved += needed
    return _Demand(needed, reserved, None)


def _capacity_scheduler(loop: TokenLoop) -> object:
    scheduler = loop.scheduler
    return scheduler.capacity_scheduler if isinstance(scheduler, SimpleScheduler) else None


def _reason(
    loop: TokenLoop, request: ActiveRequest, num_running: int, lacking: ActiveRequest | None
) -> str:
    if request.state is LlmRequestState.PREPARING:
        return "preparing"
    if request.slot >= 0 or request.state >= LlmRequestState.GENERATION_IN_PROGRESS:
        return "running"
    scheduler = _capacity_scheduler(loop)
    if isinstance(scheduler, StaticBatchScheduler) and num_running:
        return "static_batch"
    if num_running >= getattr(scheduler, "max_num_requests", loop.max_batch_size):
        return "batch_full"
    if lacking is None:
        return "not_chosen"
    return "kv_blocks" if lacking is request else "behind"
