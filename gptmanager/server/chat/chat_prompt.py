"""`ChatPrompts`: converts the messages of a chat into the tokens of its prompt.

This module decides which template a request uses, and with which variables it is rendered.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gptmanager.callbacks.answers.reasoning import (
    AnswerStart,
    Reasoning,
    reasoning_of,
    with_thoughts,
)
from gptmanager.callbacks.answers.tool_format import ToolFormat
from gptmanager.callbacks.answers.tool_formats.formats import format_of
from gptmanager.callbacks.answers.tool_formats.harmony import Harmony
from gptmanager.callbacks.answers.tools import Tools
from gptmanager.callbacks.text.control_tokens import ControlTokens
from gptmanager.callbacks.text.template_process import (
    TemplateProcess,
    pick,
    read_chat_templates,
    read_template_file,
)
from gptmanager.callbacks.text.template_rendering import TemplateError
from gptmanager.callbacks.text.text_encoder import added_tokens
from gptmanager.lifecycle.child_process import NotStartedError
from gptmanager.server.chat.embedding_parts import EmbeddingParts, has_embeddings
from gptmanager.server.chat.messages import (
    MESSAGES_SCHEMA,
    arguments_as_objects,
    count_items,
    one_call_each,
    read_messages,
    with_calls_as_text,
)
from gptmanager.server.engine.engine import Engine
from gptmanager.server.errors import ApiError
from gptmanager.server.fields import (
    AsItIs,
    Field,
    Flag,
    ListOf,
    Object,
    Text,
    bad_request,
    field_error,
)
from gptmanager.server.http.body import run_in_thread
from gptmanager.server.http.warning_header import Warnings
from gptmanager.server.settings import ServerSettings

OBJECTS = AsItIs({"type": "array", "items": {"type": "object"}})
# Maximum number of templates in `ChatPrompts._tried`. With --trust-request-chat-template, each
# request may pass another template.
_MOST_TRIED = 32
_MOST_LOOKED_FOR = 32  # variables to search for in a template, which may be long
MAX_DOCUMENTS = 1024
_PLACE = "Kattegatleden"  # a word that no template contains
_MANY = 100  # messages, parts and calls that take a millisecond to read; more are read in a thread
MESSAGES = AsItIs(MESSAGES_SCHEMA)
# The fields of every request that has messages.
TEMPLATE_FIELDS = (
    Field("add_generation_prompt", Flag(), "absent: true, unless continue_final_message is set"),
    Field("continue_final_message", Flag(), "the answer continues the last message"),
    Field("chat_template", Text(), "replaces the model's template, if the server allows that"),
    Field("chat_template_kwargs", Object(), "variables of the chat template"),
    Field("documents", ListOf(Object(), longest=MAX_DOCUMENTS), "for templates that use them"),
    Field("reasoning_effort", Text(0, 64), "a variable of the chat template"),
    Field("enable_thinking", Flag(), "a variable of the chat template"),
)
_VARIABLES = ("reasoning_effort", "enable_thinking")
# Variables of a template that cannot be passed in `chat_template_kwargs`.
_FIELDS = ("messages", "tools", "documents", "add_generation_prompt")

UNKNOWN_FORMAT = (
    "the chat template describes no known format of calls; --tool-call-parser sets the format"
)


@dataclass(frozen=True, slots=True)
class _Trial:
    """How a template treats calls in messages.

    `one_call`: it accepts a message with one call, but rejects one with two. `ignores_calls`: the
    prompt does not contain the calls.
    """

    one_call: bool = False
    ignores_calls: bool = False


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The tokens of a prompt, and the properties of the answer that follow from the prompt.

    `tool_format`: how the model writes calls; None without tools. `one_call`: the template rejects
    messages with two calls, so an answer must have at most one. `start`: how the answer begins.
    `table`: the embeddings of prompt tokens beyond the vocabulary, see `EmbeddingParts`, or None.
    """

    tokens: list[int]
    tool_format: ToolFormat | None
    one_call: bool = False
    start: AnswerStart = AnswerStart()
    table: Any = None


class ChatPrompts:
    """Makes prompts with the chat templates of a server's model.

    Raises ConfigError if a template cannot be read. Templates in requests are rendered in a second
    process, so that a slow template does not delay requests that use the model's template.
    """

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self._engine = engine
        self._settings = settings
        if settings.chat_template is not None:
            self._templates = read_template_file(settings.chat_template)
        else:
            self._templates = read_chat_templates(engine.card.folder)
        self._tried: dict[bytes, _Trial] = {}  # by the digest of a template
        self._process = TemplateProcess()
        self._process_of_requests = TemplateProcess()
        tokenizer, hides = engine.card.tokenizer, settings.no_special_tokens_in_text
        self._control_tokens = ControlTokens(tokenizer) if tokenizer and hides else None

    @property
    def template(self) -> str | None:
        """The server's template for chats without tools, or None."""
        return pick(self._templates, False)

    @property
    def reasoning(self) -> Reasoning | None:
        """The format of thoughts with the server's template; None if the server has no template."""
        return None if self.template is None else self._reasoning(self.template)

    @property
    def tool_format(self) -> ToolFormat | None:
        """The tool call format of the server's chat template; None if the format is unknown."""
        template = pick(self._templates, True)
        return None if template is None else self._tool_format(template)

    def _reasoning(self, template: str) -> Reasoning:
        calls = self._settings.tool_call_parser
        if calls == Harmony.name:
            return Reasoning.HARMONY
        found = reasoning_of(self._settings.reasoning_parser, template)
        # The parser of harmony reads both thoughts and calls. If --tool-call-parser chooses another
        # format of calls, thoughts cannot be in harmony.
        return found if found is not Reasoning.HARMONY or calls == "auto" else Reasoning.NONE

    def _tool_format(self, template: str) -> ToolFormat | None:
        is_harmony = self._reasoning(template) is Reasoning.HARMONY
        parser = Harmony.name if is_harmony else self._settings.tool_call_parser
        return format_of(parser, template)

    async def read(
        self, body: Mapping[str, Any], tools: Tools | None, warnings: Warnings
    ) -> ChatPrompt:
        """Return the prompt; add to `warnings` the variables that the template does not use.

        Raises ApiError: 400 without a template, and if the messages are wrong or the template
        rejects them; 503 if the process that renders templates does not start.
        """
        given = body.get("messages")
        num_items = count_items(given, self._engine.card.max_model_len)
        self._engine.context_length.check_parts("messages", num_items)
        parts = EmbeddingParts(self._engine.card)
        has_parts = isinstance(given, list) and has_embeddings(given)

        def reading() -> list[dict[str, Any]]:
            return read_messages(parts.marked(given) if has_parts else given)

        is_long = num_items > _MANY or has_parts
        messages = await run_in_thread(reading) if is_long else reading()
        template, process = self._template(body, tools is not None)
        warnings.add_ignored(_unknown_variables(body, template), "unknown to the chat template")
        reasoning = self._reasoning(template)
        form = None if tools is None else self._known_format(template, reasoning)
        if "developer" not in template:  # a newer name of the role "system"
            messages = [
                {**one, "role": "system"} if one["role"] == "developer" else one for one in messages
            ]
        has_calls = tools is not None or any("tool_calls" in one for one in messages)
        trial = await self._try(template, process) if has_calls else _Trial()
        if trial.one_call:
            messages = one_call_each(messages)
        own = self._tool_format(template)
        if trial.ignores_calls and own is not None:
            messages = with_calls_as_text(messages, own)
        messages = with_thoughts(messages, reasoning)
        text = await self._render(template, process, messages, body, tools)
        tokens: list[int] = []
        for piece in parts.pieces(text):
            tokens += await self._encode(piece) if isinstance(piece, str) else piece
        tokenizer = self._engine.card.tokenizer
        if (
            body.get("add_special_tokens") and tokenizer is not None
        ):  # if absent, the special tokens of the template suffice
            before, after = added_tokens(tokenizer)
            tokens = [*before, *tokens, *after]
        continued = messages[-1]["content"] if body.get("continue_final_message") else None
        start = AnswerStart.of_prompt(reasoning, text, continued)
        return ChatPrompt(tokens, form, trial.one_call, start, parts.table)

    def _known_format(self, template: str, reasoning: Reasoning) -> ToolFormat:
        form = self._tool_format(template)
        if form is None:
            raise field_error("tools", UNKNOWN_FORMAT)
        if isinstance(form, Harmony) and reasoning is not Reasoning.HARMONY:
            raise field_error("tools", "calls of this model need --reasoning-parser harmony")
        return form

    async def _encode(self, text: str) -> list[int]:
        if self._control_tokens is None:
            return await self._engine.encode("messages", text, special=False)
        tokens: list[int] = []
        for piece in self._control_tokens.pieces(text):
            if isinstance(piece, int):
                tokens.append(piece)
            else:
                tokens += await self._engine.encode("messages", piece, special=False)
        return tokens

    async def _try(self, template: str, process: TemplateProcess) -> _Trial:
        """Render a template with calls, because its text does not show how it treats them.

        The result is kept if one call was accepted.
        """
        key = hashlib.sha256(template.encode()).digest()  # a template may be long
        if key not in self._tried:
            with_one = await self._with_calls(template, process, 1)
            if with_one is None:
                return _Trial()  # if one call fails, a failure with two calls proves nothing
            with_two = await self._with_calls(template, process, 2)
            if len(self._tried) >= _MOST_TRIED:
                self._tried.clear()
            self._tried[key] = _Trial(with_two is None, _PLACE not in with_one)
        return self._tried[key]

    async def _with_calls(
        self, template: str, process: TemplateProcess, num_calls: int
    ) -> str | None:
        """Return the text of a conversation with calls; None if the template rejects it."""
        messages, tools = _conversation(num_calls)
        variables = {
            **self._engine.card.special_tokens,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": True,
        }
        try:
            return await _fill_in(process, template, messages, variables=variables)
        except TemplateError:
            return None

    def _template(self, body: Mapping[str, Any], has_tools: bool) -> tuple[str, TemplateProcess]:
        given = body.get("chat_template")
        if given is not None:
            if not self._settings.trust_request_chat_template:
                raise field_error(
                    "chat_template", "templates in requests need --trust-request-chat-template"
                )
            return str(given), self._process_of_requests
        template = pick(self._templates, has_tools)
        if template is None:
            raise field_error(
                "messages",
                "the model has no chat template: set one with --chat-template, or use "
                "/v1/completions",
            )
        return template, self._process

    async def _render(
        self,
        template: str,
        process: TemplateProcess,
        messages: list[dict[str, Any]],
        body: Mapping[str, Any],
        tools: Tools | None,
    ) -> str:
        continues = bool(body.get("continue_final_message"))
        generates = body.get("add_generation_prompt")
        if continues and generates:
            raise bad_request(
                "continue_final_message",
                "pass either continue_final_message or add_generation_prompt, not both",
            )
        of_client = {
            "tools": None if tools is None else tools.for_template(),
            "documents": body.get("documents"),
            "add_generation_prompt": not continues if generates is None else generates,
            **{name: body[name] for name in _VARIABLES if name in body},
            **_own_variables(body.get("chat_template_kwargs")),
        }
        if self._control_tokens is not None:
            messages, of_client = map(self._control_tokens.marked, (messages, of_client))
        render = functools.partial(
            _fill_in,
            process,
            template,
            variables={**self._engine.card.special_tokens, **of_client},
            continue_final_message=continues,
        )
        try:
            try:
                return await render(messages)
            except TemplateError:
                as_objects = arguments_as_objects(messages)
                if as_objects is None:
                    raise
                return await render(as_objects)
        except TemplateError as error:
            where = "messages" if body.get("chat_template") is None else "chat_template"
            raise field_error(where, f"the chat template: {error}") from None


async def _fill_in(
    process: TemplateProcess, template: str, messages: list[dict[str, Any]], **more: Any
) -> str:
    """Call `process.fill_in`. Raise ApiError (503) if the process does not start."""
    try:
        return await process.fill_in(template, messages, **more)
    except NotStartedError as error:
        text = f"messages: the chat template: {error}"
        raise ApiError(503, text, code="no_process") from None


def _conversation(num_calls: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return messages, one of which has `num_calls` calls of a tool, and a list with this tool."""
    # Mistral's templates require ids of nine characters.
    ids = [f"call{index:05}" for index in range(num_calls)]
    function = {"name": "look", "arguments": {"at": _PLACE}}
    calls = [{"id": one, "type": "function", "function": function} for one in ids]
    results = [{"role": "tool", "content": "seen", "tool_call_id": one} for one in ids]
    parameters = {"type": "object", "properties": {"at": {"type": "string"}}}
    tool = {"name": "look", "description": "", "parameters": parameters}
    asks = {"role": "user", "content": "Look!"}
    answers = {"role": "assistant", "content": "", "tool_calls": calls}
    return [asks, answers, *results], [{"type": "function", "function": tool}]


def _unknown_variables(body: Mapping[str, Any], template: str) -> list[str]:
    """Return the names of given variables that the template does not mention."""
    own = body.get("chat_template_kwargs", {})
    names = [*(("documents",) if body.get("documents") else ()), *_VARIABLES]
    given = [name for name in names if name in body]
    return [
        name for name in (*given, *itertools.islice(own, _MOST_LOOKED_FOR)) if name not in template
    ]


def _own_variables(given: Any) -> Mapping[str, Any]:
    """Return `chat_template_kwargs`. Raises ApiError (400) for a variable in `_FIELDS`."""
    where = "chat_template_kwargs"
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise bad_request(where, f"{where} must be an object")
    for name in _FIELDS:
        if name in given:
            at = f"{where}.{name}"
            raise bad_request(at, f"{at} must be passed as the field {name}")
    return given
