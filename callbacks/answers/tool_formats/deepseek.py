"""The formats of DeepSeek V3 and R1 (with "function" and a code block) and V3.1 (without them).

V3.2, and with another name of the outer tag V4, have a tag for each value instead. V3 and R1:

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
```json
{"city": "Rome"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

V3.2:
<｜DSML｜function_calls>
<｜DSML｜invoke name="get_weather">
<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>
"""

from __future__ import annotations

import functools

from gptmanager.callbacks.answers.call_grammar import CallShape
from gptmanager.callbacks.answers.parsing.call_parser import NAME, OBJECT, SPACE, HeadedCallParser
from gptmanager.callbacks.answers.tool_format import ShapedFormat
from gptmanager.callbacks.answers.value_tags import TaggedValuesParser, ValueTags

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


_DSML = "｜DSML｜"  # noqa: RUF001 - the letters of the model's token
_BLOCKS = {
    name: (f"<{_DSML}{name}>", f"</{_DSML}{name}>") for name in ("function_calls", "tool_calls")
}
_INVOKE, _END_INVOKE = f'<{_DSML}invoke name="', f"</{_DSML}invoke>"
_INVOKED = (NAME, '">')


class DsmlParser(TaggedValuesParser):
    openers = (*(begin for begin, _ in _BLOCKS.values()), _INVOKE)
    closers = (_END_INVOKE, *(end for _, end in _BLOCKS.values()))
    headers = {
        **{begin: ((SPACE, _INVOKE, *_INVOKED),) for begin, _ in _BLOCKS.values()},
        _INVOKE: (_INVOKED,),
    }
    tags = ValueTags(
        f'<{_DSML}parameter name="', '" string="true">', f"</{_DSML}parameter>", closers,
        begin_json='" string="false">',
    )  # fmt: skip


class DeepSeekV32(ShapedFormat):
    """The format of DeepSeek V3.2 and V4. The template has the name of the outer tag."""

    name = "deepseek_v32"
    tags = (_DSML,)
    parser_class = DsmlParser

    def __init__(self, template: str = "") -> None:
        begin, end = _BLOCKS["tool_calls" if "tool_calls>" in template else "function_calls"]
        self.shape = CallShape(
            _INVOKE, '">\n', f"{_END_INVOKE}\n", f"{begin}\n", "", end, begin, self.tags,
            DsmlParser.tags.body,
        )  # fmt: skip

    @staticmethod
    def is_in(template: str) -> bool:
        return _DSML in template
