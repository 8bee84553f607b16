"""`RequestScheduler` decides which requests an iteration runs. `SimpleScheduler` uses two steps.

The steps are a capacity scheduler and a micro-batch scheduler. A policy without these two steps
implements `RequestScheduler`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from typing import NamedTuple, Protocol

from gptmanager.arguments import able
from gptmanager.request.llm_request import RequestList
from gptmanager.scheduler.capacity import CapacityScheduler
from gptmanager.scheduler.wait_reasons import Wait, reported_waits, traced


class SchedulerOutput(NamedTuple):
    """The context and generation requests to run in one iteration, and the requests to pause."""

    context_requests: RequestList
    generation_requests: RequestList
    paused_requests: RequestList


class RequestScheduler(ABC):
    """Decides one iteration. Subclass it for a policy that does not decide in two steps."""

    @abstractmethod
    def schedule_request(
        self, active_requests: RequestList, inflight_request_ids: Set[int]
    ) -> SchedulerOutput:
        """Choose the requests to run and to pause among `active_requests`.

        The active requests are in scheduling order, highest rank first. Requests of
        `inflight_request_ids` are in a step that has not returned. They count for memory and must
        not run; they may be paused, which takes effect when the step returns.
        """

    def why_waiting(
        self, active_requests: RequestList, inflight_request_ids: Set[int]
    ) -> Mapping[int, Wait] | None:
        """Return request id -> why a decision that is made now would leave this request out.

        Change nothing. Return None, the default, if the policy cannot give reasons.
        """
        return None


class MicroBatching(Protocol):
    """The call of a micro-batch scheduler that `SimpleScheduler` uses."""

    def schedule(
        self, fitting_requests: RequestList, inflight_request_ids: Set[int]
    ) -> tuple[RequestList, RequestList]: ...


def policy_name(scheduler: RequestScheduler) -> str:
    """Return the class of a scheduler, with the classes of its parts if it has two."""
    name = type(scheduler).__name__
    if not isinstance(scheduler, SimpleScheduler):
        return name
    parts = scheduler.capacity_scheduler, scheduler.micro_batch_scheduler
    return f"{name}({', '.join(type(part).__name__ for part in parts)})"


class SimpleScheduler(RequestScheduler):
    """Decides in two steps: which requests get memory, then which of these run."""

    def __init__(
        self, capacity_scheduler: CapacityScheduler, micro_batch_scheduler: MicroBatching
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
            waits = reported_waits(self.capacity_scheduler, active_requests)
            if waits is None:
                return None
            fitting, _ = self.capacity_scheduler.schedule_request(active_requests)
            more = reported_waits(self.micro_batch_scheduler, fitting, inflight_request_ids)
            return None if more is None else traced({**waits, **more})
        finally:
            for request, size, num_drafts, num_reusable in before:
                request.context_chunk_size = size
                request.num_draft_tokens = num_drafts
                request.estimated_reusable_tokens = num_reusable
