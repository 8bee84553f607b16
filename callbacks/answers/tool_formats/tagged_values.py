"""Formats with a tag for each value. Strings are written as they are, other values as JSON.

Qwen3-Coder, Qwen3.5:                   Seed-OSS has no line breaks around values:
    <tool_call>                             <seed:tool_call>
    <function=get_weather>                  <function=get_weather>
    <parameter=city>                        <parameter=city>Rome</parameter>
    Rome                                    </function>
    </parameter>                            </seed:tool_call>
    </function>
    </tool_call>

MiniMax-M2, with all calls in one tag:  GLM-4.5 (4.7 without the line breaks):
    <minimax:tool_call>                     <tool_call>get_weather
    <invoke name="get_weather">             <arg_key>city</arg_key>
    <parameter name="city">Rome</parameter> <arg_value>Rome</arg_value>
    </invoke>                               </tool_call>
    </minimax:tool_call>

MiniCPM5 has no line breaks: <function name="get_weather"><param name="city">Rome</param></function>

Hy3, with ":opensource" at the end of each tag:
    <tool_calls:opensource>
    <tool_call:opensource>get_weather<tool_sep:opensource>
    <arg_key:opensource>city</arg_key:opensource>
    <arg_value:opensource>Rome</arg_value:opensource>
    </tool_call:opensource>
    </tool_calls:opensource>
"""

from __future__ import annotations

import re

from gptmanager.callbacks.answers.call_grammar import CallShape
from gptmanager.callbacks.answers.parsing.call_parser import NAME, SPACE
from gptmanager.callbacks.answers.tool_format import ShapedFormat
from gptmanager.callbacks.answers.value_tags import TaggedValuesParser, ValueTags

_TAG = re.compile("(?=<)")  # another tag follows


class Qwen3CoderParser(TaggedValuesParser):
    """Calls may lack `<tool_call>`."""

    openers = ("<tool_call>", "<function=")
    closers = ("</function>", "</tool_call>")
    headers = {
        "<tool_call>": ((SPACE, "<function=", SPACE, NAME, SPACE, ">"),),
        "<function=": ((SPACE, NAME, SPACE, ">"),),
    }
    tags = ValueTags("<parameter=", ">", "</parameter>", closers, "\n", "\n")


class SeedOssParser(TaggedValuesParser):
    openers = ("<seed:tool_call>",)
    closers = ("</function>", "</seed:tool_call>")
    headers = {"<seed:tool_call>": ((SPACE, "<function=", SPACE, NAME, SPACE, ">"),)}
    tags = ValueTags("<parameter=", ">", "</parameter>", closers, dropped_break="\n")


class MiniMaxM2Parser(TaggedValuesParser):
    openers = ("<minimax:tool_call>", '<invoke name="')
    closers = ("</invoke>", "</minimax:tool_call>")
    headers = {
        "<minimax:tool_call>": ((SPACE, '<invoke name="', NAME, '">'),),
        '<invoke name="': ((NAME, '">'),),
    }
    tags = ValueTags('<parameter name="', '">', "</parameter>", closers)


class MiniCpm5Parser(TaggedValuesParser):
    openers = ('<function name="',)
    closers = ("</function>",)
    headers = {'<function name="': ((NAME, '">'),)}
    tags = ValueTags(
        '<param name="', '">', "</param>", closers, joint="", quotes=("<![CDATA[", "]]>")
    )  # fmt: skip


class Glm45Parser(TaggedValuesParser):
    openers = ("<tool_call>",)
    closers = ("</tool_call>",)
    headers = {"<tool_call>": ((SPACE, NAME, SPACE, _TAG),)}
    tags = ValueTags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", closers)


class Glm47Parser(Glm45Parser):
    tags = ValueTags(
        "<arg_key>", "</arg_key><arg_value>", "</arg_value>", Glm45Parser.closers, joint=""
    )


_HY3 = {
    name: (f"<{name}:opensource>", f"</{name}:opensource>")
    for name in ("tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value")
}
_HY3_CALLS, _HY3_CALL, _HY3_KEY, _HY3_VALUE = (
    _HY3[name] for name in ("tool_calls", "tool_call", "arg_key", "arg_value")
)
_HY3_NAMED = (NAME, _HY3["tool_sep"][0])


class Hy3Parser(TaggedValuesParser):
    openers = (_HY3_CALLS[0], _HY3_CALL[0])
    closers = (_HY3_CALL[1], _HY3_CALLS[1])
    headers = {
        _HY3_CALLS[0]: ((SPACE, _HY3_CALL[0], *_HY3_NAMED),),
        _HY3_CALL[0]: (_HY3_NAMED,),
    }
    tags = ValueTags(_HY3_KEY[0], f"{_HY3_KEY[1]}\n{_HY3_VALUE[0]}", _HY3_VALUE[1], closers)


def _functions_in(begin: str, end: str, parser_class: type[TaggedValuesParser]) -> CallShape:
    """Return the shape of calls that are a <function=NAME> between the tags `begin` and `end`."""
    return CallShape(
        f"{begin}\n<function=", ">\n", f"</function>\n{end}", tag=begin, tags=(begin, end),
        body=parser_class.tags.body,
    )  # fmt: skip


class Qwen3Coder(ShapedFormat):
    name = "qwen3_coder"
    tags = ("<tool_call>", "</tool_call>")
    parser_class = Qwen3CoderParser
    shape = _functions_in(*tags, parser_class)

    @staticmethod
    def is_in(template: str) -> bool:
        return "<function=" in template and "<parameter=" in template


class SeedOss(ShapedFormat):
    name = "seed_oss"
    tags = ("<seed:tool_call>", "</seed:tool_call>")
    parser_class = SeedOssParser
    shape = _functions_in(*tags, parser_class)

    @staticmethod
    def is_in(template: str) -> bool:
        return "<seed:tool_call>" in template


class MiniMaxM2(ShapedFormat):
    name = "minimax_m2"
    tags = ("<minimax:tool_call>", "</minimax:tool_call>")
    parser_class = MiniMaxM2Parser
    shape = CallShape(
        '<invoke name="', '">\n', "</invoke>\n", f"{tags[0]}\n", "", tags[1], tags[0], tags,
        parser_class.tags.body,
    )  # fmt: skip

    @staticmethod
    def is_in(template: str) -> bool:
        return "<minimax:tool_call>" in template


class Glm45(ShapedFormat):
    """The format of GLM-4.5, 4.6 and 4.7, in the variant that a chat template contains."""

    name = "glm45"
    tags = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def __init__(self, template: str = "") -> None:
        has_breaks = "</arg_key><arg_value>" not in template
        self.parser_class = Glm45Parser if has_breaks else Glm47Parser
        self.shape = CallShape(
            "<tool_call>", "\n" if has_breaks else "", "</tool_call>", tag=self.tags[0],
            tags=self.tags, body=self.parser_class.tags.body,
        )  # fmt: skip

    @staticmethod
    def is_in(template: str) -> bool:
        return "<arg_key>" in template and "<arg_value>" in template


class MiniCpm5(ShapedFormat):
    name = "minicpm5"
    parser_class = MiniCpm5Parser
    shape = CallShape(
        '<function name="', '">', "</function>", tag='<function name="',
        body=parser_class.tags.body,
    )  # fmt: skip

    @staticmethod
    def is_in(template: str) -> bool:
        return '<function name="' in template and '<param name="' in template


class Hy3(ShapedFormat):
    name = "hy3"
    tags = (*_HY3_CALLS, *_HY3_CALL, *_HY3_KEY, *_HY3_VALUE, _HY3["tool_sep"][0])
    parser_class = Hy3Parser
    shape = CallShape(
        _HY3_CALL[0], f"{_HY3['tool_sep'][0]}\n", f"{_HY3_CALL[1]}\n", f"{_HY3_CALLS[0]}\n", "",
        _HY3_CALLS[1], _HY3_CALLS[0], tags, parser_class.tags.body,
    )  # fmt: skip

    @staticmethod
    def is_in(template: str) -> bool:
        return _HY3["tool_sep"][0] in template or (
            "<tool_sep{}>" in template and ":opensource" in template
        )
