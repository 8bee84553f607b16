"""A token loop as data, between two iterations: with it a recording may begin in the middle.

Types of values alone; `TokenLoop.state` fills them. What a loop is made of (its world, limits,
scheduler) is not in them, and a field that is missing here is missing in every black box.
"""

from __future__ import annotations

from typing import NamedTuple

from gptmanager.loop.active_state import RequestState
from gptmanager.loop.allocation import AllocatorState
from gptmanager.request.inference_request import InferenceRequest
from gptmanager.statistics import DraftCounts
from gptmanager.step import Schedule


class RequestTableState(NamedTuple):
    """`active` in their order; `timed` and `preparing`: ids of some of them; `arriving`: not
    admitted yet."""

    active: tuple[RequestState, ...]
    arriving: tuple[InferenceRequest, ...]
    timed: tuple[int, ...]
    preparing: tuple[int, ...]
    allocator: AllocatorState


class LoopState(NamedTuple):
    """`pending`: the schedule whose result is not applied yet. `failing`: ids of active requests
    that failed in a result. `drafts`, `num_logits_errors`: since the start."""

    request_table: RequestTableState
    pending: Schedule | None
    failing: tuple[int, ...]
    drafts: DraftCounts
    num_logits_errors: int
