"""Answer questions about a `TokenLoop`: which requests hold a block, or why a request waits.

The loop must be between two iterations, or in a callback. Nothing is changed, and every number is
read from the objects that make the decisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gptmanager.errors import (
    CapacityError,
    DuplicateRequestIdError,
    GptManagerError,
    RequestError,
    response_text,
)
from gptmanager.loop.active_request import FOR_ADAPTER, FOR_PROCESSOR, ActiveRequest
from gptmanager.loop.admission import admit
from gptmanager.loop.decision_preview import NextDecision
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.peft_cache import PeftCacheReport
from gptmanager.request.arrays import refuse_masked
from gptmanager.request.inference_request import InferenceRequest
from gptmanager.request.llm_request import LlmRequestState
from gptmanager.scheduler.simple import policy_name
from gptmanager.scheduler.wait_reasons import Wait, WaitReason, unreported_wait


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The numbers of KV cache blocks and LoRA cache pages, and whether they are consistent.

    `problems` describes the inconsistencies; `ok` means that there are none. `owners` maps each
    used block to the ids of the requests that hold it. `host_*_blocks` count blocks in host memory.
    A used host block has cached content of earlier requests. `adapters` has the numbers of pages
    of the LoRA cache, and the task id of each used page.
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
    adapters: PeftCacheReport | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a request runs or waits, according to the decision that the scheduler would make now.

    `reason` is a value of `scheduler.wait_reasons.WaitReason`, or "unknown", "preparing",
    "running", "starting" (with the next iteration), or "not_chosen" (by a scheduler that reports
    no reasons). docs/scheduling.md lists all reasons. `ahead` is the number of waiting requests
    before this request, and `running` the number of other requests that run. If the request waits,
    `num_running` running requests and `num_starting` starting requests are scheduled before it.
    Only the running requests hold blocks already.

    If `reason` is "kv_blocks", `needed_blocks` is the number of blocks that the request still needs
    until its end, or for its next step if the policy is MAX_UTILIZATION. `reserved_blocks` of the
    `free_blocks` are kept for the requests that are scheduled before this request.

    If `reason` is "token_budget", `needed_tokens` is the number of tokens that the request needs in
    a step, and `free_tokens` is the number of tokens that are left for the request.

    If `reason` is "behind" or "reuse_delay", `behind` is the id of the request that this request
    waits for. If `reason` is "behind", the other request's numbers are in `needed_*`,
    `reserved_blocks`, `free_tokens`, `num_running` and `num_starting`.
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
    needed_tokens: int = 0
    free_tokens: int = 0
    num_running: int = 0
    num_starting: int = 0


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a request would be accepted, and could start now.

    If the request would not be accepted, `text` is the text of the error. `starts_now` means that
    the request would start with the next iteration, although active requests of the same or a
    higher priority go first. If the request would be accepted but wait, `wait` has the reason, in
    the words of `explain`. `needed_blocks` is the number of blocks that the request needs until its
    end.
    """

    accepted: bool
    text: str
    needed_blocks: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    starts_now: bool = False
    wait: str = ""


def audit(loop: TokenLoop) -> AuditReport:
    """Check the counts of blocks and adapter pages, and that only active requests hold blocks."""
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
            if owner not in loop.table.by_id
        ]
    if ledger.free + ledger.used != ledger.total:
        counts = f"{ledger.free} free + {ledger.used} used"
        problems.append(f"{counts} blocks must be {ledger.total} blocks in all")
    free, used, total = ledger.host_free, ledger.host_used, ledger.host_total
    if free + used != total:
        problems.append(f"{free} free + {used} used host blocks must be {total} blocks in all")
    problem = loop.table.adapters.problem()
    if problem is not None:
        problems.append(problem)
    found, blocks = tuple(problems), (ledger.total, ledger.free, ledger.used)
    owner_of = MappingProxyType(dict(ledger.owners))
    pages = loop.table.adapters.cache.audit()
    return AuditReport(not problems, found, *blocks, owner_of, total, free, used, pages)


def explain(loop: TokenLoop, request_id: int) -> Explanation:
    """Explain why a request runs or waits, in numbers."""
    request, active = loop.table.by_id.get(request_id), list(loop.active)
    if request is None:
        return Explanation(request_id, "unknown", f"request {request_id} is not active")
    waiting = [other for other in active if other.slot < 0]
    ahead = waiting.index(request) if request in waiting else 0
    running = sum(other.slot >= 0 and other is not request for other in active)
    return _explain(loop, request, ahead, running, NextDecision(loop))


def explain_waiting(loop: TokenLoop, most: int) -> tuple[Explanation, ...]:
    """Explain the first `most` waiting requests. Ask the scheduler only once for all of them."""
    active = list(loop.active)
    waiting, decision = [other for other in active if other.slot < 0], NextDecision(loop)
    running = len(active) - len(waiting)
    return tuple(
        _explain(loop, request, ahead, running, decision)
        for ahead, request in enumerate(waiting[:most])
    )


def _explain(
    loop: TokenLoop, request: ActiveRequest, ahead: int, running: int, decision: NextDecision
) -> Explanation:
    reason, wait, text = _reason(loop, request, decision)
    if request.slot < 0:
        text += f"; waiting requests ahead of it: {ahead}, pauses so far: {request.pause_count}"
    cause = wait.cause or wait.reason
    is_of_blocks, is_of_tokens = cause is WaitReason.KV_BLOCKS, cause is WaitReason.TOKEN_BUDGET
    return Explanation(
        request.request_id,
        reason,
        f"request {request.request_id} {text}",
        state=request.state.name,
        ahead=ahead,
        running=running,
        max_batch_size=loop.max_batch_size,
        needed_blocks=wait.needed if is_of_blocks else 0,
        free_blocks=loop.allocator.kv_cache.get_num_free_blocks(),
        reserved_blocks=wait.reserved if is_of_blocks else 0,
        pause_count=request.pause_count,
        behind=wait.behind,
        needed_tokens=wait.needed if is_of_tokens else 0,
        free_tokens=wait.free - wait.reserved if is_of_tokens else 0,
        num_running=wait.running,
        num_starting=wait.starting,
    )


def would_fit(loop: TokenLoop, inference_request: InferenceRequest) -> Fit:
    """Return how admission and the scheduler would treat a request if it arrived now."""
    kv_cache = loop.allocator.kv_cache
    request_id = inference_request.request_id
    total, free = kv_cache.get_max_resource_count(), kv_cache.get_num_free_blocks()
    try:
        if request_id in loop.table.by_id:
            raise DuplicateRequestIdError(
                f"request id {request_id} belongs to a request that is still being processed: "
                "use another id"
            )
        refuse_masked(inference_request.tensors)
        request = admit(inference_request, loop.table.limits, now=0.0)
        loop.table.adapters.require_known(request)
    except RequestError as error:
        return Fit(False, response_text(error), free_blocks=free, total_blocks=total)
    needed = kv_cache.get_needed_resource_to_completion(request)
    room = None if loop.max_active is None else loop.max_active - len(loop.active)
    if room is not None and room <= 0:
        wait = f"waits outside: {len(loop.active)} requests are active, max_active_requests = "
        return Fit(True, "", needed, free, total, wait=f"{wait}{loop.max_active}")
    try:
        loop.table.require_room(loop.table.most_active())
    except CapacityError as error:
        return Fit(False, response_text(error), needed, free, total)
    try:
        reason, _, text = _reason(loop, request, NextDecision(loop, request))
    finally:
        kv_cache.forget_waiting(request_id)  # the scheduler has looked up its prompt
    if reason == "starting":
        return Fit(True, "", needed, free, total, starts_now=True)
    return Fit(True, "", needed, free, total, wait=text)


_NO_WAIT = Wait(WaitReason.BEHIND)


def _reason(
    loop: TokenLoop, request: ActiveRequest, decision: NextDecision
) -> tuple[str, Wait, str]:
    """Return the reason, the scheduler's `Wait` or `_NO_WAIT`, and a text.

    The text continues a sentence that begins with "request 7".
    """
    stand_in, adapters = decision.find(request.request_id), decision.adapters
    if stand_in is None:  # the next iteration ends the request: explain its present state
        stand_in, adapters = request, loop.table.adapters
    if stand_in.awaited & FOR_PROCESSOR:
        processor = "" if request.processor is None else request.processor.name
        text = f"waits until its logits post-processor {processor} is ready"
        return "preparing", _NO_WAIT, text
    if stand_in.awaited & FOR_ADAPTER:
        is_short = adapters.lacks_pages(request.request_id)
        reason = WaitReason.ADAPTER_PAGES.value if is_short else "preparing"
        return reason, _NO_WAIT, f"waits {adapters.why_waiting(stand_in)}"
    if request.slot >= 0 or request.state >= LlmRequestState.GENERATION_IN_PROGRESS:
        text = f"runs: {request.num_tokens} of {request.length_limit} tokens"
        if request.lora_task_id is not None:
            text += f", with adapter {request.lora_task_id}"
        return "running", _NO_WAIT, text
    waits = decision.waits
    if waits is None:
        kv_cache = loop.allocator.kv_cache
        needed = kv_cache.get_remaining_blocks_to_completion(request)
        text = unreported_wait(policy_name(loop.scheduler), needed, kv_cache.get_num_free_blocks())
        return "not_chosen", _NO_WAIT, f"waits {text}"
    wait = waits.get(request.request_id)
    if wait is None:
        return "starting", _NO_WAIT, "starts with the next iteration"
    return wait.reason.value, wait, f"waits {wait.text}"
