"""Reads the tools that a model may call from a request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gptmanager.callbacks.answers.tools import Tools
from gptmanager.errors import quoted
from gptmanager.server.fields import field_error, wrong_key

MAX_TOOLS = 128

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


def read_tools(tools: Any, tool_choice: Any, parallel_tool_calls: bool = True) -> Tools | None:
    """Read the fields `tools` and `tool_choice`; return None if no tool may be called.

    Raises ApiError (400) with the wrong field and the reason.
    """
    listed = [] if tools is None else tools
    if not isinstance(listed, list) or len(listed) > MAX_TOOLS:
        raise field_error("tools", f"{quoted(tools)} must be a list of at most {MAX_TOOLS} tools")
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
    if choice == "any":  # the name in Mistral's API
        choice = "required"
    if named is None and choice not in ("none", "auto", "required"):
        raise field_error(
            "tool_choice",
            f"{quoted(choice)} must be 'none', 'auto', 'required', or name a function",
        )
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
    if not isinstance(tool, Mapping):
        raise field_error(where, f"{quoted(tool)} must be an object")
    kind, function = tool.get("type", "function"), tool.get("function")
    if kind != "function":
        raise field_error(f"{where}.type", f"{quoted(kind)} is not supported: pass functions only")
    if not isinstance(function, Mapping):
        raise field_error(f"{where}.function", "must be an object with the function's name")
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
        raise wrong_key(f"{where}.function", function, "parameters", "a JSON schema object")
    if parameters.get("type", "object") != "object":
        raise wrong_key(f"{where}.function.parameters", parameters, "type", "'object'")
    return name, {**parameters, "type": "object"}


def _allowed(choice: Any) -> tuple[Any, list[str] | None]:
    """Return the mode and the tool names of an "allowed_tools" choice, else `choice` and None.

    An "allowed_tools" choice allows only some of the tools of the request. It has this form:
    `{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}`
    """
    own = choice.get("allowed_tools") if isinstance(choice, Mapping) else None
    if not isinstance(own, Mapping):
        return choice, None
    listed = own.get("tools")
    if not isinstance(listed, list) or not 0 < len(listed) <= MAX_TOOLS:
        raise wrong_key(
            "tool_choice.allowed_tools", own, "tools", f"a list of 1 to {MAX_TOOLS} tools"
        )
    names = [_named(tool) for tool in listed]
    if None in names:
        index = names.index(None)
        raise field_error(
            f"tool_choice.allowed_tools.tools[{index}]",
            f"{quoted(listed[index])} must name a function",
        )
    mode = own.get("mode", "auto")
    if mode not in ("auto", "required", "none"):
        raise wrong_key("tool_choice.allowed_tools", own, "mode", "'auto' or 'required'")
    return mode, [name for name in names if name is not None]


def _named(choice: Any) -> str | None:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None
