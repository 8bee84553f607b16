"""The tool call format of Hermes and Qwen: text with any number of JSON objects in tags.

<tool_call>
{"name": "get_weather", "arguments": {"city": "Rome"}}
</tool_call>
"""

from __future__ import annotations

import re

from gptmanager.callbacks.answers.call_grammar import CallShape
from gptmanager.callbacks.answers.parsing.json_calls import JsonCallParser
from gptmanager.callbacks.answers.tool_format import ShapedFormat

_OBJECT = re.compile(r'\{\s*\\*"name\\*"\s*:')  # `{"name":`, also within a string
TAGS = ("<tool_call>", "</tool_call>")
SHAPE = CallShape(
    '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", tag=TAGS[0], tags=TAGS
)


class HermesParser(JsonCallParser):
    openers = TAGS[:1]
    closers = TAGS[1:]


class Hermes(ShapedFormat):
    name = "hermes"
    tags = TAGS
    shape = SHAPE
    parser_class = HermesParser

    @staticmethod
    def is_in(template: str) -> bool:
        return TAGS[0] in template and _OBJECT.search(template) is not None
