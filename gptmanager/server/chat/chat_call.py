"""`ChatCalls`: prepares the generation of a chat from the fields of /v1/chat/completions.

Other protocols convert their fields into fields of /v1/chat/completions first.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from gptmanager.callbacks.answers.reasoning import Reasoning, special_tags
from gptmanager.callbacks.answers.tool_format import random_id
from gptmanager.callbacks.answers.tools import Tools
from gptmanager.lifecycle.log import logger
from gptmanager.server.chat.chat_answer import ChatAnswer
from gptmanager.server.chat.chat_prompt import UNKNOWN_FORMAT, ChatPrompt, ChatPrompts
from gptmanager.server.chat.functions import has_functions, read_functions
from gptmanager.server.chat.messages import count_items
from gptmanager.server.chat.tools import read_tools
from gptmanager.server.engine.engine import Engine
from gptmanager.server.errors import ApiError
from gptmanager.server.fields import outside_quotes
from gptmanager.server.http.warning_header import Warnings
from gptmanager.server.settings import ServerSettings
from gptmanager.server.text.answer import Answer
from gptmanager.server.text.generation_fields import UNLIMITED
from gptmanager.server.text.log_probs import TokenTexts
from gptmanager.server.text.processors import Processors
from gptmanager.server.text.sampling import GenerationOptions, check, check_min_tokens

# The place of a message in the body, such as "messages[2]", or a pair (place, indices): the content
# parts of the message are these parts of the message at this place in the body.
Place = str | tuple[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class PreparedChat:
    """A chat that is ready to generate.

    `messages` has a `ChatAnswer` for each output of `answer`. `thinks`: whether the model may write
    thoughts. `max_new_tokens`: the most tokens of an output, which fit into the context.
    """

    answer: Answer
    messages: list[ChatAnswer]
    thinks: bool
    max_new_tokens: int

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's `usage`, with the number of tokens in thoughts if the model may think."""
        usage = self.answer.usage()
        if self.thinks:
            outputs = zip(self.messages, self.answer.outputs, strict=True)
            num = sum(message.num_reasoning_tokens(it.token_starts) for message, it in outputs)
            usage["completion_tokens_details"]["reasoning_tokens"] = num
        return usage


class ChatCalls:
    """Prepares chats for one model. Raises ConfigError if the chat template cannot be read."""

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.texts = TokenTexts(engine.card.tokenizer)
        self._processors = Processors(engine, lenient=settings.lenient)
        self._prompts = ChatPrompts(engine, settings)

    def log_formats(self) -> None:
        """Log the formats of thoughts and tool calls, and what sets them: options or the template.

        Nothing is logged without a chat template.
        """
        found, form = self._prompts.reasoning, self._prompts.tool_format
        if found is None:
            return
        by_reasoning = ("--reasoning-parser", self.settings.reasoning_parser)
        by_calls = ("--tool-call-parser", self.settings.tool_call_parser)
        thoughts, calls = _why(by_reasoning, by_calls), _why(by_calls, by_reasoning)
        logger.info("thoughts in answers: %s, %s", found.value, thoughts)
        if form is None:
            logger.info("calls in answers: none; requests with tools get a 400: %s", UNKNOWN_FORMAT)
        else:
            logger.info("calls in answers: %s, %s", form.name, calls)

    def check_number(self, where: str, messages: list[Any]) -> None:
        """Raise ApiError (400) if messages have more parts than the context has tokens."""
        num_items = count_items(messages, self.engine.card.max_model_len)
        self.engine.context_length.check_parts(where, num_items)

    async def prompt(
        self, given: Mapping[str, Any], warnings: Warnings
    ) -> tuple[ChatPrompt, Tools | None]:
        """Return the prompt of a chat, and the tools that its answer may call.

        Raises ApiError: 400 for a wrong field, 503 if the template's process does not start.
        """
        if has_functions(given):
            tools = read_functions(given.get("functions"), given.get("function_call"))
        else:
            parallel = given.get("parallel_tool_calls", True)
            tools = read_tools(given.get("tools"), given.get("tool_choice"), parallel)
        prompt = await self._prompts.read(given, tools, warnings)
        if tools is not None and prompt.one_call:
            # The chat's next prompt contains this answer, and its template rejects two calls.
            tools = replace(tools, parallel=False)
        return prompt, tools

    async def prepare(
        self,
        given: Mapping[str, Any],
        warnings: Warnings,
        *,
        clamps: bool = False,
        where: str = "messages",
    ) -> PreparedChat:
        """Prepare the chat of a request; add to `warnings` each field that has no effect.

        `clamps`: a maximum number of new tokens that does not fit is lowered, with a warning.
        `where`: the field with the messages, for the error of a chat that does not fit.
        Raises ApiError like `prompt` and `Processors.of`.
        """
        card = self.engine.card
        prompt, tools = await self.prompt(given, warnings)
        num_top = given.get("top_logprobs", 0) if given.get("logprobs") else None
        processor = await self._processor(given, warnings, tools, prompt)
        num_prompt_top = given.get("prompt_logprobs")
        options = GenerationOptions(given, num_top, num_prompt_top, processor, prompt.table)
        check(options, card)
        left = max(1, card.max_model_len - len(prompt.tokens))
        name = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
        most = given.get(name, UNLIMITED)
        most = left if most == UNLIMITED else most
        check_min_tokens(given, most)
        length, limit = len(prompt.tokens), self.engine.context_length
        most = limit.clamped(length, most, name, warnings, is_forced=clamps)
        limit.check(length, most, prompt=where, most=name)
        form = prompt.tool_format
        tags = prompt.start.reasoning.tags + (() if form is None else form.tags)
        special = special_tags(card.tokenizer, tags) if card.tokenizer and tags else None
        answer = Answer(self.engine, options, [prompt.tokens], [most], special_texts=special)
        messages = [
            ChatAnswer(
                prompt.start.parser(tools, form),
                is_alone=tools is not None and not tools.parallel,
                is_deprecated=has_functions(given),
                new_id=random_id if form is None else form.new_id,
            )
            for _ in answer.outputs
        ]
        thinks = prompt.start.reasoning is not Reasoning.NONE
        return PreparedChat(answer, messages, thinks, most)

    async def _processor(
        self, given: Mapping[str, Any], warnings: Warnings, tools: Tools | None, prompt: ChatPrompt
    ) -> Any:
        """Return the logits post-processor or None. Its grammar begins after the thought."""
        form, tokenizer = prompt.tool_format, self.engine.card.tokenizer
        start = None
        if tokenizer is not None and not (form is not None and form.has_thoughts):
            start = functools.partial(prompt.start.grammar_start, tokenizer)
        return await self._processors.of(given, warnings, tools, form, start)


def _why(own: tuple[str, str], other: tuple[str, str]) -> str:
    """Return what decides a format: the `own` option, the `other` option or the chat template.

    The `other` option decides if its value is harmony, which is a format of thoughts and of calls.
    """
    for option, value in (own, other):
        if value == "harmony" or (option == own[0] and value != "auto"):
            return f"by {option}"
    return "by the chat template"


@contextmanager
def fields_renamed(
    names: Sequence[tuple[str, str]],
    places: Mapping[int, Place] | None = None,
    tools: Sequence[int] = (),
    chat: str = "messages",
) -> Iterator[None]:
    """Rename the fields in ApiErrors that the block raises, for a protocol with other fields.

    `names`: pairs of a field of /v1/chat/completions and the text that replaces the field.
    `places`: the index of a message -> the message's place in the body. `tools`: the
    index in the body of each tool, if some of the body's tools are left out. `chat`: the field
    that has the messages as a whole.
    """

    def place(at: re.Match[str]) -> str:
        found = (places or {}).get(int(at[1]))
        if found is None:
            return at[0]
        where, indices = found if isinstance(found, tuple) else (found, ())
        if at[2] is None:
            return where
        index = int(at[2])  # a template's own error may name a part that is not there
        return f"{where}.content[{indices[index] if index < len(indices) else index}]"

    def tool(at: re.Match[str]) -> str:
        index = int(at[1])
        return f"tools[{tools[index] if index < len(tools) else index}]"

    def renamed(text: str) -> str:
        for own, name in names:
            text = text.replace(own, name)
        text = re.sub(r"\btools\[(\d+)\]", tool, text)
        text = re.sub(r"\bmessages(?= has |: |$)", chat, text)
        return re.sub(r"\bmessages\[(\d+)\](?:\.content\[(\d+)\])?", place, text)

    try:
        yield
    except ApiError as error:
        param = error.param and renamed(error.param)
        message = outside_quotes(error.message, renamed)
        raise ApiError(
            error.status,
            message,
            type=error.type,
            param=param,
            code=error.code,
            headers=error.headers,
            details=error.details,
        ) from None
