"""The number of blocks that a request takes at its start, in its next step, and in its whole life.

The numbers follow from the request's lengths and progress. This module does not know which blocks
are free or held.
"""

from __future__ import annotations

from collections.abc import Iterable

from gptmanager.arguments import at_least
from gptmanager.errors import ConfigError
from gptmanager.request.llm_request import LlmRequest, LlmRequestState

_IN_PROGRESS = LlmRequestState.GENERATION_IN_PROGRESS
_TO_COMPLETE = LlmRequestState.GENERATION_TO_COMPLETE
_COMPLETE = LlmRequestState.GENERATION_COMPLETE
UNBOUNDED = 1 << 62


class BlockNeeds:
    """Counts the blocks that requests need for self attention.

    A *slot* is a place in the cache for the keys and values of one token, or padding of the sink
    tokens to whole blocks. `bubble` is the number of padding slots of a sequence. `max_slots` is
    the number of slots at which a sequence stops growing, because its attention window is full.
    """

    __slots__ = ("bubble", "max_slots", "max_table_length", "tokens_per_block", "window")

    grows = True

    def __init__(
        self, tokens_per_block: int, max_attention_window: int | None, sink_token_length: int
    ) -> None:
        self.tokens_per_block = at_least(1, "tokens_per_block", tokens_per_block)
        window = UNBOUNDED
        if max_attention_window is not None:
            window = at_least(1, "max_attention_window", max_attention_window)
        sink = at_least(0, "sink_token_length", sink_token_length)
        if sink >= window:
            raise ConfigError(
                f"sink_token_length = {sink} must be less than max_attention_window = {window}"
            )
        self.window = window
        self.bubble = -sink % self.tokens_per_block
        self.max_slots = window + self.bubble
        self.max_table_length = self.table_length(self.max_slots)

    def table_length(self, num_slots: int) -> int:
        """Return the number of blocks of one beam that has `num_slots` slots."""
        return -(-min(num_slots, self.max_slots) // self.tokens_per_block)

    def context_slots(self, request: LlmRequest) -> int:
        """Return the number of slots of the whole context, even if the window is smaller."""
        return request.prompt_len + self.bubble

    def context(self, request: LlmRequest, num_drafts: int = 0) -> tuple[int, int]:
        """Return how many blocks of the context the beams share, and how many they do not share."""
        tokens = min(request.prompt_len + num_drafts, self.window)
        shared, partial = divmod(tokens + self.bubble, self.tokens_per_block)
        return shared, request.beam_width if partial else 0

    def life(self, request: LlmRequest) -> tuple[int, int]:
        """Return how many full blocks a beam's context has, and how many blocks a beam needs."""
        context = min(request.prompt_len, self.window) + self.bubble
        return context // self.tokens_per_block, self._life_length(request)

    def _life_length(self, request: LlmRequest) -> int:
        tokens = request.prompt_len + request.max_new_tokens
        slots = (tokens if tokens < self.window else self.window) + self.bubble
        return -(-slots // self.tokens_per_block)

    def whole_life(self, request: LlmRequest) -> int:
        """Return the number of blocks that all beams need, from the first token to the last."""
        context, total = self.life(request)
        return (total - context) * request.beam_width + context

    def remaining(self, request: LlmRequest, held: int) -> int:
        """Return how many blocks are still to be taken if each beam holds `held` blocks."""
        if request.beam_width == 1:
            return max(0, self._life_length(request) - held)
        context, total = self.life(request)
        if held < context:
            return context - held + (total - context) * request.beam_width
        return max(0, total - held) * request.beam_width

    def one_step(self, request: LlmRequest, two_step_lookahead: bool) -> int:
        """Return how many blocks the request takes in one step, or in two with the lookahead.

        A first context chunk takes the blocks of the whole prompt and its drafts, a later chunk
        none. In generation, all tokens except the newest are stored. The next step stores the
        newest token.
        """
        if request.state < _IN_PROGRESS:
            if not request.is_first_context_chunk:
                return 0
            drafts = min(request.num_draft_tokens, request.max_new_tokens)
            return sum(self.context(request, drafts))
        if request.state >= _COMPLETE:
            return 0
        beyond_prompt = request.num_tokens - request.prompt_len - 1
        if beyond_prompt < 0:  # its first token is not launched yet
            beyond_prompt = 0
        growth = request.num_draft_tokens + 1
        if two_step_lookahead:
            growth *= 2
        room = request.max_new_tokens - beyond_prompt
        if growth > room:
            growth = room
        stored = request.prompt_len + beyond_prompt + self.bubble
        end = stored + growth
        if end > self.max_slots:
            end = self.max_slots
        if end <= stored:
            return 0
        size = self.tokens_per_block
        return ((end - 1) // size - (stored - 1) // size) * request.beam_width

    def sum_one_step(self, requests: Iterable[LlmRequest], two_step_lookahead: bool) -> int:
        """Return the sum of `one_step` over `requests`, in one call."""
        size, bubble, last = self.tokens_per_block, self.bubble, self.max_slots
        total = 0
        for request in requests:
            stored = request.num_tokens - 1
            if (
                request.state is _IN_PROGRESS
                and not request.num_draft_tokens
                and not two_step_lookahead
                and stored >= request.prompt_len
                and stored + bubble < last
            ):  # the step stores one token, which takes a block per beam if it begins a block
                if not (stored + bubble) % size:
                    total += request.beam_width
            else:
                total += self.one_step(request, two_step_lookahead)
        return total

    def most_to_completion(self, requests: Iterable[LlmRequest]) -> int:
        """Return, in little time, an upper bound of the sum of `remaining`, for any `held`."""
        size, more = self.tokens_per_block, self.bubble + self.tokens_per_block - 1
        return sum(
            [
                (request.prompt_len + request.max_new_tokens + more) // size * request.beam_width
                for request in requests
            ]
        )

    def most_in_one_step(self, requests: Iterable[LlmRequest], two_step_lookahead: bool) -> int:
        """Return, in little time, an upper bound of the sum of `one_step` over `requests`."""
        size, bubble, steps = self.tokens_per_block, self.bubble, 1 + two_step_lookahead
        total = 0
        for request in requests:
            drafts, state = request.num_draft_tokens, request.state
            if state is _IN_PROGRESS or state is _TO_COMPLETE:
                total += ((drafts + 1) * steps // size + 1) * request.beam_width
            else:
                total += (request.prompt_len + drafts + bubble) // size + request.beam_width
        return total


class CrossBlockNeeds(BlockNeeds):
    """Counts the blocks of cross attention: for the encoder's positions, which all beams share."""

    __slots__ = ()

    grows = False

    def __init__(
        self, tokens_per_block: int, max_attention_window: int | None, sink_token_length: int
    ) -> None:
        if max_attention_window is not None or sink_token_length:
            raise ConfigError(
                "cross=True: a cross KV cache has no max_attention_window and no sink_token_length"
            )
        super().__init__(tokens_per_block, None, 0)

    def context_slots(self, request: LlmRequest) -> int:
        return request.encoder_len

    def context(self, request: LlmRequest, num_drafts: int = 0) -> tuple[int, int]:
        return self.table_length(request.encoder_len), 0

    def life(self, request: LlmRequest) -> tuple[int, int]:
        blocks = self.table_length(request.encoder_len)
        return blocks, blocks

    def remaining(self, request: LlmRequest, held: int) -> int:
        begun = request.state >= _IN_PROGRESS or request.context_current_position > 0
        return 0 if begun or held else self.table_length(request.encoder_len)

    def one_step(self, request: LlmRequest, two_step_lookahead: bool) -> int:
        if request.state < _IN_PROGRESS and request.is_first_context_chunk:
            return self.table_length(request.encoder_len)
        return 0

    def sum_one_step(self, requests: Iterable[LlmRequest], two_step_lookahead: bool) -> int:
        return sum(self.one_step(request, two_step_lookahead) for request in requests)

    def most_to_completion(self, requests: Iterable[LlmRequest]) -> int:
        return sum(self.table_length(request.encoder_len) for request in requests)

    def most_in_one_step(self, requests: Iterable[LlmRequest], two_step_lookahead: bool) -> int:
        return self.most_to_completion(requests)
