"""Formats with a list of JSON objects after a tag.

Granite 3:  <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Rome"}}]
Nemotron:   <TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Rome"}}]</TOOLCALL>
Apriel:     <tool_calls>[{"name": "get_weather", "arguments": {"city": "Rome"}}]</tool_calls>
Command R7B, A:
    <|START_ACTION|>[
        {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Rome"}}
    ]<|END_ACTION|>
"""

from __future__ import annotations

from gptmanager.callbacks.answers.call_grammar import CallShape
from gptmanager.callbacks.answers.parsing.json_calls import JsonCallParser
from gptmanager.callbacks.answers.parsing.python_values import as_json
from gptmanager.callbacks.answers.tool_format import ShapedFormat


class JsonListParser(JsonCallParser):
    """A subclass names the tag before its lists and, if there is one, the tag after them."""

    separator = ","

    def __init_subclass__(cls, tag: str, end: str = "") -> None:
        cls.openers = tuple(f"{tag}{space}[" for space in ("", " ", "\n"))
        cls.closers = ("]", end) if end else ("]",)


class GraniteParser(JsonListParser, tag="<|tool_call|>", end="<|/tool_call|>"): ...


class NemotronParser(JsonListParser, tag="<TOOLCALL>", end="</TOOLCALL>"): ...


class ToolCallsParser(JsonListParser, tag="<tool_calls>", end="</tool_calls>"): ...


class CohereParser(JsonListParser, tag="<|START_ACTION|>", end="<|END_ACTION|>"): ...


# (tag, closing tag, text that a chat template of this variant contains, parser)
_VARIANTS = (
    ("<|tool_call|>", "", "<|tool_call|>", GraniteParser),
    ("<TOOLCALL>", "</TOOLCALL>", "<TOOLCALL>[", NemotronParser),
    ("<tool_calls>", "</tool_calls>", "<tool_calls>[", ToolCallsParser),
)


class JsonList(ShapedFormat):
    """The variant that a chat template contains; Granite's if it contains none."""

    name = "json_list"
    tags = tuple(tag for begin, end, *_ in _VARIANTS for tag in (begin, end) if tag)

    def __init__(self, template: str = "") -> None:
        begin, end, _, self.parser_class = next(
            (one for one in _VARIANTS if one[2] in template), _VARIANTS[0]
        )
        self.shape = CallShape(
            '{"name": "', '", "arguments": ', "}", f"{begin}[", ", ", f"]{end}", begin, self.tags,
            write=as_json,
        )  # fmt: skip

    @staticmethod
    def is_in(template: str) -> bool:
        return any(one[2] in template for one in _VARIANTS)


class Cohere(ShapedFormat):
    name = "cohere"
    tags = ("<|START_ACTION|>", "<|END_ACTION|>")
    shape = CallShape(
        '{"tool_name": "', '", "parameters": ', "}",
        f"{tags[0]}[\n    ", ",\n    ", f"\n]{tags[1]}", tags[0], tags,
    )  # fmt: skip
    parser_class = CohereParser

    @staticmethod
    def is_in(template: str) -> bool:
        return "<|START_ACTION|>" in template
