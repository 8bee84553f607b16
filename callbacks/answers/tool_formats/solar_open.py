"""The format of Solar Open. The model gives each call an id of ten letters and digits.

<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>get_weather<|tool_call:args|>
{"city": "Rome"}<|tool_call:end|><|calls|>
"""

from __future__ import annotations

import re

from gptmanager.callbacks.answers.call_grammar import ID, CallShape
from gptmanager.callbacks.answers.parsing.call_parser import NAME, OBJECT, SPACE, HeadedCallParser
from gptmanager.callbacks.answers.tool_format import ShapedFormat

_BEGIN_ALL, _END_ALL = "<|tool_calls|>", "<|calls|>"
_BEGIN, _NAME, _ARGUMENTS, _END = (
    f"<|tool_call:{name}|>" for name in ("begin", "name", "args", "end")
)
_ID = re.compile("[A-Za-z0-9_-]{0,64}")
_HEADER = (SPACE, _ID, SPACE, _NAME, SPACE, NAME, SPACE, _ARGUMENTS, SPACE, OBJECT)


class SolarOpenParser(HeadedCallParser):
    openers = (_BEGIN_ALL, _BEGIN)
    closers = (_END, _END_ALL)
    headers = {_BEGIN_ALL: ((SPACE, _BEGIN, *_HEADER),), _BEGIN: (_HEADER,)}
    id_pattern = re.compile(rf"[A-Za-z0-9_-]+(?=\s*{re.escape(_NAME)})")


class SolarOpen(ShapedFormat):
    name = "solar_open"
    tags = (_BEGIN_ALL, _END_ALL, _BEGIN, _NAME, _ARGUMENTS, _END)
    shape = CallShape(
        f"{_BEGIN}{ID}{_NAME}", _ARGUMENTS, _END, _BEGIN_ALL, "", _END_ALL, _BEGIN_ALL, tags,
        id_pattern="[a-z0-9]{10}",
    )  # fmt: skip
    parser_class = SolarOpenParser

    @staticmethod
    def is_in(template: str) -> bool:
        return _BEGIN in template
