"""`ActiveRequest`: an accepted request, from its admission to its final response."""

from __future__ import annotations

from gptmanager.decoding.drafting import RequestDrafts
from gptmanager.decoding.end_rule import EndRule
from gptmanager.decoding.search.beam_search import BeamParams, BeamSearch, ParallelSampling
from gptmanager.loop.request_times import RequestTimes
from gptmanager.request.adapter import AdapterTensors, LoraInputs
from gptmanager.request.input_rows import HostRows
from gptmanager.request.llm_request import LlmRequest, LlmRequestState
from gptmanager.request.output_options import OutputConfig, OutputOptions
from gptmanager.request.post_processor import RequestProcessor
from gptmanager.request.sampling_params import SamplingParams

# what a request in PREPARING waits for, as bits
FOR_PROCESSOR, FOR_ADAPTER = 1, 2


class ActiveRequest(LlmRequest):
    """A request as schedulers see it, with what its responses need.

    `num_sent`: tokens of its history that have been sent; it survives pauses. `stop_state`: that
    of `end_rule` for its text. `cached_tokens`: tokens of the prompt that its first start found in
    the KV cache. `search` holds the beams if there are several; `tokens` then only counts what is
    generated. `is_serial`: what it runs next depends on the values of its last tokens.
    `adapter_digest`: of its adapter's content, once that is known. `adapter_slot`: where kernels
    find it, while it is on the device; -1: nowhere. `adapter_tensors`: until they are read.
    """

    __slots__ = (
        "adapter_digest",
        "adapter_slot",
        "adapter_tensors",
        "awaited",
        "cached_tokens",
        "client_id",
        "drafts",
        "end_rule",
        "has_extras",
        "is_serial",
        "num_sent",
        "output",
        "processor",
        "prompt_table",
        "sampling",
        "search",
        "stop_state",
        "times",
    )

    def __init__(
        self,
        request_id: int,
        tokens: list[int],
        sampling: SamplingParams,
        end_rule: EndRule,
        output: OutputOptions,
        times: RequestTimes,
        drafts: RequestDrafts,
        *,
        beams: BeamParams | None = None,
        priority: float = 0.5,
        cache_salt: str | int | None = None,
        retention_priority: int | None = None,
        processor: RequestProcessor | None = None,
        client_id: int | None = None,
        prompt_table: HostRows | None = None,
        lora: LoraInputs | None = None,
    ) -> None:
        awaited = FOR_PROCESSOR if processor is not None and processor.prepares else 0
        awaited |= 0 if lora is None else FOR_ADAPTER
        super().__init__(
            request_id,
            tokens,
            end_rule.max_new_tokens,
            beam_width=1 if beams is None else beams.width,
            priority=priority,
            lora_task_id=None if lora is None else lora.task_id,
            arrival_time=times.arrival,
            # cached blocks of equal ids hold something else with another table
            cache_salt=(cache_salt, prompt_table.digest) if prompt_table else cache_salt,
            retention_priority=retention_priority,
            state=LlmRequestState.PREPARING if awaited else LlmRequestState.CONTEXT_INIT,
        )
        self.awaited = awaited
        self.adapter_tensors: AdapterTensors | None = None if lora is None else lora.tensors
        self.adapter_digest = ""
        self.adapter_slot = -1
        self.sampling = sampling
        self.end_rule = end_rule
        self.output = output
        self.times = times
        self.drafts = drafts
        self.num_draft_tokens = len(drafts.tokens)
        self.processor = processor
        self.client_id = client_id
        self.prompt_table = prompt_table
        self.search: BeamSearch | None = None
        if beams is not None:
            self.search = (ParallelSampling if beams.sampled else BeamSearch)(beams, end_rule)
        self.is_serial = beams is not None or drafts.drafter is not None or len(drafts.tokens) > 0
        self.has_extras = beams is not None or output.config.asks
        self.stop_state = 0
        self.num_sent = len(tokens)
        self.cached_tokens = 0

    def wait_for(self, what: int) -> None:
        """It has not started, and must not before that has come."""
        self.awaited |= what
        if self.state is LlmRequestState.CONTEXT_INIT:
            self.move_to(LlmRequestState.PREPARING)

    def has_come(self, what: int) -> None:
        """It waits for that no longer, if it did."""
        self.awaited &= ~what
        if not self.awaited and self.state is LlmRequestState.PREPARING:
            self.move_to(LlmRequestState.CONTEXT_INIT)

    @property
    def adapter_key(self) -> str | None:
        """The content counts, whatever its id: that may get another one."""
        return self.adapter_digest or None

    def propose_drafts(self) -> None:
        """Draft what follows; the last permitted token needs no draft behind it."""
        drafts = self.drafts
        if drafts.drafter is not None:
            limit = self.max_new_tokens - self.num_generated - 1
            drafts.tokens = tuple(drafts.drafter.propose(self.tokens, limit))
            self.num_draft_tokens = len(drafts.tokens)

    def take_drafts(self) -> tuple[int, ...]:
        """The drafts to run now, as many as the scheduler has left; they are used up."""
        taken = self.drafts.tokens[: self.num_draft_tokens]
        self.drafts.tokens, self.num_draft_tokens = (), 0
        return taken

    def settle_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """`num_accepted` of the `num_drafts` that ran were right."""
        self.launch_drafts(num_accepted)
        if self.drafts.drafter is not None:
            self.drafts.drafter.learn_result(num_drafts, num_accepted)

    def pause(self, max_input_len: int) -> None:
        super().pause(max_input_len)
        if len(self.tokens) > self.orig_prompt_len:  # a host's drafts follow its prompt
            self.drafts.tokens = ()
        self.num_draft_tokens = len(self.drafts.tokens)
        if self.search is not None:
            self.search.restart()

    @property
    def num_output(self) -> int:
        """Confirmed tokens beyond the prompt that the host sent."""
        return len(self.tokens) - self.orig_prompt_len

    @property
    def length_limit(self) -> int:
        """Prompt + new tokens at which it ends."""
        return self.orig_prompt_len + self.end_rule.max_new_tokens

    @property
    def streamable_end(self) -> int:
        """History position up to which tokens may be sent: what may yet be cut off is held."""
        if self.search is not None:
            return self.orig_prompt_len + self.search.stable_length()
        if self.end_rule.stop_words is None:
            return len(self.tokens)
        return self.orig_prompt_len + self.end_rule.shown(self.stop_state, self.num_output)

    @property
    def wanted_from_start(self) -> OutputConfig:
        """The outputs that a start must produce now; those of the prompt only if not known yet."""
        config = self.output.config
        return config if self.times.first_token is None else config.without_prompt

    @property
    def reads_cache(self) -> bool:
        """Whether the prompt may be read from the cache: no output needs all of it computed."""
        return not self.wanted_from_start.asks_of_prompt
