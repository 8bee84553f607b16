"""`NextDecision`: what the next iteration of a loop would decide if nothing else happened before.

It assigns adapter pages, proposes drafts and asks the scheduler, all on copies. The loop itself
does not change.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping

from gptmanager.loop.active_request import ActiveRequest
from gptmanager.loop.adapter_state import copied_adapters
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.request.llm_request import LlmRequestState, insert_by_priority
from gptmanager.scheduler.wait_reasons import Wait, reported_waits

_PREPARING = LlmRequestState.PREPARING
_IN_PROGRESS = LlmRequestState.GENERATION_IN_PROGRESS


class NextDecision:
    """The decision over the active requests of `loop`, and optionally over a `newcomer`.

    The newcomer is placed after the active requests of the same priority. `adapters` has the
    state after the iteration has assigned pages. `active` has the requests in the order in which
    the scheduler gets them: with a copy of each request that the assignment of pages may change,
    and without the requests that would end with an adapter error.
    """

    def __init__(self, loop: TokenLoop, newcomer: ActiveRequest | None = None) -> None:
        self._loop = loop
        self.adapters = loop.table.adapters
        self.active = list(loop.active)
        if newcomer is not None:
            newcomer = copy.copy(newcomer)
            insert_by_priority(self.active, newcomer)
        if self.adapters.has_changed or (newcomer is not None and newcomer.awaited):
            self._take_in(newcomer)
        self._by_id = {request.request_id: request for request in self.active}

    def _take_in(self, newcomer: ActiveRequest | None) -> None:
        """Update `adapters` and `active` like `RequestTable.take_in`, with at most one newcomer."""
        table = self._loop.table
        stand_ins = {i: copy.copy(request) for i, request in table.adapters.requests.items()}
        self.active = [stand_ins.get(r.request_id, r) for r in self.active]
        self.adapters = adapters = copied_adapters(table.adapters, stand_ins)
        failed = {failure.request_id for failure in adapters.take_in()}
        for request_id in failed:
            adapters.release(request_id)
        self.active = [r for r in self.active if r.request_id not in failed]
        if newcomer is not None:
            adapters.add(newcomer)
        failed = {failure.request_id for failure in adapters.settle(self.active)}
        self.active = [r for r in self.active if r.request_id not in failed]

    def find(self, request_id: int) -> ActiveRequest | None:
        """Return the request as the scheduler will see it; None if the iteration ends it."""
        return self._by_id.get(request_id)

    @functools.cached_property
    def waits(self) -> Mapping[int, Wait] | None:
        """Why requests would not run, by request id; None if the scheduler does not report it."""
        loop, in_flight = self._loop, self._loop.in_flight()
        ready = [request for request in self.active if request.state is not _PREPARING]
        if loop.table.num_serial:
            ready = [*_with_drafts(ready, in_flight)]
        return reported_waits(loop.scheduler, ready, in_flight)


def _with_drafts(
    requests: Iterable[ActiveRequest], in_flight: frozenset[int]
) -> Iterable[ActiveRequest]:
    """Yield the requests with the drafts that the loop would make them propose."""
    for request in requests:
        drafter = request.drafts.drafter
        if (
            drafter is not None
            and request.state is _IN_PROGRESS
            and request.request_id not in in_flight
        ):
            request = copy.copy(request)
            request.drafts = copy.copy(request.drafts)
            request.drafts.drafter = copy.copy(drafter)
            request.propose_drafts()
        yield request
