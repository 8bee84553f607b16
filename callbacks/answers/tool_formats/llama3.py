"""The formats of Llama 3, and of Functionary, which is trained on Llama 3.

Llama 3, the whole answer; several calls are separated by ";":
    {"name": "get_weather", "parameters": {"city": "Rome"}}
Functionary 3.1:
    <function=get_weather>{"city": "Rome"}</function>
"""

from __future__ import annotations

import re

from gptmanager.callbacks.answers.call_grammar import CallShape
from gptmanager.callbacks.answers.parsing.call_parser import NAME, OBJECT, SPACE, HeadedCallParser
from gptmanager.callbacks.answers.parsing.json_calls import JsonCallParser
from gptmanager.callbacks.answers.tool_format import ShapedFormat

SHAPE = CallShape('{"name": "', '", "parameters": ', "}", several=False)
_HEADERS = ("<|start_header_id|>", "<|header_start|>", "<|python_tag|>")
_FUNCTION, _END = "<function=", "</function>"
_SHOWN = re.compile(r"<function=\w+>\{")


class Llama3Parser(JsonCallParser):
    separator = ";"


class Llama3(ShapedFormat):
    name = "llama3"
    shape = SHAPE
    parser_class = Llama3Parser

    @staticmethod
    def is_in(template: str) -> bool:
        return '"parameters"' in template and any(one in template for one in _HEADERS)


class FunctionaryParser(HeadedCallParser):
    openers = (_FUNCTION,)
    closers = (_END,)
    headers = {_FUNCTION: ((NAME, ">", SPACE, OBJECT),)}


class Functionary(ShapedFormat):
    name = "functionary"
    shape = CallShape(_FUNCTION, ">", _END, joint="", tag=_FUNCTION)
    parser_class = FunctionaryParser

    @staticmethod
    def is_in(template: str) -> bool:
        return _SHOWN.search(template) is not None
