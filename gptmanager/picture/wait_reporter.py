"""`WaitReporter`: asks a scheduler for the reasons why requests wait."""

from __future__ import annotations

from collections.abc import Mapping, Set

from gptmanager.picture.trace import Reason
from gptmanager.request.llm_request import RequestList
from gptmanager.scheduler.simple import RequestScheduler, SchedulerOutput
from gptmanager.scheduler.wait_reasons import Wait, WaitReason, reported_waits

_REASONS = {
    WaitReason.BATCH_FULL: Reason.BATCH,
    WaitReason.STATIC_BATCH: Reason.STATIC,
    WaitReason.KV_BLOCKS: Reason.BLOCKS,
    WaitReason.TOKEN_BUDGET: Reason.TOKENS,
}


def reason_of(wait: Wait) -> Reason:
    """Return the reason that the picture shows for a wait. If the request waits behind another
    request, the picture shows the reason why the other request waits.
    """
    return _REASONS.get(wait.cause or wait.reason, Reason.OTHER)


class WaitReporter(RequestScheduler):
    """Asks a scheduler before each decision why requests will wait; `take` returns the answer.

    `num_asked` is the sum, over all questions so far, of the number of active requests. It is a
    measure of the time that the questions take.
    """

    def __init__(self, scheduler: RequestScheduler) -> None:
        self.num_asked = 0
        self._scheduler = scheduler
        self._waits: Mapping[int, Wait] | None = None

    def schedule_request(
        self, active_requests: RequestList, inflight_request_ids: Set[int]
    ) -> SchedulerOutput:
        self.num_asked += len(active_requests)
        self._waits = reported_waits(self._scheduler, [*active_requests], inflight_request_ids)
        return self._scheduler.schedule_request(active_requests, inflight_request_ids)

    def why_waiting(
        self, active_requests: RequestList, inflight_request_ids: Set[int]
    ) -> Mapping[int, Wait] | None:
        return reported_waits(self._scheduler, active_requests, inflight_request_ids)

    def take(self) -> Mapping[int, Wait]:
        """Return the last decision's waits by request id.

        The result is empty if the scheduler reports no waits, or if `take` has returned them
        already.
        """
        waits, self._waits = self._waits, None
        return waits or {}
