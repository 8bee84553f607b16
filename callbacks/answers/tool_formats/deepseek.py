"""The formats of DeepSeek V3 and R1 (with "function" and a code block) and V3.1 (without them).

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
```json
{"city": "Rome"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

import functools

from gptmanager.callbacks.answers.call_grammar import CallShape
from gptmanager.callbacks.answers.parsing.call_parser import NAME, OBJECT, SPACE, HeadedCallParser
from gptmanager.callbacks.answers.tool_format import ShapedFormat

_MARK = "<｜tool▁{}｜>"  # noqa: RUF001 - the letters of the model's tokens
TAGS = tuple(map(_MARK.format, ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")))
_BEGIN_ALL, _END_ALL, BEGIN, END, SEPARATOR = TAGS
_BLOCK = "```json"
_shape = functools.partial(CallShape, begin=_BEGIN_ALL, end=_END_ALL, tag=_BEGIN_ALL, tags=TAGS)
_WITH_BLOCK = _shape(f"{BEGIN}function{SEPARATOR}", f"\n{_BLOCK}\n", f"\n```{END}")
_WITHOUT = _shape(BEGIN, SEPARATOR, END, joint="")
_HEADERS = (
    ("function", SEPARATOR, NAME, SPACE, _BLOCK, SPACE, OBJECT),
    (NAME, SEPARATOR, SPACE, OBJECT),
)


class DeepSeekParser(HeadedCallParser):
    openers = (_BEGIN_ALL, BEGIN)
    closers = ("```", END, _END_ALL)
    headers = {
        _BEGIN_ALL: tuple((SPACE, BEGIN, *header) for header in _HEADERS),
        BEGIN: _HEADERS,
    }


class DeepSeek(ShapedFormat):
    name = "deepseek"
    tags = TAGS
    parser_class = DeepSeekParser

    def __init__(self, template: str = "") -> None:
        self.shape = _WITH_BLOCK if _BLOCK in template else _WITHOUT

    @staticmethod
    def is_in(template: str) -> bool:
        return BEGIN in template
