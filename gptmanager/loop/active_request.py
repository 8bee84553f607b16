"""`ActiveRequest`: an accepted request, from its admission to its final response."""

from __future__ import annotations

from gptmanager.config import FinishReason
from gptmanager.decoding.beam_search import BeamParams, BeamSearch
from gptmanager.decoding.drafting import Drafter
from gptmanager.decoding.parallel_sampling import ParallelSampling
from gptmanager.decoding.stop_words import StopWords
from gptmanager.request.input_rows import HostRows
from gptmanager.request.llm_request import (
    NO_EXTRAS,
    LlmRequest,
    LlmRequestState,
    OutputConfig,
    SamplingParams,
)
from gptmanager.request.post_processor import RequestProcessor


class ActiveRequest(LlmRequest):
    """What schedulers see of a request, and what its responses need.

    `length_limit`: prompt + new tokens at which it ends. `num_sent`: tokens of its history that
    have been sent, it survives pauses. `cached_tokens`: tokens of the prompt that its first start
    found in the KV cache. `search` holds the beams if there are several; `tokens` then only counts
    what is generated. Times are seconds of the clock of `Intake.now`; None: has not happened.
    """

    __slots__ = (
        "cached_tokens",
        "client_id",
        "deadline",
        "draft_logits",
        "drafter",
        "drafts",
        "end_id",
        "exclude_input",
        "first_scheduled",
        "first_token",
        "has_extras",
        "include_stop",
        "is_serial",
        "is_streaming",
        "last_token",
        "length_limit",
        "num_accepted",
        "num_drafted",
        "num_sent",
        "pad_id",
        "processor",
        "prompt_table",
        "queue_deadline",
        "sampling",
        "search",
        "stop_state",
        "stop_words",
        "output_config",
    )

    def __init__(
        self,
        request_id: int,
        tokens: list[int],
        max_new_tokens: int,
        sampling: SamplingParams,
        *,
        is_streaming: bool = False,
        pad_id: int = 0,
        stop_words: StopWords | None = None,
        include_stop: bool = False,
        exclude_input: bool = False,
        deadline_s: float | None = None,
        queue_timeout_s: float | None = None,
        priority: float = 0.5,
        arrival_time: float = 0.0,
        cache_salt: str | int | None = None,
        retention_priority: int | None = None,
        beams: BeamParams | None = None,
        processor: RequestProcessor | None = None,
        client_id: int | None = None,
        output_config: OutputConfig = NO_EXTRAS,
        prompt_table: HostRows | None = None,
        drafts: tuple[int, ...] = (),
        draft_logits: HostRows | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        prepares = processor is not None and processor.prepares
        super().__init__(
            request_id,
            tokens,
            max_new_tokens,
            beam_width=1 if beams is None else beams.width,
            priority=priority,
            arrival_time=arrival_time,
            # cached blocks of equal ids hold something else with another table
            cache_salt=(cache_salt, prompt_table.digest) if prompt_table else cache_salt,
            retention_priority=retention_priority,
            state=LlmRequestState.PREPARING if prepares else LlmRequestState.CONTEXT_INIT,
        )
        self.processor = processor
        self.client_id = client_id
        self.prompt_table = prompt_table
        self.sampling = sampling
        self.drafts = drafts  # tokens guessed to follow what is confirmed
        self.draft_logits = draft_logits  # what a host's guesses were drawn from
        self.num_draft_tokens = len(drafts)
        self.drafter = drafter
        self.num_drafted = self.num_accepted = 0
        # what it runs next depends on the values of its last tokens
        self.is_serial = beams is not None or drafter is not None or len(drafts) > 0
        self.search: BeamSearch | None = None
        if beams is not None:
            self.search = (ParallelSampling if beams.sampled else BeamSearch)(
                beams,
                max_new_tokens,
                end_id=sampling.end_id,
                stop_words=stop_words,
                include_stop=include_stop,
            )
        self.end_id = sampling.end_id
        self.pad_id = pad_id
        self.is_streaming = is_streaming
        self.stop_words = stop_words
        self.stop_state = 0
        self.include_stop = include_stop
        self.output_config = output_config
        self.has_extras = (
            output_config.log_probs
            or output_config.generation_logits
            or output_config.context_logits
        ) or beams is not None
        self.exclude_input = exclude_input
        self.length_limit = len(tokens) + max_new_tokens
        self.num_sent = len(tokens)
        self.deadline = None if deadline_s is None else arrival_time + deadline_s
        self.queue_deadline = None if queue_timeout_s is None else arrival_time + queue_timeout_s
        self.cached_tokens = 0
        self.first_scheduled: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None

    def find_end(self, token: int) -> tuple[FinishReason, int] | None:
        """Does the request end with `token`, just confirmed? Why, and where its output ends."""
        num_tokens = len(self.tokens)
        if token == self.end_id:
            return FinishReason.END_ID, num_tokens - (not self.include_stop)
        if self.stop_words is not None:
            self.stop_state, matched = self.stop_words.advance(self.stop_state, token)
            if matched:
                kept = 0 if self.include_stop else matched
                return FinishReason.STOP_WORDS, num_tokens - kept
        if num_tokens >= self.length_limit:
            return FinishReason.LENGTH, num_tokens
        return None

    def propose_drafts(self) -> None:
        """Guess what follows; the last permitted token needs no guess behind it."""
        if self.drafter is not None:
            limit = self.max_new_tokens - self.num_generated - 1
            self.drafts = tuple(self.drafter.propose(self.tokens, limit))
            self.num_draft_tokens = len(self.drafts)

    def take_drafts(self) -> tuple[int, ...]:
        """The guesses to run now, as many as the scheduler has left; they are used up."""
        drafts = self.drafts[: self.num_draft_tokens]
        self.drafts, self.num_draft_tokens = (), 0
        return drafts

    def settle_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """So many of the guesses that ran were right."""
        self.launch_drafts(num_accepted)
        self.num_drafted += num_drafts
        self.num_accepted += num_accepted
        if self.drafter is not None:
            self.drafter.learn_result(num_drafts, num_accepted)

    def pause(self, max_input_len: int) -> None:
        super().pause(max_input_len)
        if len(self.tokens) > self.orig_prompt_len:  # a host's guesses follow its prompt
            self.drafts = ()
        self.num_draft_tokens = len(self.drafts)
        if self.search is not None:
            self.search.restart()

    @property
    def streamable_end(self) -> int:
        """History position up to which tokens may be sent: what may yet be cut off is held."""
        if self.search is not None:
            return self.orig_prompt_len + self.search.stable_length()
        num_tokens = len(self.tokens)
        if self.stop_words is None or self.include_stop:
            return num_tokens
        return num_tokens - self.stop_words.held(self.stop_state, self.length_limit - num_tokens)

    @property
    def wanted_from_start(self) -> OutputConfig:
        """What a start that comes now must yield: context logits only if they are not known."""
        if self.first_token is None:
            return self.output_config
        return self.output_config._replace(context_logits=False)

    @property
    def reads_cache(self) -> bool:
        """Context logits come of computing the context, all of it."""
        return not self.output_config.context_logits or self.first_token is not None

    @property
    def is_timed(self) -> bool:
        return self.deadline is not None or self.queue_deadline is not None

    def is_overdue(self, now: float) -> bool:
        return (self.deadline is not None and now > self.deadline) or (
            self.queue_deadline is not None
            and self.first_scheduled is None
            and now > self.queue_deadline
        )
