"""`Answer`: all outputs of one HTTP request, while the engine generates them.

Knows which of the engine's requests is which output, and counts the usage. Knows nothing of the
JSON that clients get.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from gptmanager import FinishReason
from gptmanager.callbacks import GenerationPart
from gptmanager.server.call import check_in_time
from gptmanager.server.engine import Engine
from gptmanager.server.openai.log_probs import TokenLogProb, output_log_probs, prompt_log_probs
from gptmanager.server.openai.outputs import Delta, Output
from gptmanager.server.openai.sampling import Wanted, ends_of, requests_of


class Answer:
    """Prompts, and `num_choices` outputs for each: output p x n + k is choice k of prompt p.

    `prompts`: token ids. `max_new_tokens`: for each prompt. `offsets`: characters that stand before
    each prompt's outputs. `is_silent`: one token is generated and neither told nor counted, since
    only the prompts are asked about.
    """

    def __init__(
        self,
        engine: Engine,
        wanted: Wanted,
        prompts: Sequence[list[int]],
        max_new_tokens: Sequence[int],
        *,
        offsets: Sequence[int] | None = None,
        is_silent: bool = False,
    ) -> None:
        self.prompts = prompts
        self.prompt_log_probs: list[list[TokenLogProb] | None] = [None] * len(prompts)
        self._wanted = wanted
        self._is_silent = is_silent
        self._num_cached = 0
        count = wanted.num_choices
        ends = ends_of(wanted, engine.card)
        self.outputs = [
            Output(
                engine.card.tokenizer,
                prompt,
                ends,
                skip_special_tokens=wanted.given.get("skip_special_tokens", True),
                offset=0 if offsets is None else offsets[index],
            )
            for index, prompt in enumerate(prompts)
            for _ in range(count)
        ]
        requests = [
            requests_of(wanted, engine.card, index, prompt, most)
            for index, (prompt, most) in enumerate(zip(prompts, max_new_tokens, strict=True))
        ]
        self._num_requests = len(requests[0])  # of a prompt
        self._requests = [*itertools.chain.from_iterable(requests)]
        self._engine = engine

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """(index of the output, what is new of it), as it comes; those that tell nothing are left
        out. The engine gets the requests now; leaving cancels what still runs.

        Log probabilities of a prompt are there with the first delta of its first output. Raises
        ApiError, as `Engine.submit` does: then nothing runs.
        """
        # only here: what nobody reads must not be queued
        call = self._engine.submit(self._requests)
        async with call, contextlib.aclosing(call.parts()) as parts:
            async for request, part in parts:
                for index in self._take(request, part):
                    output = self.outputs[index]
                    was_done = output.finish_reason is not None
                    self._push(output, index, request, part)
                    if was_done:
                        continue
                    if output.finish_reason is not None and part.result is None:
                        call.stop(request)
                    delta = output.take()
                    if delta.finish_reason or any(delta[:3]):
                        yield index, delta

    async def whole(self) -> None:
        """Return when all outputs have ended. Raises ApiError: 504 past a deadline."""
        async with contextlib.aclosing(self.deltas()) as deltas:
            async for _ in deltas:
                pass

    def usage(self) -> dict[str, Any]:
        """Tokens so far, those that end an output included."""
        prompt = sum(map(len, self.prompts))
        generated = sum(len(output.token_ids) for output in self.outputs)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
        }

    def _take(self, request: int, part: GenerationPart) -> range:
        """What a part tells of its prompt. Returns the outputs that it is for."""
        prompt, choice = divmod(request, self._num_requests)
        if "prompt_log_probs" in part.tensors and self.prompt_log_probs[prompt] is None:
            self.prompt_log_probs[prompt] = prompt_log_probs(self.prompts[prompt], part.tensors)
        if part.result is not None:
            if choice == 0:
                self._num_cached += int(part.result.metrics.get("cached_tokens", 0))
            if not self._wanted.streams:
                check_in_time(part.result)
        first = prompt * self._wanted.num_choices
        if self._is_search:
            return range(first, first + self._wanted.num_choices)
        return range(first + choice, first + choice + 1)

    @property
    def _is_search(self) -> bool:
        return self._wanted.beam_width > 1

    def _push(self, output: Output, index: int, request: int, part: GenerationPart) -> None:
        result = part.result
        beam = index % self._wanted.num_choices if self._is_search else 0
        if self._is_silent:
            if result is not None:
                output.finish(FinishReason.LENGTH)
            return
        tokens: Sequence[int] = part.tokens
        if self._is_search and result is not None:
            tokens = result.generated_ids[beam]
        has_log_probs = self._wanted.num_top is not None
        output.push(tokens, output_log_probs(tokens, part.tensors, beam) if has_log_probs else ())
        if result is not None:
            output.finish(result.finish_reasons[beam])
