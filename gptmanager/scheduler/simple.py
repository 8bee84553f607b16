"""One whole scheduling decision: the interface that the loop calls, and its two-step form.

Knows nothing of how either step decides. Who needs no two steps implements `RequestScheduler`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from typing import NamedTuple

from gptmanager.arguments import able
from gptmanager.request.llm_request import RequestList
from gptmanager.scheduler.capacity import CapacityScheduler
from gptmanager.scheduler.micro_batch import MicroBatchScheduler
from gptmanager.scheduler.waiting import Wait, told_by, traced


class SchedulerOutput(NamedTuple):
    """The requests that one iteration runs, context and generation apart, and those it pauses."""

    context_requests: RequestList
    generation_requests: RequestList
    paused_requests: RequestList


class RequestScheduler(ABC):
    """Decides one iteration. Subclass it for a policy that does not decide in two steps."""

    @abstractmethod
    def schedule_request(
        self, active_requests: RequestList, inflight_request_ids: Set[int]
    ) -> SchedulerOutput:
        """Choose among `active_requests`, which stand in scheduling order, highest rank first.

        Requests of `inflight_request_ids` are in a step that has not returned: they count for
        memory, may be paused, which then waits for their return, and must not run.
        """

    def why_waiting(
        self, active_requests: RequestList, inflight_request_ids: Set[int]
    ) -> Mapping[int, Wait] | None:
        """Why the decision that would be made now leaves requests out, by id.

        Changes nothing. None, as here: the policy does not tell.
        """
        return None


class SimpleScheduler(RequestScheduler):
    """First who gets memory, then who runs."""

    def __init__(
        self, capacity_scheduler: CapacityScheduler, micro_batch_scheduler: MicroBatchScheduler
    ) -> None:
        self.capacity_scheduler = able(
            "capacity_scheduler", capacity_scheduler, "schedule_request", "CapacityScheduler"
        )
        self.micro_batch_scheduler = able(
            "micro_batch_scheduler", micro_batch_scheduler, "schedule", "MicroBatchScheduler"
        )

    def schedule_request(
        self, active_requests: RequestList, inflight_request_ids: Set[int]
    ) -> SchedulerOutput:
        fitting, paused = self.capacity_scheduler.schedule_request(active_requests)
        context, generation = self.micro_batch_scheduler.schedule(fitting, inflight_request_ids)
        return SchedulerOutput(context, generation, paused)

    def why_waiting(
        self, active_requests: RequestList, inflight_request_ids: Set[int]
    ) -> Mapping[int, Wait] | None:
        before = [
            (r, r.context_chunk_size, r.num_draft_tokens, r.estimated_reusable_tokens)
            for r in active_requests
        ]
        try:
            waits = told_by(self.capacity_scheduler, active_requests)
            if waits is None:
                return None
            fitting, _ = self.capacity_scheduler.schedule_request(active_requests)
            more = told_by(self.micro_batch_scheduler, fitting, inflight_request_ids)
            return None if more is None else traced({**waits, **more})
        finally:
            for request, size, num_drafts, num_reusable in before:
                request.context_chunk_size = size
                request.num_draft_tokens = num_drafts
                request.estimated_reusable_tokens = num_reusable
