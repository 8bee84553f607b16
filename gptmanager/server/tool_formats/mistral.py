"""The formats of Mistral: a list of JSON objects or, in newer models, tags for each call.

[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome"}}]
[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from gptmanager.server.answer_parsing.answer_parts import AnswerParser
from gptmanager.server.answer_parsing.call_parser import NAME, OBJECT, SPACE, HeadedCallParser
from gptmanager.server.answer_parsing.json_calls import JsonCallParser
from gptmanager.server.tool_formats.call_grammar import CallShape
from gptmanager.server.tool_formats.tool_format import ToolFormat
from gptmanager.server.tool_formats.tools import Tools

CALLS, ID, ARGS = TAGS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
_LIST = CallShape(
    '{"name": "', '", "arguments": ', "}", f"{CALLS} [", ", ", "]", tag=CALLS, tags=TAGS
)
_TAGGED = CallShape(CALLS, ARGS, "", joint="", tag=CALLS, tags=TAGS)


class MistralListParser(JsonCallParser):
    openers = (f"{CALLS} [", f"{CALLS}[", f"{CALLS}\n[")
    closers = ("]",)
    separator = ","


class MistralTagParser(HeadedCallParser):
    """Parses calls with tags. A model may leave out `[ARGS]`."""

    openers = (CALLS,)
    headers = {
        CALLS: (
            (SPACE, NAME, ARGS, SPACE, OBJECT),
            (SPACE, NAME, ID, NAME, ARGS, SPACE, OBJECT),
            (SPACE, NAME, SPACE, OBJECT),
        )
    }


class Mistral(ToolFormat):
    """Both formats of Mistral: a template with `[ARGS]` has the newer format."""

    name = "mistral"
    tags = TAGS

    @staticmethod
    def is_in(template: str) -> bool:
        return CALLS in template

    @property
    def _has_tags(self) -> bool:
        return ARGS in self._template

    def parser(self, tools: Tools) -> AnswerParser:
        own = MistralTagParser if self._has_tags else MistralListParser
        return own(tools.parameters)

    def grammar(
        self, tools: Tools, marks: Mapping[str, int], answer: Any = None
    ) -> tuple[str, dict[str, Any]]:
        return (_TAGGED if self._has_tags else _LIST).grammar(tools, marks, answer)

    def new_id(self) -> str:
        """Return an id of nine characters, because Mistral's templates reject other lengths."""
        return uuid.uuid4().hex[:9]
