"""`Answer`: all outputs of one HTTP request while the engine generates them.

An `Answer` assigns the parts of the engine's requests to outputs, and counts tokens. It does not
depend on the JSON that clients get.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, TypeVar

from gptmanager import FinishReason
from gptmanager.callbacks import GenerationPart
from gptmanager.server.engine.call import check_in_time
from gptmanager.server.engine.engine import Engine
from gptmanager.server.http.body import run_in_thread
from gptmanager.server.http.request_log import MAX_LOGGED_LETTERS
from gptmanager.server.text.log_probs import TokenLogProb, output_log_probs, prompt_log_probs
from gptmanager.server.text.outputs import Delta, Output
from gptmanager.server.text.sampling import GenerationOptions, ends_of, requests_of, scoring_request

_T = TypeVar("_T")
MANY_LISTED = 1024  # tokens; formatting their log probabilities takes tens of milliseconds


class Answer:
    """The outputs of one or more prompts. With n choices, output p * n + k is choice k of prompt p.

    `prompts` are lists of token ids. For each prompt, `max_new_tokens` has the limit of new
    tokens of an output, and `offsets` the number of characters of the echoed prompt that precedes
    its outputs. For `lists_end` and `special_texts`, see `Output`. With `is_silent`, no text is
    generated: the request asks at most for the log probabilities of its prompts.
    """

    def __init__(
        self,
        engine: Engine,
        options: GenerationOptions,
        prompts: Sequence[list[int]],
        max_new_tokens: Sequence[int],
        *,
        offsets: Sequence[int] | None = None,
        lists_end: bool = False,
        special_texts: Mapping[int, str] | None = None,
        is_silent: bool = False,
    ) -> None:
        self.prompts = prompts
        self.prompt_log_probs: list[list[TokenLogProb] | None] = [None] * len(prompts)
        # for each prompt, whether its log probabilities are known, so that its outputs can be sent
        self._knows = [options.num_prompt_top is None] * len(prompts)
        self._options = options
        self._is_silent = is_silent
        self._num_cached = self._num_generated = 0
        self._times: dict[str, float] = {}
        self._num_choices = count = options.num_choices
        self._is_search = options.beam_width > 1
        # before any work for them
        engine.admission.check_number(len(prompts) * options.num_requests)
        ends = ends_of(options, engine.card)
        self.outputs = [
            Output(
                engine.card.tokenizer,
                prompt,
                ends,
                skip_special_tokens=options.given.get("skip_special_tokens", True),
                offset=0 if offsets is None else offsets[index],
                lists_end=lists_end,
                special_texts=special_texts,
            )
            for index, prompt in enumerate(prompts)
            for _ in range(count)
        ]
        self._has_ended = [False] * len(self.outputs)  # whether its last delta has been yielded
        if is_silent:
            requests = [[scoring_request(options, engine.card, prompt)] for prompt in prompts]
        else:
            seed = engine.new_seed()
            requests = requests_of(options, engine.card, prompts, max_new_tokens, seed)
        self._num_requests = len(requests[0])  # for each prompt
        self._requests = [*itertools.chain.from_iterable(requests)]
        self._engine = engine

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """Submit the requests; yield (index of an output, its next delta) until all have ended.

        Empty deltas are skipped. Closing the generator cancels the requests that still run.
        `prompt_log_probs` is set before the first delta of a prompt. All requests are queued, or
        none. Raises ApiError if they cannot be queued, if a request fails, and, without a stream,
        if a request times out.
        """
        if self._is_silent and self._options.num_prompt_top is None:
            for index, output in enumerate(self.outputs):  # there is nothing to generate
                output.finish(FinishReason.LENGTH)
                yield index, output.take()
            return
        # submitted only now, so that an answer that is never read is never queued
        call = self._engine.submit(self._requests)
        async with call, contextlib.aclosing(call.parts()) as parts:
            async for request, part in parts:
                prompt = request // self._num_requests
                knew_prompt = self._knows[prompt]
                await self._read_prompt(request, part)
                indices = self._take(request, part)
                for index in indices:
                    self._push(self.outputs[index], index, part)
                reason = self.outputs[indices[0]].finish_reason
                if reason and (part.result is None or self._options.is_ended_here):
                    counted = sum(len(self.outputs[index].token_ids) for index in indices)
                    call.stop(request, reason, counted)
                if not self._knows[prompt]:
                    continue
                for index in indices if knew_prompt else self._outputs_of(prompt):
                    if self._has_ended[index]:
                        continue
                    delta = self.outputs[index].take()
                    if delta.text or delta.token_ids or delta.log_probs or delta.finish_reason:
                        self._has_ended[index] = delta.finish_reason is not None
                        yield index, delta

    async def shaped(self, shape: Callable[[], _T], num_listed: int = 0) -> _T:
        """Return the result of `shape`, which formats the log probabilities of the prompts and of
        `num_listed` output tokens. For MANY_LISTED tokens or more in all, `shape` runs on a worker
        thread.
        """
        of_prompts = sum(len(one) for one in self.prompt_log_probs if one is not None)
        return await run_in_thread(shape) if of_prompts + num_listed >= MANY_LISTED else shape()

    def usage(self) -> dict[str, Any]:
        """Return the OpenAI `usage` object. It counts the tokens so far, including end tokens.

        Clients with strict types expect each count of OpenAI's API, also those that are always 0.
        """
        prompt = sum(map(len, self.prompts))
        generated = self._num_generated
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": self._num_cached, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }

    def log_fields(self) -> dict[str, Any]:
        """Return the fields for the log: numbers of tokens, seconds until the first request began
        and until the first token, and how the outputs ended. With `--log-prompts`, the fields also
        have the beginnings of the first prompt and of its first output.
        """
        reasons = {output.finish_reason or "cancelled": None for output in self.outputs}
        fields: dict[str, Any] = {
            "prompt_tokens": sum(map(len, self.prompts)),
            "cached_tokens": self._num_cached,
            "generated_tokens": self._num_generated,
            **{name: round(value, 4) for name, value in self._times.items()},
            "finish": ",".join(reasons),
        }
        tokenizer = self._engine.card.tokenizer
        if self._engine.logs_prompts:
            tokens = self.prompts[0][:MAX_LOGGED_LETTERS]
            text = str(tokens) if tokenizer is None else tokenizer.decode(tokens, False)
            output = self.outputs[0].text
            fields |= {"prompt": text[:MAX_LOGGED_LETTERS], "output": output[:MAX_LOGGED_LETTERS]}
        return fields

    async def _read_prompt(self, request: int, part: GenerationPart) -> None:
        """Store the log probabilities of a prompt if the part contains them."""
        prompt, choice = divmod(request, self._num_requests)
        if self._knows[prompt] or choice or "prompt_log_probs" not in part.tensors:
            return
        tokens = self.prompts[prompt]
        read = functools.partial(prompt_log_probs, tokens, part.tensors)
        found = await run_in_thread(read) if len(tokens) >= MANY_LISTED else read()
        self.prompt_log_probs[prompt], self._knows[prompt] = found, True

    def _take(self, request: int, part: GenerationPart) -> range:
        """Update cached tokens and times from a part; return the indices of the part's outputs."""
        prompt, choice = divmod(request, self._num_requests)
        if part.result is not None:
            for name in ("queue_s", "first_token_s"):
                seconds = float(part.result.metrics.get(name, math.nan))
                if not math.isnan(seconds):
                    self._times[name] = min(seconds, self._times.get(name, seconds))
            if choice == 0:
                self._knows[prompt] = True  # after a timeout there may be no log probabilities
                self._num_cached += int(part.result.metrics.get("cached_tokens", 0))
            if not self._options.streams:
                check_in_time(part.result)
        outputs = self._outputs_of(prompt)
        return outputs if self._num_requests == 1 else outputs[choice : choice + 1]

    def _outputs_of(self, prompt: int) -> range:
        first = prompt * self._num_choices
        return range(first, first + self._num_choices)

    def _push(self, output: Output, index: int, part: GenerationPart) -> None:
        result = part.result
        beam = index % self._num_choices if self._is_search else 0
        if self._is_silent:
            if result is not None:
                is_late = result.finish_reasons[0] is FinishReason.TIMED_OUT
                output.finish(FinishReason.TIMED_OUT if is_late else FinishReason.LENGTH)
            return
        tokens: Sequence[int] = part.tokens
        if self._is_search and result is not None:
            tokens = result.generated_ids[beam]
        has_log_probs = self._options.num_top is not None
        before = len(output.token_ids)
        output.push(tokens, output_log_probs(tokens, part.tensors, beam) if has_log_probs else ())
        self._num_generated += len(output.token_ids) - before
        if result is not None:
            output.finish(result.finish_reasons[beam])
