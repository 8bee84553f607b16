"""The format of Llama 3: the whole answer is one or several JSON objects, separated by ";".

{"name": "get_weather", "parameters": {"city": "Rome"}}
"""

from __future__ import annotations

from gptmanager.callbacks.answers.call_grammar import CallShape
from gptmanager.callbacks.answers.parsing.json_calls import JsonCallParser
from gptmanager.callbacks.answers.tool_format import ShapedFormat

SHAPE = CallShape('{"name": "', '", "parameters": ', "}", several=False)
_HEADERS = ("<|start_header_id|>", "<|header_start|>", "<|python_tag|>")


class Llama3Parser(JsonCallParser):
    separator = ";"


class Llama3(ShapedFormat):
    name = "llama3"
    shape = SHAPE
    parser_class = Llama3Parser

    @staticmethod
    def is_in(template: str) -> bool:
        return '"parameters"' in template and any(one in template for one in _HEADERS)
