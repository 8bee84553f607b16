"""`Wait`: why a policy leaves a request out, with the numbers that it compared.

A policy records waits in the same loop over the requests that decides which requests run. This
module decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from gptmanager.request.llm_request import LlmRequest, LlmRequestState, RequestList

_CONTEXT_INIT = LlmRequestState.CONTEXT_INIT


class WaitReason(str, Enum):
    """The reason why a decision left a request out."""

    BATCH_FULL = "batch_full"
    STATIC_BATCH = "static_batch"
    KV_BLOCKS = "kv_blocks"
    ADAPTER_PAGES = "adapter_pages"
    TOKEN_BUDGET = "token_budget"
    REUSE_DELAY = "reuse_delay"
    BEHIND = "behind"


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a request waits. In most cases `needed` > `free` - `reserved`.

    Depending on `reason`, these three numbers count blocks, tokens of a step, adapter pages or
    requests. `running` and `starting` are the numbers of requests that the decision took first, and
    for which it keeps `reserved`. Running requests hold memory already, starting ones do not. If
    this request waits for another request, `behind` is the id of the other request. If `reason` is
    BEHIND, `cause` is the reason why the other request waits, and all numbers are those of its
    wait.
    """

    reason: WaitReason
    needed: int = 0
    free: int = 0
    reserved: int = 0
    running: int = 0
    starting: int = 0
    behind: int | None = None
    cause: WaitReason | None = None

    def of_those_behind(self, request_id: int) -> Wait:
        """Return the wait of requests that may not overtake `request_id`, which has this wait."""
        if self.reason in (WaitReason.BATCH_FULL, WaitReason.STATIC_BATCH, WaitReason.BEHIND):
            return self
        return replace(self, reason=WaitReason.BEHIND, behind=request_id, cause=self.reason)

    @property
    def text(self) -> str:
        """The reason as a text that continues "request 7 waits"."""
        if self.reason is WaitReason.BEHIND and self.cause is not None:
            return f"behind request {self.behind}, which waits {self._compared(self.cause, 'that')}"
        return self._compared(self.reason, "it")

    def _compared(self, reason: WaitReason, subject: str) -> str:
        others = _others(self.running, self.starting)
        short = self.needed - (self.free - self.reserved)
        if reason is WaitReason.BATCH_FULL:
            return f"for room in the batch: {others}, at most {self.free} at once"
        if reason is WaitReason.STATIC_BATCH:
            return f"until the batch has ended: {others}"
        if reason is WaitReason.REUSE_DELAY:
            return f"for request {self.behind}, which computes the beginning of its prompt"
        if reason is WaitReason.TOKEN_BUDGET:
            return (
                f"for tokens of a step: {subject} needs {self.needed}, "
                f"{self.free - self.reserved} of max_num_tokens = {self.free} are left by "
                f"{others}, short by {short}"
            )
        what = "KV cache blocks" if reason is WaitReason.KV_BLOCKS else "adapter pages"
        return (
            f"for {what}: {subject} needs {self.needed}, {self.free} are free, "
            f"{self.reserved} must stay free for {others}, short by {short}"
        )


class Waits(dict[int, Wait]):
    """The waits of one decision, by request id."""

    def put(self, request: LlmRequest, wait: Wait) -> None:
        """Record `wait`, unless another wait of the request is recorded."""
        self.setdefault(request.request_id, wait)

    def all_but(self, taken: RequestList, requests: RequestList, wait: Wait) -> None:
        """Record `wait` for all of `requests` except `taken`, unless another wait is recorded."""
        ids = {request.request_id for request in taken}
        for request in requests:
            if request.request_id not in ids:
                self.put(request, wait)

    def end(
        self, request: LlmRequest, wait: Wait, taken: RequestList, requests: RequestList
    ) -> None:
        """Record that the walk over `requests` stopped at `request`, and the rest is behind it."""
        self.put(request, wait)
        self.all_but(taken, requests, wait.of_those_behind(request.request_id))


def traced(waits: Mapping[int, Wait]) -> dict[int, Wait]:
    """Return a copy of `waits` with new waits for the requests that wait for a waiting request.

    A new wait has the cause for which the waiting request waits. For example, a request that waits
    for the prefix of a waiting request is reported behind the waiting request. If the policy paused
    requests for the waiting request, the cause is what the waiting request lacked before the pause.
    """
    found = dict(waits)
    for request_id, wait in waits.items():
        passed, leader = {request_id}, wait.behind
        while leader is not None and leader not in passed and leader in waits:
            passed.add(leader)
            wait = waits[leader]
            if wait.reason is not WaitReason.REUSE_DELAY:
                wait = wait.of_those_behind(leader)
            leader = wait.behind
        found[request_id] = wait
    return found


def reported_waits(policy: Any, *decision: Any) -> Mapping[int, Wait] | None:
    """Return what `policy.why_waiting` reports about a decision.

    A host's policy may be of any class. If it has no method `why_waiting`, return None.
    """
    report = getattr(policy, "why_waiting", None)
    return None if report is None else report(*decision)


def unreported_wait(policy: str, needed_blocks: int, free_blocks: int) -> str:
    """Return the text that continues "request 7 waits" if the policy reports no reasons."""
    return (
        f"to be chosen by {policy}, which reports no reasons: it needs {needed_blocks} "
        f"KV cache blocks until its end, {free_blocks} are free"
    )


def counted(taken: RequestList) -> tuple[int, int]:
    """Return how many of `taken` hold memory already, and how many do not."""
    running = sum(
        1 for r in taken if r.state is not _CONTEXT_INIT or r.context_current_position > 0
    )
    return running, len(taken) - running


def lacking(reason: WaitReason, needed: int, free: int, left: int, taken: RequestList) -> Wait:
    """Return the wait of a request that needs `needed` if `taken` leave only `left` of `free`."""
    return Wait(reason, needed, free, free - left, *counted(taken))


def full(taken: RequestList, limit: int) -> Wait:
    """Return the wait for a place in the batch: the requests `taken` fill all `limit` places."""
    return lacking(WaitReason.BATCH_FULL, 1, limit, limit - len(taken), taken)


def _others(running: int, starting: int) -> str:
    parts = [f"{running} running"] if running or not starting else []
    parts += [f"{starting} starting"] if starting else []
    return f"{' and '.join(parts)} request{'' if running + starting == 1 else 's'}"
