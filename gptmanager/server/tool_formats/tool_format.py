"""`ToolFormat`: how a family of models writes tool calls. Each format has its own module."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from gptmanager.server.answer_parsing.answer_parts import AnswerParser
from gptmanager.server.tool_formats.tools import Tools


class ToolFormat(ABC):
    """A format of tool calls, in the variant that the chat template `template` contains.

    `name`: the format's name for `--tool-call-parser`. `tags`: texts that mark calls; a tokenizer
    may have a special token for each. `has_thoughts`: whether the grammar also matches the
    thoughts of an answer.
    """

    name: ClassVar[str]
    tags: ClassVar[tuple[str, ...]] = ()
    has_thoughts: ClassVar[bool] = False

    def __init__(self, template: str = "") -> None:
        self._template = template

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
        """

    def new_id(self) -> str:
        """Return the id of a new call."""
        return random_id()


def random_id() -> str:
    """Return the id of a new call as OpenAI writes it."""
    return f"call_{uuid.uuid4().hex[:24]}"
