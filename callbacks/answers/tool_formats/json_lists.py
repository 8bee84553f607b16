"""Formats with JSON objects after a tag, most of them in a list.

Granite 3:       <|tool_call|>[{"name": "get_weather", "arguments": {"city": "Rome"}}]
Nemotron:        <TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Rome"}}]</TOOLCALL>
Apriel:          <tool_calls>[{"name": "get_weather", "arguments": {"city": "Rome"}}]</tool_calls>
MiniMax-M1:      the same without brackets, with an object in each line
GigaChat 3.1:    <|function_call|>{"name": "get_weather", "arguments": {"city": "Rome"}}
GigaChat 3, as a message of its own:
    <|message_sep|>

    function call<|role_sep|>
    {"name": "get_weather", "arguments": {"city": "Rome"}}
Apertus:         <|tools_prefix|>[{"get_weather": {"city": "Rome"}}]<|tools_suffix|>
Command R7B, A:
    <|START_ACTION|>[
        {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Rome"}}
    ]<|END_ACTION|>
Command R+:      the same list after "Action:", in a code block of JSON
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from gptmanager.callbacks.answers.call_grammar import CallShape
from gptmanager.callbacks.answers.parsing.answer_parts import Found
from gptmanager.callbacks.answers.parsing.call_parser import (
    NAME,
    OBJECT,
    SPACE,
    CallParser,
    HeadedCallParser,
    State,
)
from gptmanager.callbacks.answers.parsing.dropped_tags import DroppedTags
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


class MiniMaxM1Parser(JsonCallParser):
    openers = ("<tool_calls>",)
    separator = "\n"
    closers = ("</tool_calls>",)


class GigaChatParser(JsonCallParser):
    openers = ("<|function_call|>",)


_MESSAGE_END, _ROLE_END = "<|message_sep|>", "<|role_sep|>"


class GigaChat3Parser(JsonCallParser):
    """Drops the tag with which the model ends a message."""

    openers = (f"{_MESSAGE_END}\n\nfunction call{_ROLE_END}\n",)

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._message_ends = DroppedTags((_MESSAGE_END,))

    def push(self, text: str) -> list[Found]:
        return self._message_ends.push(super().push(text))

    def flush(self) -> list[Found]:
        return self._message_ends.push(super().flush()) + self._message_ends.flush()


class _Variant(NamedTuple):
    """`begin` and `end` of the calls, `joint` between two, and what the chat template contains."""

    begin: str
    end: str
    shown: re.Pattern[str]
    parser_class: type[CallParser]
    joint: str = ", "
    several: bool = True
    text_end: str = ""

    @property
    def tag(self) -> str:
        return self.begin.rstrip("[\n")


_VARIANTS = (
    _Variant("<|tool_call|>[", "]", re.compile(r"<\|tool_call\|>"), GraniteParser),
    _Variant("<TOOLCALL>[", "]</TOOLCALL>", re.compile(r"<TOOLCALL>\["), NemotronParser),
    _Variant("<tool_calls>[", "]</tool_calls>", re.compile(r"<tool_calls>\["), ToolCallsParser),
    _Variant(
        "<tool_calls>\n", "\n</tool_calls>", re.compile(r'<tool_calls>(?:\\n|\n)\{"name":'),
        MiniMaxM1Parser, joint="\n",
    ),
    _Variant(
        "<|function_call|>", "", re.compile(r"<\|function_call\|>"), GigaChatParser,
        joint="<|function_call|>", several=False,
    ),
    _Variant(
        GigaChat3Parser.openers[0], "", re.compile(r"(?s)<\|role_sep\|>.*'function call'"),
        GigaChat3Parser, joint=GigaChat3Parser.openers[0], several=False, text_end=_MESSAGE_END,
    ),
)  # fmt: skip


class JsonList(ShapedFormat):
    """The variant that a chat template contains; Granite's if it contains none."""

    name = "json_list"
    tags = (
        "<|tool_call|>", "<TOOLCALL>", "</TOOLCALL>", "<tool_calls>", "</tool_calls>",
        "<|function_call|>", _MESSAGE_END, _ROLE_END,
    )  # fmt: skip

    def __init__(self, template: str = "") -> None:
        found = next((one for one in _VARIANTS if one.shown.search(template)), _VARIANTS[0])
        self.parser_class = found.parser_class
        self.shape = CallShape(
            '{"name": "', '", "arguments": ', "}", found.begin, found.joint, found.end, found.tag,
            self.tags, several=found.several, write=as_json, text_end=found.text_end,
        )  # fmt: skip

    @staticmethod
    def is_in(template: str) -> bool:
        return any(one.shown.search(template) for one in _VARIANTS)


class CohereParser(JsonListParser, tag="<|START_ACTION|>", end="<|END_ACTION|>"): ...


class CommandRPlusParser(JsonListParser, tag="Action:\n```json", end="```"): ...


class Cohere(ShapedFormat):
    """The format of Command R7B and A or, if a template shows it, that of Command R+."""

    name = "cohere"
    tags = ("<|START_ACTION|>", "<|END_ACTION|>")

    def __init__(self, template: str = "") -> None:
        is_old = _ACTION in template
        begin, end = (
            ("Action:\n```json\n[", "\n]```")
            if is_old
            else (f"{self.tags[0]}[", f"\n]{self.tags[1]}")
        )
        self.parser_class = CommandRPlusParser if is_old else CohereParser
        self.shape = CallShape(
            '{"tool_name": "', '", "parameters": ', "}", f"{begin}\n    ", ",\n    ", end,
            "Action:" if is_old else self.tags[0], self.tags,
        )  # fmt: skip

    @staticmethod
    def is_in(template: str) -> bool:
        return "<|START_ACTION|>" in template or _ACTION in template


_ACTION = r"Action:\n```json\n["  # templates write line breaks so


class ApertusParser(HeadedCallParser):
    """Parses objects with one key, which is the name of the tool."""

    openers = tuple(f"<|tools_prefix|>{space}[" for space in ("", " ", "\n"))
    closers = ("}", "]", "<|tools_suffix|>")
    headers = {
        opener: ((SPACE, "{", SPACE, '"', NAME, '"', SPACE, ":", SPACE, OBJECT),)
        for opener in openers
    }

    def _read_between(self) -> bool:
        rest = self._text.lstrip()
        if not rest.startswith(","):
            return super()._read_between()
        self._before = self._take(len(self._text) - len(rest) + 1)
        self._state = State.HEADER
        return True


class Apertus(ShapedFormat):
    name = "apertus"
    tags = ("<|tools_prefix|>", "<|tools_suffix|>")
    shape = CallShape('{"', '": ', "}", f"{tags[0]}[", ", ", f"]{tags[1]}", tags[0], tags)
    parser_class = ApertusParser

    @staticmethod
    def is_in(template: str) -> bool:
        return "<|tools_prefix|>" in template
