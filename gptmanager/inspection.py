"""Answers about a loop between two iterations: who owns which block, and why a request waits.

Reads only; every number comes from the objects that decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gptmanager.active import ActiveRequest
from gptmanager.admission import admit
from gptmanager.api import InferenceRequest
from gptmanager.errors import GptManagerError, RequestError, response_text
from gptmanager.loop import TokenLoop
from gptmanager.request import LlmRequestState


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

    `reason`: "unknown", "preparing", "running", "batch_full", "kv_blocks", or "not_chosen".
    `ahead`: waiting requests that stand before it. `needed_blocks`: until its end, beyond what it
    holds. `reserved_blocks`: what running requests may still need.
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
    reserved = sum(kv_cache.get_remaining_blocks_to_completion(other) for other in running)
    waiting = [other for other in loop.active if other.slot < 0]
    needed = kv_cache.get_remaining_blocks_to_completion(request)
    free = kv_cache.get_num_free_blocks()
    reason = _reason(request, len(running), loop.max_batch_size, needed, free - reserved)
    ahead = waiting.index(request) if request in waiting else 0
    processor = "" if request.processor is None else request.processor.name
    numbers = {
        "preparing": f"{request_id} waits until its logits post-processor {processor} is ready",
        "running": f"{request_id} runs: {request.num_tokens} of {request.length_limit} tokens",
        "batch_full": f"{request_id} waits: {len(running)} requests run, max_batch_size = "
        f"{loop.max_batch_size}",
        "kv_blocks": f"{request_id} waits for KV cache blocks: it needs {needed}, {free} are free "
        f"of which {reserved} are reserved by {len(running)} running requests, short by "
        f"{needed - (free - reserved)}",
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
    )


def would_fit(loop: TokenLoop, inference_request: InferenceRequest) -> Fit:
    """What admission says of a request, without admitting it."""
    kv_cache = loop.allocator.kv_cache
    free, total = kv_cache.get_num_free_blocks(), kv_cache.get_max_resource_count()
    try:
        request = admit(inference_request, loop.limits, now=0.0)
    except RequestError as error:
        return Fit(False, response_text(error), free_blocks=free, total_blocks=total)
    return Fit(True, "", kv_cache.get_needed_resource_to_completion(request), free, total)


def _reason(
    request: ActiveRequest, running: int, max_batch_size: int, needed: int, available: int
) -> str:
    if request.state is LlmRequestState.PREPARING:
        return "preparing"
    if request.slot >= 0 or request.state >= LlmRequestState.GENERATION_IN_PROGRESS:
        return "running"
    if running >= max_batch_size:
        return "batch_full"
    return "kv_blocks" if needed > available else "not_chosen"
