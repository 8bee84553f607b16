"""`NextDecision`: what the loop's next iteration would decide if nothing came before it.

Tries that iteration on copies: adapters get their pages as they would, drafts are proposed, and the
scheduler is asked. Changes nothing.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping

from gptmanager.loop.active_request import ActiveRequest
from gptmanager.loop.adapter_state import copied_adapters
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.request.llm_request import LlmRequestState, insert_by_priority
from gptmanager.scheduler.waiting import Wait, reported_waits

_PREPARING = LlmRequestState.PREPARING
_IN_PROGRESS = LlmRequestState.GENERATION_IN_PROGRESS


class NextDecision:
    """The decision over the active requests of `loop`, and over a `newcomer` behind its equals.

    `adapters`: as they are once the iteration has given out their pages. `active`: the requests as
    the scheduler will see them, in its order; a request that changes until then is a
    copy. One that the iteration ends with an error is missing.
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
        """Take in at most the newcomer, as `RequestTable.take_in` would."""
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
        """The request as the scheduler will see it; None: the iteration ends it."""
        return self._by_id.get(request_id)

    @functools.cached_property
    def waits(self) -> Mapping[int, Wait] | None:
        """Return why the scheduler would leave requests out; None if it does not report it."""
        loop, in_flight = self._loop, self._loop.in_flight()
        ready = [request for request in self.active if request.state is not _PREPARING]
        if loop.table.num_serial:
            ready = [*_with_drafts(ready, in_flight)]
        return reported_waits(loop.scheduler, ready, in_flight)


def _with_drafts(
    requests: Iterable[ActiveRequest], in_flight: frozenset[int]
) -> Iterable[ActiveRequest]:
    """The requests with the drafts that the loop would have them propose."""
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
