"""/v1/completions: continues raw prompts."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gptmanager.errors import quoted
from gptmanager.server.engine.engine import LONG_TEXT, Engine
from gptmanager.server.fields import (
    Field,
    Flag,
    Integer,
    Text,
    bad_request,
    by_name,
    check_token_ids,
)
from gptmanager.server.http.body import read_json, run_in_thread
from gptmanager.server.http.request_log import RECORD
from gptmanager.server.http.warning_header import Warnings
from gptmanager.server.openai.json_answer import JsonAnswer, answer_head, end_fields, respond
from gptmanager.server.openai.models import check_model
from gptmanager.server.request_fields import read_request
from gptmanager.server.settings import ServerSettings
from gptmanager.server.text.answer import Answer
from gptmanager.server.text.generation_fields import (
    IGNORED,
    MAX_TOP_LOG_PROBS,
    NOT_SUPPORTED,
    SAMPLING,
    SERVING,
    UNLIMITED,
    NewTokens,
    with_known_names,
)
from gptmanager.server.text.log_probs import (
    TokenTexts,
    completion_shape,
    prompt_shape,
)
from gptmanager.server.text.outputs import Delta
from gptmanager.server.text.processors import STRUCTURED, Processors
from gptmanager.server.text.sampling import GenerationOptions, check, check_min_tokens

MAX_PROMPTS = 1024
_MAX_TOKENS = 16  # if a request does not set max_tokens


class Prompts:
    """The field `prompt`: a string, token ids, or a list of either. `read` returns a list.

    Token ids are checked later, against the model's limits.
    """

    def read(self, where: str, value: Any) -> list[Any]:
        if isinstance(value, str):
            return [Text(1).read(where, value)]
        if not isinstance(value, list) or not value:
            raise bad_request(
                where,
                f"{where} = {quoted(value)} must be a string, token ids, or a list of either",
            )
        prompts = [value] if type(value[0]) is int else value
        if len(prompts) > MAX_PROMPTS:
            raise bad_request(
                where, f"{where} has {len(prompts)} prompts, at most {MAX_PROMPTS} are allowed"
            )
        for index, prompt in enumerate(prompts):
            if not isinstance(prompt, (str, list)) or not prompt:
                at = f"{where}[{index}]"
                raise bad_request(where, f"{at} = {quoted(prompt)} must be a string or token ids")
        return prompts

    def schema(self) -> dict[str, Any]:
        ids = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
        text = Text(1).schema()
        several = {"type": "array", "items": {"anyOf": [text, ids]}, "minItems": 1}
        return {"anyOf": [text, ids, {**several, "maxItems": MAX_PROMPTS}]}


FIELDS = by_name(
    [
        Field("prompt", Prompts(), "a string, token ids, or a list of either", required=True),
        Field(
            "max_tokens",
            NewTokens(0),
            "maximum number of new tokens; absent: 16, -1: as many as fit",
        ),
        Field("max_completion_tokens", NewTokens(0), "the name of max_tokens in chats"),
        Field(
            "logprobs",
            Integer(0, MAX_TOP_LOG_PROBS),
            "number of most likely tokens to return for each token",
        ),
        Field("echo", Flag(), "put the prompt before each output"),
        Field("best_of", Integer(1, 128), "must equal n"),
        Field("suffix", Text(), "not supported"),
        Field("add_special_tokens", Flag(), "add the tokenizer's special tokens; absent: true"),
    ],
    SAMPLING,
    SERVING,
    STRUCTURED,
    IGNORED,
    NOT_SUPPORTED,
)


class _Prompt(NamedTuple):
    text: str
    tokens: list[int]


def routes(engine: Engine, settings: ServerSettings) -> list[BaseRoute]:
    """Return the route of /v1/completions."""
    completions = Completions(engine, settings)
    return [Route("/v1/completions", completions.handle, methods=["POST"])]


class Completions:
    """The endpoint that continues raw prompts."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self._engine = engine
        self._is_lenient = settings.lenient
        self._texts = TokenTexts(engine.card.tokenizer)
        self._processors = Processors(engine, lenient=settings.lenient)

    async def handle(self, request: Request) -> Response:
        read = functools.partial(read_request, fields=FIELDS, lenient=self._is_lenient)
        given, warnings = await read_json(request, read)
        given = with_known_names(given)
        _check(given, self._engine)
        preparing = self._prepare(given, warnings, request.scope[RECORD].id)
        return await respond(request, preparing, warnings, streams=given.get("stream", False))

    async def _prepare(
        self, given: dict[str, Any], warnings: Warnings, request_id: str
    ) -> JsonAnswer:
        card = self._engine.card
        num_top = given.get("logprobs")
        is_echo = given.get("echo", False)
        num_prompt_top = given.get("prompt_logprobs")
        if is_echo and num_top is not None:
            num_prompt_top = max(num_top, num_prompt_top or 0)
        options = GenerationOptions(
            given, num_top, num_prompt_top, await self._processors.of(given, warnings)
        )
        check(options, card)
        prompts = await self._read_prompts(given)
        name = _limit_name(given)
        most, length = given.get(name), self._engine.context_length

        def limit_of(prompt: _Prompt) -> int:
            left = max(1, card.max_model_len - len(prompt.tokens))
            if most is None or most == UNLIMITED:
                return left if most else min(_MAX_TOKENS, left)
            return length.clamped(len(prompt.tokens), max(most, 1), name, warnings)

        limits = [limit_of(prompt) for prompt in prompts]
        if most == UNLIMITED:
            check_min_tokens(given, min(limits))
        for prompt, limit in zip(prompts, limits, strict=True):
            if most != 0:
                length.check(len(prompt.tokens), limit, most=name)
        answer = Answer(
            self._engine,
            options,
            [prompt.tokens for prompt in prompts],
            limits,
            offsets=[len(prompt.text) if is_echo else 0 for prompt in prompts],
            lists_end=True,
            is_silent=most == 0,
        )
        texts = self._texts.as_ids() if given.get("return_tokens_as_token_ids") else self._texts
        head = answer_head(given, "cmpl", "text_completion", card.name, request_id)
        return JsonAnswer(given, answer, _CompletionFormat(given, answer, prompts, texts), head)

    async def _read_prompts(self, given: Mapping[str, Any]) -> list[_Prompt]:
        def read() -> list[_Prompt]:
            names = [f"prompt[{index}]" for index in range(len(prompts))]
            named = zip(["prompt"] if len(names) == 1 else names, prompts, strict=True)
            return [self._prompt(name, prompt, given) for name, prompt in named]

        prompts = given["prompt"]
        return await run_in_thread(read) if sum(map(len, prompts)) >= LONG_TEXT else read()

    def _prompt(self, name: str, prompt: Any, given: Mapping[str, Any]) -> _Prompt:
        tokenizer = self._engine.card.tokenizer
        if isinstance(prompt, str):
            special = given.get("add_special_tokens", True)
            tokens = self._engine.encode_now(name, prompt, special=special)
            return _Prompt(prompt, tokens)
        if len(prompt) > self._engine.card.max_model_len:  # before the ids are checked
            self._engine.context_length.check(len(prompt), 1)
        check_token_ids(name, prompt, self._engine.card.vocab_size)
        if tokenizer is None or not given.get("echo"):
            return _Prompt("", prompt)
        return _Prompt(tokenizer.decode(prompt, skip_special_tokens=False), prompt)


def _limit_name(given: Mapping[str, Any]) -> str:
    """Return the field with the maximum number of new tokens, for errors."""
    return "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"


def _check(given: Mapping[str, Any], engine: Engine) -> None:
    check_model(engine, given.get("model"))
    name = _limit_name(given)
    most = given.get(name)
    if most == 0 and not given.get("echo"):
        raise bad_request(
            name, f"{name} = 0 needs echo = true: without it the answer would be empty"
        )
    if most not in (0, UNLIMITED):
        check_min_tokens(given, _MAX_TOKENS if most is None else most)
    num_texts = given.get("n", 1)
    if given.get("best_of", num_texts) != num_texts:
        raise bad_request("best_of", f"best_of = {given['best_of']} must equal n = {num_texts}")
    if given.get("suffix"):
        raise bad_request("suffix", "suffix is not supported: the model cannot fill in the middle")


class _CompletionFormat:
    """Writes the choices of a completion; see `AnswerFormat`."""

    def __init__(
        self,
        given: Mapping[str, Any],
        answer: Answer,
        prompts: Sequence[_Prompt],
        texts: TokenTexts,
    ) -> None:
        self._given = given
        self._answer = answer
        self._prompts = prompts
        self._texts = texts
        self._num_choices = given.get("n", 1)
        self._has_begun = [False] * len(answer.outputs)
        self._deltas: list[list[Delta]] = [[] for _ in answer.outputs]

    def add(self, index: int, delta: Delta) -> None:
        self._deltas[index].append(delta)

    async def whole(self) -> dict[str, Any]:
        outputs = list(enumerate(map(Delta.joined, self._deltas)))
        choices = await self._answer.shaped(
            lambda: [self._choice(index, delta) for index, delta in outputs],
            sum(len(delta.log_probs) for _, delta in outputs),
        )
        return {"choices": choices}

    async def chunks(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        choice = functools.partial(self._choice, index, delta)
        found = choice() if self._has_begun[index] else await self._answer.shaped(choice)
        return [{"choices": [found]}]

    def usage(self) -> dict[str, Any]:
        return self._answer.usage()

    def _choice(self, index: int, delta: Delta) -> dict[str, Any]:
        """Return a choice of a whole answer or of a chunk, made from `delta`."""
        output, given = self._answer.outputs[index], self._given
        prompt_index = index // self._num_choices
        prompt = self._prompts[prompt_index]
        is_first, self._has_begun[index] = not self._has_begun[index], True
        echoes = is_first and given.get("echo", False)
        choice = {
            "index": index,
            "text": prompt.text + delta.text if echoes else delta.text,
            "logprobs": None,
            **end_fields(delta.finish_reason, output.stop_reason),
        }
        of_prompt = self._answer.prompt_log_probs[prompt_index]
        if "logprobs" in given:
            listed = delta.log_probs
            if echoes and of_prompt is not None:
                listed = [*self._texts.placed(of_prompt, prompt.text), *listed]
            choice["logprobs"] = completion_shape(listed, given["logprobs"], self._texts)
        if is_first and "prompt_logprobs" in given and of_prompt is not None:
            choice["prompt_logprobs"] = prompt_shape(
                of_prompt, given["prompt_logprobs"], self._texts
            )
        if given.get("return_token_ids"):
            choice["token_ids"] = delta.token_ids
            if is_first:
                choice["prompt_token_ids"] = prompt.tokens
        return choice
