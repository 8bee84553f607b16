"""`ToolFormat`: how a family of models writes tool calls. Each format has its own module."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from gptmanager.callbacks.answers.call_grammar import CallShape
from gptmanager.callbacks.answers.parsing.answer_parts import AnswerParser
from gptmanager.callbacks.answers.parsing.call_parser import CallParser
from gptmanager.callbacks.answers.tools import Tools


class ToolFormat(ABC):
    """A format of tool calls, in the variant that the chat template `template` contains.

    `name`: the format's name for `--tool-call-parser`. `tags`: texts that mark calls; a tokenizer
    may have a special token for each. `has_thoughts`: whether the grammar also matches the
    thoughts of an answer.
    """

    name: ClassVar[str]
    tags: ClassVar[tuple[str, ...]] = ()
    has_thoughts: ClassVar[bool] = False

    def __init__(self, template: str = "") -> None:  # noqa: B027 - few formats have variants
        """Choose the variant."""

    @staticmethod
    @abstractmethod
    def is_in(template: str) -> bool:
        """Return whether a chat template describes this format."""

    @abstractmethod
    def parser(self, tools: Tools) -> AnswerParser:
        """Return a parser of one answer, which may call these tools."""

    @abstractmethod
    def grammar(
        self, tools: Tools, marks: Mapping[str, int], answer: Any = None
    ) -> tuple[str, dict[str, Any]] | None:
        """Return the grammar of an answer, in Lark's form, and the JSON schemas of its rules.

        `marks`: ids of added tokens, by the text of the token. Unless `tools` require a call, an
        answer may have none. With a JSON schema `answer`, an answer without calls is JSON of this
        schema. If `answer` is None, any text is allowed, and each call that begins in the text must
        be complete and valid. The result is None if the format has no grammar for these answers.
        Raises InexpressibleArguments if the format cannot express the arguments of a tool.
        """

    def text(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str | None:
        """Return calls, as (name, arguments), as the model writes them; None if this is unknown."""
        return None

    def new_id(self) -> str:
        """Return the id of a new call."""
        return random_id()


class ShapedFormat(ToolFormat):
    """A format with a grammar that follows from the `shape` of its calls.

    `parser_class` is the class of its parsers.
    """

    shape: CallShape
    parser_class: type[CallParser]

    def parser(self, tools: Tools) -> AnswerParser:
        return self.parser_class(tools.parameters)

    def grammar(
        self, tools: Tools, marks: Mapping[str, int], answer: Any = None
    ) -> tuple[str, dict[str, Any]]:
        return self.shape.grammar(tools, marks, answer)

    def text(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str | None:
        return self.shape.text(calls)


def random_id() -> str:
    """Return the id of a new call as OpenAI writes it."""
    return f"call_{uuid.uuid4().hex[:24]}"
