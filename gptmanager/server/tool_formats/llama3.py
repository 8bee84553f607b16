"""The format of Llama 3: the whole answer is one or several JSON objects, separated by ";".

{"name": "get_weather", "parameters": {"city": "Rome"}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gptmanager.server.answer_parsing.answer_parts import AnswerParser
from gptmanager.server.answer_parsing.json_calls import JsonCallParser
from gptmanager.server.tool_formats.call_grammar import CallShape
from gptmanager.server.tool_formats.tool_format import ToolFormat
from gptmanager.server.tool_formats.tools import Tools

SHAPE = CallShape('{"name": "', '", "parameters": ', "}")
_HEADERS = ("<|start_header_id|>", "<|header_start|>", "<|python_tag|>")


class Llama3Parser(JsonCallParser):
    separator = ";"


class Llama3(ToolFormat):
    name = "llama3"

    @staticmethod
    def is_in(template: str) -> bool:
        return '"parameters"' in template and any(one in template for one in _HEADERS)

    def parser(self, tools: Tools) -> AnswerParser:
        return Llama3Parser(tools.parameters)

    def grammar(
        self, tools: Tools, marks: Mapping[str, int], answer: Any = None
    ) -> tuple[str, dict[str, Any]]:
        return SHAPE.grammar(tools, marks, answer, several=False)
