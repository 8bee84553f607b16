"""Tools that a model may call: what a request says of them, and what calls of them look like.

Decides which format a chat template has taught its model, and which grammar holds it to that.
Knows nothing of how a call is found in a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gptmanager.server.errors import ApiError

MAX_TOOLS = 128
MAX_CALLS = 16  # of one guided answer: a model that is not trained for tools would go on for ever

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes a call: `before` name `between` arguments `behind`.

    `tagged`: calls are marked, and may stand among text; else they are the whole answer.
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


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template describes to its model; None if it is no known one."""
    if "<tool_call>" in template and "arguments" in template:
        return None if "<function=" in template else HERMES  # Qwen3-Coder has calls in XML
    is_llama = "<|start_header_id|>" in template or "<|python_tag|>" in template
    return LLAMA_3 if is_llama and '"parameters"' in template else None


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request.

    `listed`: as the client gave them, for the chat template. `parameters`: name -> JSON schema of
    its arguments. `required`: the answer is a call, of one of these names.
    """

    listed: Sequence[Mapping[str, Any]]
    parameters: Mapping[str, Mapping[str, Any] | bool]
    required: bool
    parallel: bool

    def grammar(self, form: ToolFormat, answer: Any = None) -> tuple[str, dict[str, Any]]:
        """What the answer may be: a Lark grammar, and the JSON schemas of rules that it uses.

        Not `required`: JSON of the schema `answer`; without one any text, in which calls are right
        once they begin.
        """
        schemas = {f"arguments_{i}": schema for i, schema in enumerate(self.parameters.values())}
        several = form.tagged and self.parallel
        calls = f'call ("\\n" call){{0,{MAX_CALLS - 1}}}' if several else "call"
        tag = ""
        if self.required:
            lines = [f"start: {calls}"]
        elif answer is not None:
            lines = [f"start: {calls} | answer"]
            schemas["answer"] = answer
        elif form.tagged:
            tag = "<tool_call>"
            lines = [
                f"start: (begin call){{0,{MAX_CALLS if several else 1}}} text",
                f'begin[lazy]: TEXT "{tag}"',
                "text: TEXT",
                "TEXT: /(?s:.*)/",
            ]
        else:
            begun = re.escape(form.before).replace("/", r"\/")
            lines = ["start: call | TEXT", f"TEXT: /(?s:.*)/ & ~/{begun}(?s:.*)/"]
        lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(self.parameters))))
        for index, name in enumerate(self.parameters):
            begin = _quoted((form.before + name + form.between).removeprefix(tag))
            lines.append(f"call_{index}: {begin} arguments_{index} {_quoted(form.behind)}")
        return "\n".join(lines), schemas


def read_tools(tools: Any, tool_choice: Any, parallel_tool_calls: bool = True) -> Tools | None:
    """What the fields `tools` and `tool_choice` say; None where no tool may be called.

    ApiError (400) names what is wrong, and where.
    """
    listed = [] if tools is None else tools
    if not isinstance(listed, list) or len(listed) > MAX_TOOLS:
        raise _wrong("tools", f"is no list of at most {MAX_TOOLS} tools")
    parameters: dict[str, Any] = {}
    for index, tool in enumerate(listed):
        name, schema = _tool(tool, f"tools[{index}]")
        if name in parameters:
            raise _wrong(f"tools[{index}].function.name", f"{name!r} stands twice")
        parameters[name] = schema
    choice = "auto" if tool_choice is None else tool_choice
    named = _named(choice)
    if named is None and choice not in ("none", "auto", "required"):
        raise _wrong("tool_choice", "is none of 'none', 'auto', 'required', and names no function")
    if not parameters and (named is not None or choice == "required"):
        raise _wrong("tool_choice", "needs tools, and there are none")
    if not parameters or choice == "none":
        return None
    if named is not None:
        if named not in parameters:
            raise _wrong("tool_choice.function.name", f"{named!r} is none of the tools")
        return Tools(listed, {named: parameters[named]}, required=True, parallel=False)
    return Tools(listed, parameters, choice == "required", parallel_tool_calls)


def _tool(tool: Any, where: str) -> tuple[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
        raise _wrong(where, "is no tool such as {'type': 'function', 'function': {'name': ...}}")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong(
            f"{where}.function.name",
            f"{str(name)[:60]!r} is no name of 1 to 128 letters, digits, '_', '-', '.'",
        )
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, Mapping):
        raise _wrong(f"{where}.function.parameters", "is no JSON schema")
    if parameters.get("type", "object") != "object":
        raise _wrong(f"{where}.function.parameters.type", "arguments are of type object")
    return name, {**parameters, "type": "object"}


def _named(choice: Any) -> str | None:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _wrong(where: str, what: str) -> ApiError:
    return ApiError(400, f"{where}: {what}", type="invalid_request_error", param=where)
