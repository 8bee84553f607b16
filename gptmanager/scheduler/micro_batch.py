"""`MicroBatchScheduler`: decides which of the fitting requests run in a step, with which chunks.

The class observes the limits of one step on requests, tokens and context length. Memory is left to
module `capacity`. The class writes only the requests' `context_chunk_size` and, if drafts are
trimmed, `num_draft_tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from operator import attrgetter
from typing import ClassVar, Literal, NamedTuple

from gptmanager.arguments import at_least, flag
from gptmanager.config import ContextChunkingPolicy
from gptmanager.errors import ConfigError, SchedulerError
from gptmanager.request.llm_request import LlmRequest, LlmRequestState, RequestList
from gptmanager.scheduler.chunked_context import (
    UNLIMITED,
    check_policy,
    credit_of,
    first_credit,
    serve_in_order,
    share_equally,
    share_units,
    trim_drafts,
)
from gptmanager.scheduler.wait_reasons import Wait, WaitReason, Waits, full, lacking

_ENCODER_INIT = LlmRequestState.ENCODER_INIT
_CONTEXT_INIT = LlmRequestState.CONTEXT_INIT
_IN_PROGRESS = LlmRequestState.GENERATION_IN_PROGRESS
_TO_COMPLETE = LlmRequestState.GENERATION_TO_COMPLETE


class _Scan(NamedTuple):
    """The requests of a step. Contexts in `chunked` may be cut; `num_tokens` excludes them."""

    whole: RequestList
    chunked: RequestList
    generation: RequestList
    num_tokens: int
    has_adapters: bool


class MicroBatchScheduler:
    """Fills one step from the front of the list. Subclass it to write another rule.

    A step has at most `max_batch_size` requests, `max_num_tokens` tokens, and `max_context_length`
    tokens of one context; the last two may be None, for no limit. With a `context_chunking_policy`,
    contexts may be cut into chunks of multiples of `chunk_unit` tokens (default 1; unused without a
    policy). Without one, a context longer than `max_context_length` raises
    SchedulerError.

    Drafts at the end of a context take space in its last chunk unit. The `draft_rule` "reserve"
    charges all the space that drafts could take, and "kept" charges only the drafts that are kept.
    With the `reuse_credit_rule` "prefix", the first `estimated_reusable_tokens` of a context cost
    nothing. With "shift", the first chunk starts after the reusable tokens. A chunk then costs its
    full size, unless the chunk reaches the end of the context.

    `mixed_beam_widths` permits generating requests of several beam widths in one step. `num_shares`
    steps run at the same time, on the stages of a pipeline. Each step takes at most an equal part
    of the requests, so that every step has some.
    """

    # a request is schedulable if no_schedule_until_state <= state < no_schedule_after_state
    no_schedule_until_state: ClassVar[LlmRequestState] = LlmRequestState.CONTEXT_INIT
    no_schedule_after_state: ClassVar[LlmRequestState] = LlmRequestState.GENERATION_COMPLETE

    def __init__(
        self,
        max_batch_size: int,
        max_num_tokens: int | None = None,
        *,
        max_context_length: int | None = None,
        context_chunking_policy: ContextChunkingPolicy | None = None,
        chunk_unit: int | None = None,
        draft_rule: Literal["reserve", "kept"] = "reserve",
        reuse_credit_rule: Literal["prefix", "shift"] = "prefix",
        mixed_beam_widths: bool = False,
        num_shares: int = 1,
    ) -> None:
        if draft_rule not in ("reserve", "kept"):
            raise ConfigError(f"draft_rule = {draft_rule!r} must be 'reserve' or 'kept'")
        if reuse_credit_rule not in ("prefix", "shift"):
            raise ConfigError(
                f"reuse_credit_rule = {reuse_credit_rule!r} must be 'prefix' or 'shift'"
            )
        chunk_unit = 1 if chunk_unit is None else at_least(1, "chunk_unit", chunk_unit)
        self.max_batch_size = at_least(1, "max_batch_size", max_batch_size)
        self.max_num_tokens = _limit("max_num_tokens", max_num_tokens)
        self.max_context_length = _limit("max_context_length", max_context_length)
        self.context_chunking_policy = context_chunking_policy
        self.chunk_unit = chunk_unit
        self.draft_rule = draft_rule
        self.reuse_credit_rule = reuse_credit_rule
        self.mixed_beam_widths = flag("mixed_beam_widths", mixed_beam_widths)
        self.num_shares = at_least(1, "num_shares", num_shares)
        if context_chunking_policy is not None:
            check_policy(context_chunking_policy, chunk_unit, max_context_length)

    def schedule(
        self, fitting_requests: RequestList, inflight_request_ids: Set[int]
    ) -> tuple[RequestList, RequestList]:
        """Return the context and the generation requests of the next step.

        Both lists are sorted by LoRA task id, with requests without an adapter first. Requests with
        equal ids stay in order. If contexts were cut, contexts that do not end in
        this step come before contexts that end.
        """
        most = self._most(fitting_requests)
        if inflight_request_ids:
            fitting_requests = [
                r for r in fitting_requests if r.request_id not in inflight_request_ids
            ]
        scan = self._scan(fitting_requests, most)
        context, generation = scan.whole, scan.generation
        policy, cut = self.context_chunking_policy, False
        if scan.chunked and policy is not None:
            cut = self._fit_contexts(scan.chunked, policy, scan.num_tokens)
            context += [request for request in scan.chunked if request.context_chunk_size]
        if scan.has_adapters:
            for requests in (context, generation):
                requests.sort(key=lambda r: -1 if r.lora_task_id is None else r.lora_task_id)
        if cut:
            context.sort(key=attrgetter("is_last_context_chunk"))
        return context, generation

    def why_waiting(
        self, fitting_requests: RequestList, inflight_request_ids: Set[int]
    ) -> Mapping[int, Wait] | None:
        """Return, by request id, why `schedule` would now leave requests out.

        Return None in a subclass that overrides `schedule` or `set_chunk_sizes`. Like
        `schedule`, this writes chunk sizes and trimmed drafts.
        """
        own = MicroBatchScheduler
        if (type(self).schedule, type(self).set_chunk_sizes) != (own.schedule, own.set_chunk_sizes):
            return None
        waits = Waits()
        most = self._most(fitting_requests)
        context, generation = self.schedule(fitting_requests, inflight_request_ids)
        requests = [r for r in fitting_requests if r.request_id not in inflight_request_ids]
        scan = self._scan(requests, most)
        taken = [*scan.whole, *scan.chunked, *scan.generation]
        ids = {request.request_id for request in taken}
        misfit = next((r for r in requests if r.request_id not in ids), None)
        if len(taken) >= most:
            waits.all_but(taken, requests, full(taken, most))
        elif misfit is not None:
            limit = self.max_num_tokens or 0
            is_context = misfit.state in (_CONTEXT_INIT, _ENCODER_INIT)
            cost = misfit.beam_width + misfit.num_draft_tokens
            cost = self._whole_cost(misfit) if is_context else cost
            left = limit - scan.num_tokens
            wait = lacking(WaitReason.TOKEN_BUDGET, cost, limit, left, taken)
            waits.end(misfit, wait, taken, requests)
        running = {request.request_id for request in (*context, *generation)}
        self._record_chunks(scan, running, waits)
        return waits

    def _record_chunks(self, scan: _Scan, running: Set[int], waits: Waits) -> None:
        """Record the waits of contexts that got no chunk, with the tokens that were left for them.

        With EQUAL_PROGRESS each earlier context is charged only its first unit, because all
        contexts get a first unit before any gets a second.
        """
        limit = self.max_num_tokens or 0
        left = limit - scan.num_tokens
        taken = [*scan.whole, *scan.generation]
        policy = self.context_chunking_policy
        in_rounds = policy is ContextChunkingPolicy.EQUAL_PROGRESS
        for request in scan.chunked:
            remaining = request.context_remaining_length
            credit = 0 if policy is ContextChunkingPolicy.FORCE_CHUNK else credit_of(request)
            least = min(remaining - credit, self.chunk_unit)
            if in_rounds and self.reuse_credit_rule == "prefix":
                least = max(0, min(remaining, self.chunk_unit) - credit)
            if request.request_id not in running:
                needed = max(1, least)
                waits.put(request, lacking(WaitReason.TOKEN_BUDGET, needed, limit, left, taken))
                continue
            taken = [*taken, request]
            size = request.context_chunk_size or 0
            left -= least if in_rounds else min(size, remaining - credit)

    def set_chunk_sizes(
        self,
        requests: RequestList,
        policy: ContextChunkingPolicy,
        capacity: int | None,
        unit: int,
        max_context_length: int | None,
    ) -> None:
        """Distribute `capacity` tokens over contexts, then trim the drafts at their ends.

        A chunk is a multiple of `unit`, or all that remains of a context. A context with a chunk of
        0 does not run in this step. `capacity` and `max_context_length` may be None, for no limit.
        """
        check_policy(policy, unit, max_context_length)
        room = UNLIMITED if capacity is None else capacity
        longest = UNLIMITED if max_context_length is None else max_context_length
        prefix = self.reuse_credit_rule == "prefix"
        if policy is ContextChunkingPolicy.EQUAL_PROGRESS:
            share_equally(requests, room, unit, longest, prefix)
        elif policy is ContextChunkingPolicy.FORCE_CHUNK:
            share_units(requests, room, unit)
        else:
            serve_in_order(requests, room, unit, longest, prefix)
        trim_drafts(requests, room, unit, longest, self.draft_rule == "reserve")

    def _most(self, fitting_requests: RequestList) -> int:
        """Return the limit of requests in a step. `fitting_requests` includes those in flight."""
        return min(self.max_batch_size, -(-len(fitting_requests) // self.num_shares))

    def _scan(self, requests: RequestList, most: int) -> _Scan:
        """Take requests from the front, up to `most` requests and up to the token limit."""
        encoder_init, context_init, in_progress, to_complete = self._open_states()
        limit = UNLIMITED if self.max_num_tokens is None else self.max_num_tokens
        chunking = self.context_chunking_policy is not None
        if chunking and context_init and len(requests) <= most:
            # The loop below counts no tokens of contexts that may be cut. If all requests are such
            # contexts, the loop is not needed.
            contexts = [request for request in requests if request.state is context_init]
            if len(contexts) == len(requests):
                has_adapters = any([r.lora_task_id is not None for r in contexts])
                return _Scan([], contexts, [], 0, has_adapters)
        slots_left, has_adapters = most, False
        num_tokens = batch_beam_width = 0
        whole: RequestList = []
        chunked: RequestList = []
        generation: RequestList = []
        for request in requests:
            state = request.state
            if state is in_progress or state is to_complete:
                beam_width = request.beam_width
                cost = beam_width + request.num_draft_tokens
                if num_tokens + cost > limit:
                    break
                if beam_width != batch_beam_width:
                    if batch_beam_width and not self.mixed_beam_widths:
                        continue
                    batch_beam_width = beam_width
                generation.append(request)
                num_tokens += cost
            elif state is context_init and chunking:
                chunked.append(request)
            elif state is context_init or state is encoder_init:
                cost = self._whole_cost(request)
                if num_tokens + cost > limit:
                    break
                whole.append(request)
                num_tokens += cost
            else:
                continue
            has_adapters = has_adapters or request.lora_task_id is not None
            slots_left -= 1
            if not slots_left:
                break
        return _Scan(whole, chunked, generation, num_tokens, has_adapters)

    def _open_states(self) -> list[LlmRequestState | None]:
        """Return the four states in order, with None in place of each that is not schedulable."""
        first, end = self.no_schedule_until_state, self.no_schedule_after_state
        states = (_ENCODER_INIT, _CONTEXT_INIT, _IN_PROGRESS, _TO_COMPLETE)
        return [state if first <= state < end else None for state in states]

    def _whole_cost(self, request: LlmRequest) -> int:
        """Return how many tokens are charged for an encoder input, or for a context in one piece.

        Raise SchedulerError for more than `max_context_length`.
        """
        if request.state is _ENCODER_INIT:
            kind, cost = "encoder", request.encoder_len
        else:
            kind, cost = "context", request.num_tokens + request.num_draft_tokens
            if not request.is_first_context_chunk:  # the loop has cut it
                cost -= request.context_current_position
            elif request.estimated_reusable_tokens:
                cost = max(1, cost - request.estimated_reusable_tokens)
        longest = self.max_context_length
        if longest is not None and cost > longest:
            raise SchedulerError(
                f"The number of {kind} tokens ({cost}) exceeds the limit value ({longest}): "
                f"{request!r} needs a larger max_context_length or chunking"
            )
        return cost

    def _fit_contexts(
        self, contexts: RequestList, policy: ContextChunkingPolicy, num_tokens: int
    ) -> bool:
        """Set the chunk sizes of `contexts`. Return whether contexts may be cut.

        The other requests of the step take `num_tokens` tokens.
        """
        capacity, longest = self.max_num_tokens, self.max_context_length
        if capacity is not None:
            capacity -= num_tokens
        fits = policy is not ContextChunkingPolicy.FORCE_CHUNK
        costs = [
            request.prompt_len
            - request.context_current_position
            + request.num_draft_tokens
            - (request.estimated_reusable_tokens and first_credit(request))
            for request in contexts
        ]
        if longest is not None and max(costs) > longest:
            fits = False
        if not fits or (capacity is not None and sum(costs) > capacity):
            self.set_chunk_sizes(contexts, policy, capacity, self.chunk_unit, longest)
            return True
        for request in contexts:
            size = request.prompt_len - request.context_current_position
            if request.context_chunk_size != size:
                request.context_chunk_size = size
        return False


def _limit(name: str, value: int | None) -> int | None:
    return None if value is None else at_least(1, name, value)
