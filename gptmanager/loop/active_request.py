"""`ActiveRequest`: an accepted request, from its admission to its final response."""

from __future__ import annotations

from gptmanager.decoding.end_rule import EndRule
from gptmanager.decoding.prompt_lookup import RequestDrafts
from gptmanager.decoding.search.beam_search import BeamParams, BeamSearch, ParallelSampling
from gptmanager.errors import CapacityError
from gptmanager.loop.request_times import RequestTimes
from gptmanager.request.adapter import AdapterTensors, LoraInputs
from gptmanager.request.input_rows import HostRows
from gptmanager.request.llm_request import LlmRequest, LlmRequestState
from gptmanager.request.output_options import OutputConfig, OutputOptions
from gptmanager.request.post_processor import RequestProcessor
from gptmanager.request.sampling_params import SamplingParams
from gptmanager.step import Progress

# bits of `awaited`: the events that a request in PREPARING waits for
FOR_PROCESSOR, FOR_ADAPTER = 1, 2


class ActiveRequest(LlmRequest):
    """A request as schedulers see it, with the values that its responses need.

    `num_sent` is the number of prompt tokens plus the number of generated tokens that were sent;
    pauses do not change this number. `stop_state` is the state of `end_rule` after the tokens so
    far. `cached_tokens` is the number of prompt tokens that the first start found in the KV cache.
    `search` is the beam search of a request with several beams, else None. With beams, only the
    number of generated `tokens` is valid: `search` has their values. `is_serial` means that the
    next step cannot start before the values of the last tokens are known. `has_extras` means that
    responses may have other tensors than tokens.

    `adapter_digest` is the digest of the adapter's content, "" until it is known. `adapter_slot` is
    the adapter's index in the tables of the kernels, -1 while the adapter is not on the device.
    `adapter_tensors` are the adapter's weights, None once a job reads them. `weights_versions` are
    the versions of the oldest and newest weights that may have computed the request's tokens.
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
        "weights_versions",
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
            # with another prompt table, the same token ids have different KV values
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
        self.weights_versions = 0, 0

    def wait_for(self, what: int) -> None:
        """Keep the request from starting until `clear_wait(what)`.

        `what` is FOR_PROCESSOR or FOR_ADAPTER.
        """
        self.awaited |= what
        if self.state is LlmRequestState.CONTEXT_INIT:
            self.move_to(LlmRequestState.PREPARING)

    def clear_wait(self, what: int) -> None:
        """End the wait for `what`. The request may start when it waits for nothing else."""
        self.awaited &= ~what
        if not self.awaited and self.state is LlmRequestState.PREPARING:
            self.move_to(LlmRequestState.CONTEXT_INIT)

    @property
    def adapter_key(self) -> str | None:
        """Identity of the adapter in the KV cache: the digest of its content, as ids may be reused.

        None if the request has no adapter, or if the digest is not yet known.
        """
        return self.adapter_digest or None

    def propose_drafts(self) -> None:
        """Draft the next tokens, but none beyond the last token that the request may generate."""
        drafts = self.drafts
        if drafts.drafter is not None:
            limit = self.max_new_tokens - self.num_generated - 1
            drafts.tokens = tuple(drafts.drafter.propose(self.tokens, limit))
            self.num_draft_tokens = len(drafts.tokens)

    def take_drafts(self) -> tuple[int, ...]:
        """Remove all drafts, and return the first ones: as many as the scheduler lets run now."""
        taken = self.drafts.tokens[: self.num_draft_tokens]
        self.drafts.tokens, self.num_draft_tokens = (), 0
        return taken

    def settle_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Record that `num_accepted` of the `num_drafts` drafts of a step were accepted."""
        self.launch_drafts(num_accepted)
        if self.drafts.drafter is not None:
            self.drafts.drafter.learn_result(num_drafts, num_accepted)

    def pause(self, max_input_len: int) -> None:
        super().pause(max_input_len)
        # the host's drafts continue the prompt, and are useless after generated tokens
        if len(self.tokens) > self.orig_prompt_len:
            self.drafts.tokens = ()
        self.num_draft_tokens = len(self.drafts.tokens)
        if self.search is not None:
            self.search.restart()

    def resume(self, progress: Progress, now: float) -> None:
        """Give this new object the progress that its request made in another process.

        Beams start anew: their tokens are computed again, but tokens that were sent before are not
        sent again. Raise CapacityError if the request already has all tokens that it may generate,
        or if the host has more tokens than that.
        """
        tokens, times = progress.tokens, self.times
        if progress.num_sent > self.max_new_tokens:
            raise CapacityError(
                f"restore_cb says that the host has {progress.num_sent} tokens of the request, "
                f"which may have at most {self.max_new_tokens}"
            )
        times.arrival -= progress.age_s
        if tokens:  # the prompt was computed, and its outputs were sent
            times.queue_deadline, times.first_scheduled, times.first_token = None, now, now
        self.num_sent = self.orig_prompt_len + progress.num_sent
        if self.search is not None or not tokens:
            return
        if len(tokens) >= self.max_new_tokens:
            raise CapacityError(
                f"the request has {len(tokens)} tokens from before a restart, and may now have "
                f"at most {self.max_new_tokens}"
            )
        for length, token in enumerate(tokens, 1):
            self.stop_state, _ = self.end_rule.find(self.stop_state, token, length)
        self.begin_after(tokens)
        self.drafts.tokens = ()

    @property
    def num_output(self) -> int:
        """Number of confirmed tokens after the host's prompt."""
        return len(self.tokens) - self.orig_prompt_len

    @property
    def length_limit(self) -> int:
        """Total number of prompt and generated tokens at which the request must end."""
        return self.orig_prompt_len + self.end_rule.max_new_tokens

    @property
    def streamable_end(self) -> int:
        """History position up to which tokens may be sent.

        Later tokens may still be cut by a stop word, or replaced by the beam search.
        """
        if self.search is not None:
            return self.orig_prompt_len + self.search.stable_length()
        if self.end_rule.stop_words is None:
            return len(self.tokens)
        return self.orig_prompt_len + self.end_rule.num_final(self.stop_state, self.num_output)

    @property
    def wanted_from_start(self) -> OutputConfig:
        """The outputs that the next start must compute.

        Outputs for the prompt are omitted once the first token is known.
        """
        config = self.output.config
        return config if self.times.first_token is None else config.without_prompt

    @property
    def reads_cache(self) -> bool:
        """Whether prompt blocks may be read from the KV cache.

        False if the request asks for outputs of the prompt, such as its logits.
        """
        return not self.wanted_from_start.asks_of_prompt
