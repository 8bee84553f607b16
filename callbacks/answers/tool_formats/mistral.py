"""The formats of Mistral: a list of JSON objects or, in newer models, tags for each call.

[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome"}}]
[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}
"""

from __future__ import annotations

import uuid

from gptmanager.callbacks.answers.call_grammar import CallShape
from gptmanager.callbacks.answers.parsing.call_parser import NAME, OBJECT, SPACE, HeadedCallParser
from gptmanager.callbacks.answers.tool_format import ShapedFormat
from gptmanager.callbacks.answers.tool_formats.json_lists import JsonListParser

CALLS, ID, ARGS = TAGS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
_LIST = CallShape(
    '{"name": "', '", "arguments": ', "}", f"{CALLS} [", ", ", "]", tag=CALLS, tags=TAGS
)
_TAGGED = CallShape(CALLS, ARGS, "", joint="", tag=CALLS, tags=TAGS)


class MistralListParser(JsonListParser, tag=CALLS): ...


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


class Mistral(ShapedFormat):
    """Both formats of Mistral: a template with `[ARGS]` has the newer format."""

    name = "mistral"
    tags = TAGS

    def __init__(self, template: str = "") -> None:
        has_tags = ARGS in template
        self.shape = _TAGGED if has_tags else _LIST
        self.parser_class = MistralTagParser if has_tags else MistralListParser

    @staticmethod
    def is_in(template: str) -> bool:
        return CALLS in template

    def new_id(self) -> str:
        """Return an id of nine characters, because Mistral's templates reject other lengths."""
        return uuid.uuid4().hex[:9]
