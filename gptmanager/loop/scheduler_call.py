"""Calls the scheduler, which chooses the requests of the next iteration, and checks its answer.

Whether the KV cache has room for the chosen requests is checked in `allocation`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping

from gptmanager.errors import SchedulerError, response_text
from gptmanager.lifecycle.watchdog import CallbackTimer
from gptmanager.loop.active_request import ActiveRequest
from gptmanager.request.llm_request import LlmRequest, LlmRequestState
from gptmanager.scheduler import RequestScheduler, SchedulerOutput
from gptmanager.scheduler.simple import policy_name

_CONTEXT_INIT = LlmRequestState.CONTEXT_INIT
_IN_PROGRESS = LlmRequestState.GENERATION_IN_PROGRESS


def decide(
    scheduler: RequestScheduler,
    timer: CallbackTimer,
    active: list[LlmRequest],
    in_flight: frozenset[int],
    by_id: Mapping[int, ActiveRequest],
    *,
    max_batch_size: int,
    max_num_tokens: int,
) -> SchedulerOutput:
    """Return the checked answer of `scheduler`.

    `timer` times the call. `by_id` has the requests that the scheduler may return, by request ID.
    Raise SchedulerError if the scheduler raises an exception, or returns an invalid answer. A
    MemoryError is passed on unchanged, because it is not the scheduler's fault.
    """
    timer.start()
    try:
        answer = scheduler.schedule_request(active, in_flight)
    except (SchedulerError, MemoryError):
        raise
    except Exception as error:
        raise blamed(scheduler, f"raised {response_text(error)}") from error
    finally:
        timer.stop()
    try:
        output = SchedulerOutput(*map(list, answer))
        check_output(
            output, by_id, in_flight, max_batch_size=max_batch_size, max_num_tokens=max_num_tokens
        )
    except MemoryError:
        raise
    except SchedulerError as error:
        raise blamed(scheduler, error) from None
    except Exception as error:
        text = f"returned {reprlib.repr(answer)}, expected lists of requests"
        raise blamed(scheduler, text) from error
    return output


def blamed(scheduler: RequestScheduler, what: object) -> SchedulerError:
    """Return an error that starts with the scheduler's class, and continues with `what`."""
    return SchedulerError(f"{policy_name(scheduler)} {what}")


def check_output(
    output: SchedulerOutput,
    by_id: Mapping[int, ActiveRequest],
    in_flight: Collection[int],
    *,
    max_batch_size: int,
    max_num_tokens: int,
) -> None:
    """Raise SchedulerError if `output` exceeds a limit, or has a request that must not be in it.

    Each request must be active and appear only once. A context or generation request must also be
    in the matching state, and not be in flight.
    """
    context, generation, paused = output
    chosen = [*context, *generation, *paused]
    find = by_id.get
    ids = set()
    for request in chosen:
        request_id = request.request_id
        if find(request_id) is not request:
            raise SchedulerError(f"returned {request!r}, which is not active")
        ids.add(request_id)
    if len(ids) != len(chosen):
        twice = next(request for request in chosen if chosen.count(request) > 1)
        raise SchedulerError(f"returned request {twice.request_id} twice")
    num_tokens = 0
    for request in context:
        if request.request_id in in_flight:
            raise SchedulerError(f"returned {request!r}, which is in flight")
        size = request.context_chunk_size
        if request.state is not _CONTEXT_INIT or size == 0:
            raise SchedulerError(f"returned {request!r} as a context request")
        remaining = request.context_remaining_length
        if not request.context_current_position:  # cached prompt tokens are not computed
            remaining -= request.estimated_reusable_tokens
        num_tokens += remaining if size is None or size > remaining else size
        if request.is_last_context_chunk:
            num_tokens += request.num_draft_tokens
    for request in generation:
        if request.request_id in in_flight:
            raise SchedulerError(f"returned {request!r}, which is in flight")
        if request.state is not _IN_PROGRESS:
            raise SchedulerError(f"returned {request!r} as a generation request")
        num_tokens += request.beam_width + request.num_draft_tokens
    num_requests = len(context) + len(generation)
    if num_requests > max_batch_size:
        raise SchedulerError(
            f"returned {num_requests} requests, max_batch_size = {max_batch_size}; "
            f"request {chosen[max_batch_size].request_id} is the first beyond the limit"
        )
    if num_tokens > max_num_tokens:
        raise SchedulerError(
            f"returned {num_tokens} tokens, max_num_tokens = {max_num_tokens}; "
            f"request {chosen[0].request_id} is the first of them"
        )
