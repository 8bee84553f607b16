"""`LlmRequest`: the data of a request for schedulers and the KV cache, without tensors.

A request has two counts of tokens. *Launched* tokens are positions with an enqueued computation;
memory and policies depend on launched tokens. *Confirmed* tokens have known values; responses and
the history depend on confirmed tokens. Without run-ahead both counts are equal between iterations.
"""

from __future__ import annotations

from bisect import insort_right
from collections.abc import Hashable, Sequence
from enum import IntEnum
from typing import TypeVar

from gptmanager.arguments import at_least


class LlmRequestState(IntEnum):
    """The states of a request. A request has *reached* its state and all states of lower values."""

    UNKNOWN = 0
    ENCODER_INIT = 1
    CONTEXT_INIT = 2
    GENERATION_IN_PROGRESS = 3
    GENERATION_TO_COMPLETE = 4  # its last permitted token is launched, but not confirmed
    GENERATION_COMPLETE = 5
    PREPARING = -1  # waits for its logits post-processor or its adapter; never schedulable


_S = LlmRequestState
_CONTEXT_INIT = _S.CONTEXT_INIT
_IN_PROGRESS = _S.GENERATION_IN_PROGRESS
_TO_COMPLETE = _S.GENERATION_TO_COMPLETE

NEXT_STATES: dict[LlmRequestState, frozenset[LlmRequestState]] = {
    _S.PREPARING: frozenset({_S.CONTEXT_INIT, _S.GENERATION_COMPLETE}),
    _S.UNKNOWN: frozenset({_S.ENCODER_INIT, _S.CONTEXT_INIT, _S.GENERATION_COMPLETE}),
    _S.ENCODER_INIT: frozenset({_S.CONTEXT_INIT, _S.GENERATION_COMPLETE}),
    _S.CONTEXT_INIT: frozenset(
        {_S.CONTEXT_INIT, _IN_PROGRESS, _S.GENERATION_COMPLETE, _S.PREPARING}
    ),
    _IN_PROGRESS: frozenset({_S.CONTEXT_INIT, _TO_COMPLETE, _S.GENERATION_COMPLETE}),
    _TO_COMPLETE: frozenset({_S.CONTEXT_INIT, _S.GENERATION_COMPLETE}),
    _S.GENERATION_COMPLETE: frozenset(),
}


RETENTION_PRIORITIES = (0, 100)  # the lowest and the highest


class LlmRequest:
    """One request as schedulers see it. Code without a manager may construct and step a request.

    The argument `tokens` is the prompt, or the prompt's length if only lengths matter. After a
    pause, the tokens generated so far belong to the prompt: `prompt_len` grows, `max_new_tokens`
    shrinks, and `orig_prompt_len` keeps the length of the prompt that the host sent.
    """

    __slots__ = (
        "arrival_time",
        "beam_width",
        "cache_salt",
        "context_current_position",
        "encoder_len",
        "epoch",
        "estimated_reusable_tokens",
        "lora_task_id",
        "max_new_tokens",
        "num_draft_tokens",
        "num_tokens",
        "orig_prompt_len",
        "pause_count",
        "priority",
        "prompt_len",
        "request_id",
        "retention_priority",
        "slot",
        "state",
        "tokens",
        "_context_chunk_size",
    )

    def __init__(
        self,
        request_id: int,
        tokens: Sequence[int] | int,
        max_new_tokens: int,
        *,
        beam_width: int = 1,
        priority: float = 0.5,
        num_draft_tokens: int = 0,
        lora_task_id: int | None = None,
        encoder_len: int = 0,
        context_chunk_size: int | None = None,
        context_current_position: int = 0,
        state: LlmRequestState = LlmRequestState.CONTEXT_INIT,
        estimated_reusable_tokens: int = 0,
        arrival_time: float = 0.0,
        cache_salt: Hashable = None,
        retention_priority: int | None = None,
    ) -> None:
        for name, low, value in (
            ("tokens", 0, tokens if isinstance(tokens, int) else 0),
            ("max_new_tokens", 0, max_new_tokens),
            ("beam_width", 1, beam_width),
            ("num_draft_tokens", 0, num_draft_tokens),
            ("encoder_len", 0, encoder_len),
            ("estimated_reusable_tokens", 0, estimated_reusable_tokens),
            ("context_current_position", 0, context_current_position),
        ):
            if type(value) is not int or value < low:
                at_least(low, f"request {request_id}: {name}", value)
        _check_retention(retention_priority)
        self.request_id = request_id
        self.tokens: list[int] = [0] * tokens if isinstance(tokens, int) else list(tokens)
        self.max_new_tokens = max_new_tokens
        self.beam_width = beam_width
        self.priority = priority
        self.num_draft_tokens = num_draft_tokens
        self.lora_task_id = lora_task_id
        self.encoder_len = encoder_len
        self.estimated_reusable_tokens = estimated_reusable_tokens
        self.arrival_time = arrival_time
        self.cache_salt = cache_salt  # requests with equal salts share cached blocks
        # how long its cached blocks stay; None: new blocks have the default, others keep theirs
        self.retention_priority = retention_priority
        self.prompt_len = self.orig_prompt_len = self.num_tokens = len(self.tokens)
        self.pause_count = 0
        self.slot = -1  # index in the executor's tables; -1 if not started, or paused
        self.epoch = 0  # serial number of the last start, copied to `Row.epoch`; 0 without a slot
        self.state = LlmRequestState(state)
        if context_current_position > self.prompt_len:
            raise ValueError(
                f"request {request_id}: context_current_position = {context_current_position} "
                f"exceeds the prompt of {self.prompt_len} tokens"
            )
        past_context = state >= _IN_PROGRESS
        self.context_current_position = (
            self.prompt_len if past_context else context_current_position
        )
        self._context_chunk_size: int | None = None
        self.context_chunk_size = context_chunk_size

    def __repr__(self) -> str:
        return (
            f"LlmRequest({self.request_id}, {self.state.name}, prompt_len={self.prompt_len}, "
            f"num_generated={self.num_generated}/{self.max_new_tokens}, "
            f"context={self.context_current_position}+{self._context_chunk_size})"
        )

    # Read by policies -----------------------------------------------------------------------

    @property
    def num_generated(self) -> int:
        """Number of launched tokens after the current prompt."""
        return self.num_tokens - self.prompt_len

    @property
    def has_started(self) -> bool:
        """Whether the request has memory, or had memory before an error."""
        return self.slot >= 0 or self.state >= _IN_PROGRESS or self.context_current_position > 0

    @property
    def context_remaining_length(self) -> int:
        """Number of context tokens that have not run yet."""
        return self.prompt_len - self.context_current_position

    @property
    def context_chunk_size(self) -> int | None:
        """Number of context tokens to run next, or None for the whole remaining context."""
        return self._context_chunk_size

    @context_chunk_size.setter
    def context_chunk_size(self, size: int | None) -> None:
        if size is not None:
            if size < 0:
                raise ValueError(f"context_chunk_size must not be negative, got {size}")
            size = min(size, self.prompt_len - self.context_current_position)
        self._context_chunk_size = size

    @property
    def is_first_context_chunk(self) -> bool:
        """Whether the next chunk begins the context, or no chunk size is set."""
        return self._context_chunk_size is None or self.context_current_position == 0

    @property
    def is_last_context_chunk(self) -> bool:
        """Whether the next chunk ends the context."""
        size = self._context_chunk_size
        return size is None or self.context_current_position + size == self.prompt_len

    @property
    def adapter_key(self) -> int | str | None:
        """Return the adapter's key for block reuse: equal keys mean equal adapters."""
        return self.lora_task_id

    @property
    def reads_cache(self) -> bool:
        """Whether the context may begin after cached blocks.

        In either case, the request's own blocks are stored for reuse.
        """
        return True

    # Steps ----------------------------------------------------------------------------------

    def move_to(self, state: LlmRequestState) -> None:
        """Change the state; raise ValueError for a change that is not in NEXT_STATES."""
        if state not in NEXT_STATES[self.state]:
            raise ValueError(
                f"request {self.request_id}: {self.state.name} cannot become {state.name}"
            )
        self.state = state

    def move_to_next_context_chunk(self, stop: int | None = None) -> None:
        """Record the launch of a context chunk. After the last chunk, the request generates.

        If the chunk would pass position `stop`, it ends there, and the rest is the next chunk.
        """
        if self.state is not _CONTEXT_INIT:
            raise ValueError(f"request {self.request_id} is in {self.state.name}, not in context")
        size, position = self._context_chunk_size, self.context_current_position
        end = self.prompt_len if size is None else position + size
        if stop is not None and position < stop < end:
            self.context_current_position, self._context_chunk_size = stop, end - stop
        elif size is None:
            self.context_current_position = self.prompt_len
        else:
            self.context_current_position += size
            self._context_chunk_size = 0
        if self.context_current_position == self.prompt_len:
            self.state = _IN_PROGRESS

    def skip_cached_context(self, num_tokens: int, tokens_per_block: int) -> None:
        """Start the context after `num_tokens` tokens that are in the KV cache already.

        A chunk that reaches the end of the context is shortened to end there. Any other chunk is
        shortened to end at a block boundary, unless no token would remain.
        """
        size = self._context_chunk_size
        self.context_current_position = num_tokens
        if size is None:
            return
        end = num_tokens + size
        if end < self.prompt_len and end - end % tokens_per_block > num_tokens:
            size -= end % tokens_per_block
        self.context_chunk_size = size

    def launch_token(self) -> None:
        """Record the launch of one more token. The last permitted token changes the state."""
        self.num_tokens += 1
        if self.num_tokens - self.prompt_len >= self.max_new_tokens and self.state is _IN_PROGRESS:
            self.state = _TO_COMPLETE

    def launch_drafts(self, num_accepted: int) -> None:
        """Count the `num_accepted` accepted drafts of the last launch as launched tokens."""
        for _ in range(num_accepted):
            self.launch_token()

    def confirm_token(self, token: int) -> None:
        """Record the value of the next launched token."""
        self.tokens.append(token)

    def add_token(self, token: int = 0) -> None:
        """Launch and confirm a token at once, for a caller that steps by hand."""
        self.launch_token()
        self.tokens.append(token)

    def begin_after(self, tokens: Sequence[int]) -> None:
        """Make `tokens`, which were generated earlier, a part of the prompt of a new request.

        The prompt grows, and `max_new_tokens` shrinks, as when a request is paused.
        """
        self.tokens += tokens
        self.prompt_len = self.num_tokens = len(self.tokens)
        self.max_new_tokens -= len(tokens)
        self.num_draft_tokens = 0

    def pause(self, max_input_len: int) -> None:
        """Go back to the start of the context; generated tokens become part of the prompt.

        With beams, the generated tokens are discarded. Otherwise the new prompt is truncated to
        `max_input_len`, but never below the old prompt, and `max_new_tokens` shrinks by the number
        of tokens that became prompt. Tokens that are launched, but not confirmed yet, are dropped:
        they will be computed again.
        """
        # Create a new list: a copied state may refer to the old list, which must not change.
        if self.beam_width > 1:
            self.tokens = self.tokens[: self.prompt_len]
        else:
            self.tokens = self.tokens[: max(max_input_len, self.prompt_len)]
            self.max_new_tokens -= len(self.tokens) - self.prompt_len
            self.prompt_len = len(self.tokens)
        self.num_tokens = self.prompt_len
        self.context_current_position = 0
        self._context_chunk_size = None
        self.slot = -1
        self.pause_count += 1
        self.move_to(_CONTEXT_INIT)

    def finish(self) -> None:
        """Move to GENERATION_COMPLETE."""
        self.move_to(LlmRequestState.GENERATION_COMPLETE)


def _check_retention(priority: int | None) -> None:
    lowest, highest = RETENTION_PRIORITIES
    if priority is not None and not lowest <= priority <= highest:
        raise ValueError(f"retention_priority = {priority} must be from {lowest} to {highest}")


RequestList = list[LlmRequest]


_Request = TypeVar("_Request", bound=LlmRequest)


def insert_by_priority(active: list[_Request], request: _Request) -> None:
    """Insert a request into `active`, after all requests of the same or a higher priority.

    `active` is sorted by descending priority.
    """
    insort_right(active, request, key=lambda other: -other.priority)
