"""Tools that a model may call: read them from a request, and make the grammar of their calls.

This module decides which call format a chat template describes, and which grammar enforces it.
`chat.tool_parsing` parses the calls of an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from gptmanager.errors import quoted
from gptmanager.server.fields import field_error

MAX_TOOLS = 128
MAX_CALLS = 16  # calls of one guided answer: a model not trained for tools would never stop

_TAG, _END_TAG = "<tool_call>", "</tool_call>"
_ANY = "(?s:.*)"
_SHOWN = ("name", "description", "parameters", "return")  # the keys that models are trained on
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes a call: `before` name `between` arguments `behind`.

    `tagged`: calls are marked by tags and may be mixed with text; else they are the whole answer.
    """

    name: str
    before: str
    between: str
    behind: str
    tagged: bool


HERMES = ToolFormat(
    "Hermes", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", tagged=True
)
LLAMA_3 = ToolFormat("Llama 3", '{"name": "', '", "parameters": ', "}", tagged=False)
HARMONY = ToolFormat(
    "harmony",
    "<|channel|>commentary to=functions.",
    " <|constrain|>json<|message|>",
    "<|call|>",
    tagged=False,
)


def format_of(template: str) -> ToolFormat | None:
    """Return the call format that a chat template describes; None if it is unknown."""
    if "<|channel|>" in template and "to=functions." in template:
        return HARMONY
    if "<tool_call>" in template and "arguments" in template:
        return None if "<function=" in template else HERMES  # Qwen3-Coder has calls in XML
    is_llama = "<|start_header_id|>" in template or "<|python_tag|>" in template
    return LLAMA_3 if is_llama and '"parameters"' in template else None


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request.

    `listed`: as the client gave them. `parameters`: name -> JSON schema of its arguments.
    `required`: the answer must be a call of one of these tools. `lenient`: schema keywords that
    cannot be enforced are ignored.
    """

    listed: Sequence[Mapping[str, Any]]
    parameters: Mapping[str, Mapping[str, Any] | bool]
    required: bool
    parallel: bool
    lenient: bool = False

    @property
    def schemas(self) -> dict[str, Any]:
        """Name of a grammar rule -> schema of a tool's arguments."""
        return {f"arguments_{i}": schema for i, schema in enumerate(self.parameters.values())}

    def for_template(self) -> list[dict[str, Any]]:
        """Return the tools for a chat template: only the keys that models are trained on."""
        functions = [tool["function"] for tool in self.listed]
        return [
            {
                "type": "function",
                "function": {
                    key: value
                    for key, value in function.items()
                    if key in _SHOWN and value is not None
                },
            }
            for function in functions
        ]

    def index_of(self, rule: str) -> int:
        """Return the index in `listed` of the tool that belongs to a rule of `schemas`."""
        name = list(self.parameters)[int(rule.removeprefix("arguments_"))]
        return next(i for i, tool in enumerate(self.listed) if tool["function"]["name"] == name)

    def is_lenient(self, rule: str) -> bool:
        """Whether the tool of a rule has `strict: false`, or the server is lenient."""
        is_own = self.listed[self.index_of(rule)]["function"].get("strict") is False
        return self.lenient or is_own

    def grammar(
        self, form: ToolFormat, marks: Mapping[str, int], answer: Any = None
    ) -> tuple[str, dict[str, Any]]:
        """Return the grammar of an answer, in Lark's form, and the JSON schemas of its rules.

        `marks`: text -> id of added tokens, from `marks_of`. If calls are not `required`, the
        answer may also be JSON of the schema `answer`, or, without a schema, any text; a call that
        begins in the text must be complete and valid.
        """
        several = form.tagged and self.parallel
        calls = f'call ("\\n" call){{0,{MAX_CALLS - 1}}}' if several else "call"
        schemas = dict(self.schemas)
        tag = ""  # the tag before a call, if it is not part of the call's rule
        if self.required:
            lines = [f"start: {calls}"]
        elif answer is not None:
            lines = [f"start: {calls} | answer"]
            schemas["answer"] = answer
        elif form.tagged:
            tag = "" if _TAG in marks else _TAG
            lines = _text_with_tags(tag, marks, MAX_CALLS if several else 1)
        else:
            begun = re.escape(form.before).replace("/", r"\/")
            lines = [
                f"start: call | FIRST{_more(marks)}",
                f"FIRST: /{_ANY}/ & ~/{begun}{_ANY}/",
                f"TEXT: /{_ANY}/",
            ]
        lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(self.parameters))))
        for index, name in enumerate(self.parameters):
            begin = grammar_text((form.before + name + form.between).removeprefix(tag), marks)
            end = grammar_text(form.behind, marks)
            lines.append(f"call_{index}: {begin} arguments_{index} {end}")
        return "\n".join(lines), schemas


def marks_of(tokenizer: Tokenizer, end_ids: Collection[int]) -> dict[str, int]:
    """Return text -> id of the tokens added to a vocabulary, such as <tool_call> and <think>.

    llguidance does not match them by the characters of their names, so grammars use their ids.
    """
    return {
        token.content: index
        for index, token in tokenizer.get_added_tokens_decoder().items()
        if index not in end_ids and (token.special or re.fullmatch("<.+>", token.content))
    }


def _text_with_tags(tag: str, marks: Mapping[str, int], most: int) -> list[str]:
    """Return grammar lines for text with up to `most` calls, each begun by `tag` or by a mark."""
    text = f"TEXT: /{_ANY}/"
    if not tag:
        return [f"start: (text call){{0,{most}}} text", f"text: TEXT{_more(marks)}", text]
    others = _others(marks)
    return [
        f"start: (begin call){{0,{most}}} text",
        f"begin: (TEXT {others})* tag" if others else "begin: tag",
        f'tag[lazy]: TEXT "{tag}"',
        f"text: TEXT{_more(marks)}",
        text,
    ]


def _more(marks: Mapping[str, int]) -> str:
    """Return the grammar of text that follows marks other than those of calls."""
    others = _others(marks)
    return f" ({others} TEXT)*" if others else ""


def _others(marks: Mapping[str, int]) -> str:
    ids = ",".join(str(index) for text, index in marks.items() if text not in (_TAG, _END_TAG))
    return f"<[{ids}]>" if ids else ""


def read_tools(tools: Any, tool_choice: Any, parallel_tool_calls: bool = True) -> Tools | None:
    """Read the fields `tools` and `tool_choice`; return None if no tool may be called.

    ApiError (400) names the wrong field and the reason.
    """
    listed = [] if tools is None else tools
    if not isinstance(listed, list) or len(listed) > MAX_TOOLS:
        raise field_error("tools", f"must be a list of at most {MAX_TOOLS} tools")
    parameters: dict[str, Any] = {}
    for index, tool in enumerate(listed):
        name, schema = _tool(tool, f"tools[{index}]")
        if name in parameters:
            raise field_error(
                f"tools[{index}].function.name",
                f"{name!r} is used twice; each tool needs a unique name",
            )
        parameters[name] = schema
    choice, allowed = _allowed("auto" if tool_choice is None else tool_choice)
    named = _named(choice)
    if named is None and choice not in ("none", "auto", "required"):
        raise field_error("tool_choice", "must be 'none', 'auto', 'required', or name a function")
    if not parameters and (named is not None or choice == "required"):
        raise field_error("tool_choice", "needs tools; the request has none")
    if not parameters or choice == "none":
        return None
    if named is not None:
        if named not in parameters:
            raise field_error(
                "tool_choice.function.name", f"{quoted(named)} must be one of the tools"
            )
        return Tools(listed, {named: parameters[named]}, required=True, parallel=False)
    for name in allowed or ():
        if name not in parameters:
            raise field_error(
                "tool_choice.allowed_tools.tools", f"{quoted(name)} must be one of the tools"
            )
    if allowed is not None:
        parameters = {name: parameters[name] for name in allowed}
    return Tools(listed, parameters, choice == "required", parallel_tool_calls)


def _tool(tool: Any, where: str) -> tuple[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
        raise field_error(
            where, "must be a tool such as {'type': 'function', 'function': {'name': ...}}"
        )
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise field_error(
            f"{where}.function.name",
            f"{quoted(name)} must be 1 to 128 letters, digits, '_', '-' or '.'",
        )
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, Mapping):
        raise field_error(f"{where}.function.parameters", "must be a JSON schema object")
    if parameters.get("type", "object") != "object":
        raise field_error(f"{where}.function.parameters.type", "must be 'object'")
    return name, {**parameters, "type": "object"}


def _allowed(choice: Any) -> tuple[Any, list[str] | None]:
    """Return the choice, and the names of the tools that it allows; None: all tools.

    `{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}`
    """
    own = choice.get("allowed_tools") if isinstance(choice, Mapping) else None
    if not isinstance(own, Mapping):
        return choice, None
    listed = own.get("tools")
    if not isinstance(listed, list) or not 0 < len(listed) <= MAX_TOOLS:
        raise field_error(
            "tool_choice.allowed_tools.tools", f"must be a list of 1 to {MAX_TOOLS} tools"
        )
    names = [_named(tool) for tool in listed]
    if None in names:
        index = names.index(None)
        raise field_error(f"tool_choice.allowed_tools.tools[{index}]", "must name a function")
    return own.get("mode", "auto"), [name for name in names if name is not None]


def _named(choice: Any) -> str | None:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def grammar_text(text: str, marks: Mapping[str, int]) -> str:
    """Return a text as a grammar writes it: quoted, but with tags that are tokens as ids."""
    parts = filter(None, re.split(r"(</?tool_call>|<\|\w+\|>)", text))
    return " ".join(
        f"<[{marks[part]}]>" if part in marks else json.dumps(part, ensure_ascii=False)
        for part in parts
    )
