"""Builds grammars for answers with tool calls, in llguidance's variant of Lark's syntax."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from gptmanager.callbacks.answers.schema_types import required_of
from gptmanager.callbacks.answers.tools import Tools
from gptmanager.errors import quoted

MAX_CALLS = 16  # per guided answer, because a model not trained for tools may never stop calling
_ANY = "(?s:.*)"
ID = "\ue000"  # the place of an id in the texts of a `CallShape`
# (name of a rule, JSON schema of a tool's arguments, ids of added tokens) -> (grammar lines of the
# rule, JSON schemas by the names of the rules that they define)
Body = Callable[[str, Any, Mapping[str, int]], tuple[list[str], dict[str, Any]]]


def json_body(rule: str, schema: Any, marks: Mapping[str, int]) -> tuple[list[str], dict[str, Any]]:
    """Return no grammar lines, and `schema` as the definition of `rule`, for JSON arguments."""
    return [], {rule: schema}


class InexpressibleArguments(ValueError):
    """A format of calls cannot express the arguments of the tool with the grammar rule `rule`."""

    def __init__(self, rule: str, text: str) -> None:  # noqa: B042 - it is never pickled
        super().__init__(text)
        self.rule = rule


@dataclass(frozen=True, slots=True)
class CallShape:
    """The texts with which a format surrounds the names and the arguments of calls.

    A call is `before` name `between` arguments `behind`. Calls are `begin` call `joint` call ...
    `end`. `body` returns the grammar of the arguments. `tag` begins calls within text; if `tag`
    is empty, an answer is either only calls or only text. `tags` are the texts that mark calls.
    Tags that are added tokens cannot occur in the text around calls. `several`: whether the grammar
    allows more than one call in an answer. `write` returns the text of arguments; None if a model
    with this format has a chat template that writes calls. If the model gives each call an id,
    `id_pattern` is its regular expression, and `ID` is its place in `before` or `between`. If
    `text_end` is a mark, an answer of text may end with it.
    """

    before: str
    between: str
    behind: str
    begin: str = ""
    joint: str = "\n"
    end: str = ""
    tag: str = ""
    tags: tuple[str, ...] = ()
    body: Body = json_body
    several: bool = True
    write: Callable[[Mapping[str, Any]], str] | None = None
    id_pattern: str = ""
    text_end: str = ""

    def text(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str | None:
        """Return calls, as (name, arguments), as the model writes them; None without `write`."""
        if self.write is None:
            return None
        texts = [
            f"{self.before}{name}{self.between}{self.write(arguments)}{self.behind}"
            for name, arguments in calls
        ]
        return self.begin + self.joint.join(texts) + self.end

    def grammar(
        self, tools: Tools, marks: Mapping[str, int], answer: Any = None
    ) -> tuple[str, dict[str, Any]]:
        """Return the grammar and its schemas, see `ToolFormat.grammar`.

        Raises InexpressibleArguments if the format cannot express the arguments of a tool.
        """
        several = self.several and tools.parallel
        schemas: dict[str, Any] = {}
        tag = ""  # the part of `self.tag` before the one that the rule `calls` matches
        if not tools.required and answer is None:
            tag = _before_marks(self.tag, marks)
        begin, before = self.begin, self.before
        if begin:
            begin = begin.removeprefix(tag)
        else:
            before = before.removeprefix(tag)
        if tools.required:
            lines = ["start: calls"]
        elif answer is not None:
            lines = ["start: calls | answer"]
            schemas["answer"] = answer
        elif self.tag:
            most = MAX_CALLS if several and not self.begin else 1
            lines = self._text_with_calls(tag, marks, most)
        else:
            begun = re.escape(self.begin + self.before).replace("/", r"\/")
            lines = [
                f"start: calls | FIRST{self._more(marks)}",
                f"FIRST: /{_ANY}/ & ~/{begun}{_ANY}/",
                f"TEXT: /{_ANY}/",
            ]
        is_alone = not several or (self.tag and not self.begin and lines[0].startswith("start: ("))
        joint = grammar_text(self.joint, marks)
        more = "" if is_alone else f" ({joint} call){{0,{MAX_CALLS - 1}}}"
        lines.append(
            f"calls: {grammar_text(begin, marks)} call{more} {grammar_text(self.end, marks)}"
        )
        lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(tools.parameters))))
        for index, (name, schema) in enumerate(tools.parameters.items()):
            rule = f"arguments_{index}"
            head = " ".join(
                f"/{self.id_pattern}/" if part == ID else grammar_text(part, marks)
                for part in re.split(f"({ID})", before + name + self.between)
                if part
            )
            lines.append(f"call_{index}: {head} {rule} {grammar_text(self.behind, marks)}")
            try:
                own, own_schemas = self.body(rule, schema, marks)
            except ValueError as error:
                raise InexpressibleArguments(rule, str(error)) from None
            lines += own
            schemas |= own_schemas
        return "\n".join(lines), schemas

    def _text_with_calls(self, tag: str, marks: Mapping[str, int], most: int) -> list[str]:
        """Return grammar lines for text with up to `most` groups of calls.

        Each group begins with `tag`, which is `self.tag` up to its first mark. The rule `calls`
        matches the rest of `self.tag`.
        """
        text, others = f"TEXT: /{_ANY}/", self._others(marks)
        if not tag:
            end = f" <[{marks[self.text_end]}]>?" if self.text_end in marks else ""
            start = f"start: (text calls){{0,{most}}} text{end}"
            return [start, f"text: TEXT{self._more(marks)}", text]
        parts = [f"TEXT {others}"] if others else []
        parts += ["tag"] if tag != self.tag else []  # the text may have `tag` without the mark
        return [
            f"start: (begin calls){{0,{most}}} text",
            f"begin: ({' | '.join(parts)})* tag" if parts else "begin: tag",
            f"tag[lazy]: TEXT {json.dumps(tag, ensure_ascii=False)}",
            f"text: {'tag* ' if tag != self.tag else ''}TEXT{self._more(marks)}",
            text,
        ]

    def _more(self, marks: Mapping[str, int]) -> str:
        """Return the grammar of further texts, each after a mark that does not belong to calls."""
        others = self._others(marks)
        return f" ({others} TEXT)*" if others else ""

    def _others(self, marks: Mapping[str, int]) -> str:
        ids = ",".join(str(index) for text, index in marks.items() if text not in self.tags)
        return f"<[{ids}]>" if ids else ""


def marks_of(tokenizer: Tokenizer, end_ids: Collection[int]) -> dict[str, int]:
    """Return the marks of a vocabulary: text -> id of added tokens such as <tool_call> and <think>.

    llguidance does not match these tokens by their characters, so grammars use their ids.
    """
    return {
        token.content: index
        for index, token in tokenizer.get_added_tokens_decoder().items()
        if index not in end_ids and (token.special or re.fullmatch("<.+>", token.content))
    }


def grammar_text(text: str, marks: Mapping[str, int]) -> str:
    """Return the grammar that matches `text`: quoted strings, and the ids of the marks in it."""
    longest_first = sorted((re.escape(mark) for mark in marks if mark in text), key=len)[::-1]
    parts = re.split(f"({'|'.join(longest_first)})", text) if longest_first else [text]
    return " ".join(
        f"<[{marks[part]}]>" if part in marks else json.dumps(part, ensure_ascii=False)
        for part in parts
        if part
    )


def _before_marks(text: str, marks: Mapping[str, int]) -> str:
    """Return `text` up to its first mark."""
    return text[: min((text.find(mark) for mark in marks if mark in text), default=len(text))]


def text_until(
    rule: str, end: str, marks: Mapping[str, int], without: Sequence[str] = ()
) -> list[str]:
    """Return the grammar lines of `rule`: any text up to the first `end`, and `end` itself.

    The text before `end` has none of the texts in `without`.
    """
    before = _before_marks(end, marks)
    is_lazy = before == end  # a text cannot contain marks
    text, lines = f"/{_ANY}/", []
    if before and not is_lazy:  # the text may have `before` without the mark
        begun = json.dumps(before, ensure_ascii=False)
        rest = grammar_text(end.removeprefix(before), marks)
        return [f"{rule}_begun[lazy]: {text} {begun}", f"{rule}: {rule}_begun+ {rest}"]
    if without:
        others = "|".join(re.escape(one).replace("/", r"\/") for one in without)
        lines.append(f"{rule.upper()}: {text} & ~/{_ANY}({others}){_ANY}/")
        text = rule.upper()
    return [*lines, f"{rule}{'[lazy]' if is_lazy else ''}: {text} {grammar_text(end, marks)}"]


def check_names(names: Iterable[str], pattern: re.Pattern[str]) -> None:
    """Raise ValueError for the first name of an argument that does not match `pattern`.

    The parser of the format would not find this name again.
    """
    for name in names:
        if name != name.strip() or not pattern.fullmatch(name):
            raise ValueError(
                f"the model's format of calls cannot express the name {quoted(name)}; rename it"
            )


def named_values(
    rule: str, schema: Any, names: Sequence[str], joint: str, value_of: Callable[[str, str], str]
) -> list[str]:
    """Return the grammar lines of `rule`: the values of `names` in order, with `joint` between.

    Those that the JSON schema does not require may be left out. `value_of(rule, name)` returns the
    grammar of a name with its value; `rule` begins the names of further rules for it.
    """
    required, between = required_of(schema), json.dumps(joint)
    lines = [f"{rule}: {rule}_0_first"]
    for index, name in enumerate(names):
        one, more = f"{rule}_{index}", f"{rule}_{index + 1}"
        is_optional = name not in required
        lines += [
            f"{one}_named: {value_of(one, name)}",
            f"{one}_first: {one}_named {more}_next" + (f" | {more}_first" if is_optional else ""),
            f"{one}_next: {between} {one}_named {more}_next"
            + (f" | {more}_next" if is_optional else ""),
        ]
    last = f"{rule}_{len(names)}"
    return [*lines, f'{last}_first: ""', f'{last}_next: ""']
