"""The format of Kimi K2. The model numbers its calls, and the number is a part of the id.

<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>
{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

import re

from gptmanager.callbacks.answers.call_grammar import ID, CallShape
from gptmanager.callbacks.answers.parsing.call_parser import NAME, OBJECT, SPACE, HeadedCallParser
from gptmanager.callbacks.answers.tool_format import ShapedFormat

_BEGIN_ALL, _END_ALL = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_BEGIN, _ARGUMENTS, _END = (
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_NUMBER = re.compile(r"[0-9]{1,9}")
_HEADER = (SPACE, "functions.", NAME, ":", _NUMBER, SPACE, _ARGUMENTS, SPACE, OBJECT)


class KimiK2Parser(HeadedCallParser):
    openers = (_BEGIN_ALL, _BEGIN)
    closers = (_END, _END_ALL)
    headers = {_BEGIN_ALL: ((SPACE, _BEGIN, *_HEADER),), _BEGIN: (_HEADER,)}
    id_pattern = re.compile(r"functions\.[^:]*:[0-9]+")


class KimiK2(ShapedFormat):
    name = "kimi_k2"
    tags = (_BEGIN_ALL, _END_ALL, _BEGIN, _ARGUMENTS, _END)
    shape = CallShape(
        f"{_BEGIN}functions.", f":{ID}{_ARGUMENTS}", _END, _BEGIN_ALL, "", _END_ALL, _BEGIN_ALL,
        tags, id_pattern="[0-9]{1,4}",
    )  # fmt: skip
    parser_class = KimiK2Parser

    @staticmethod
    def is_in(template: str) -> bool:
        return _BEGIN_ALL in template
