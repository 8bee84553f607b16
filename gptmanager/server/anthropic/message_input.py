"""Converts the messages and fields of Anthropic's API into the messages and fields of a chat."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gptmanager.errors import quoted
from gptmanager.server.chat.chat_call import Place
from gptmanager.server.chat.embedding_parts import EMBEDDINGS
from gptmanager.server.chat.messages import not_a_part, unreadable
from gptmanager.server.fields import field_error, wrong_key

# Pairs: a part of a chat field's name, and the text that replaces this part in errors.
_RENAMED = (
    ("].function.parameters", "].input_schema"),
    ("tool_choice.function", "tool_choice"),
    ("].function", "]"),
    ("stop[", "stop_sequences["),
)
# Fields with the same name and meaning in Chat Completions.
PASSED_ON = (
    *("model", "stream", "temperature", "top_p", "top_k", "max_tokens"),
    *("min_p", "seed", "chat_template_kwargs", "priority", "deadline_s", "cache_salt"),
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THOUGHTS = ("thinking", "redacted_thinking")


def messages_of(
    given: list[Any], system: Any = None
) -> tuple[list[dict[str, Any]], dict[int, Place]]:
    """Return the messages of a chat, and a mapping from a message's index to its place in the body.

    Raises ApiError (400) for a wrong message or block.
    """
    messages: list[dict[str, Any]] = []
    places: dict[int, Place] = {}
    if system is not None:
        messages.append({"role": "system", "content": _text_of(system, "system")})
        places[0] = "system"
    for index, message in enumerate(given):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise field_error(where, f"{quoted(message)} must be an object with role and content")
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise field_error(f"{where}.role", f"{quoted(role)} must be user, assistant or system")
        found: list[tuple[Place, dict[str, Any]]]
        if isinstance(content, str):
            found = [(where, {"role": role, "content": content})]
        elif not isinstance(content, list):
            raise wrong_key(where, message, "content", "a string or a list of blocks")
        elif role == "assistant":
            found = [(where, _of_assistant(content, f"{where}.content"))]
        else:
            found = _of_user(role, content, where)
        for place, one in found:
            places[len(messages)] = place
            messages.append(one)
    return messages, places


def _of_user(role: str, content: list[Any], where: str) -> list[tuple[Place, dict[str, Any]]]:
    """Return a message for each tool result, then a message with all other blocks as its parts.

    This last message is left out if all blocks are tool results.
    """
    found: list[tuple[Place, dict[str, Any]]] = []
    parts = []
    for index, block in enumerate(content):
        at = f"{where}.content[{index}]"
        if isinstance(block, Mapping) and block.get("type") == "tool_result":
            own_id, given = block.get("tool_use_id"), block.get("content") or ""
            if not isinstance(own_id, str):
                raise field_error(f"{at}.tool_use_id", f"{quoted(own_id)} must be a string")
            result = {"role": "tool", "tool_call_id": own_id, "content": given}
            if not isinstance(given, str):
                result["content"] = _parts_of(given, f"{at}.content")
            found.append((at, result))
        else:
            parts.append((index, _part(block, at)))
    if parts or not found:
        place = where, [index for index, _ in parts]
        found.append((place, {"role": role, "content": [part for _, part in parts]}))
    return found


def _of_assistant(content: list[Any], where: str) -> dict[str, Any]:
    thoughts, texts, calls = [], [], []
    for index, block in enumerate(content):
        at = f"{where}[{index}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind in _THOUGHTS:
            thoughts.append(str(block.get("thinking", "")))
        elif kind == "tool_use":
            for name in ("id", "name"):
                if not isinstance(block.get(name), str):
                    wrong = quoted(block.get(name))
                    raise field_error(f"{at}.{name}", f"{wrong} must be a string")
            try:
                arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            except RecursionError:
                raise field_error(f"{at}.input", "is nested too deeply") from None
            function = {"name": block["name"], "arguments": arguments}
            calls.append({"id": block["id"], "type": "function", "function": function})
        else:
            texts.append(_text(block, at))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def _parts_of(given: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(given, list):
        raise field_error(where, f"{quoted(given)} must be a string or a list of blocks")
    return [_part(block, f"{where}[{index}]") for index, block in enumerate(given)]


def _part(block: Any, where: str) -> dict[str, Any]:
    """Return a block of text or of embeddings as a part of a chat's message."""
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind in EMBEDDINGS:
        return {key: value for key, value in block.items() if key in (kind, "type", "dtype")}
    return {"type": "text", "text": _text(block, where)}


def _text_of(given: Any, where: str) -> str:
    """Return `given` if it is a string, or else the texts of its blocks, joined by line breaks."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise field_error(where, f"{quoted(given)} must be a string or a list of text blocks")
    return "\n".join(_text(block, f"{where}[{index}]") for index, block in enumerate(given))


def _text(block: Any, where: str) -> str:
    if not isinstance(block, Mapping):
        raise not_a_part(where, block)
    if block.get("type") != "text":
        raise unreadable(where, block.get("type"))
    if not isinstance(block.get("text"), str):
        raise wrong_key(where, block, "text", "a string")
    return str(block["text"])


def chat_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a chat, except its messages."""
    fields = {name: given[name] for name in PASSED_ON if name in given}
    if "stop_sequences" in given:
        fields["stop"] = given["stop_sequences"]
    if "tools" in given:
        fields["tools"] = [_tool(one) for one in given["tools"]]
    choice = given.get("tool_choice")
    if choice is not None:
        kind = choice.get("type")
        if kind == "tool":
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
        elif isinstance(kind, str) and kind in _CHOICES:
            fields["tool_choice"] = _CHOICES[kind]
        else:
            raise field_error("tool_choice.type", f"{quoted(kind)} must be auto, any, tool or none")
        fields["parallel_tool_calls"] = choice.get("disable_parallel_tool_use") is not True
    thinking = given.get("thinking", {}).get("type")
    if thinking in ("enabled", "disabled"):
        fields["enable_thinking"] = thinking == "enabled"
    elif thinking not in (None, "adaptive"):
        raise field_error(
            "thinking.type", f"{quoted(thinking)} must be enabled, disabled or adaptive"
        )
    output = given.get("output_config", {})
    if output.get("effort") is not None:
        fields["reasoning_effort"] = str(output["effort"])[:64]
    where = _format_field(given)
    form = given.get("output_format") if where == "output_format" else output.get("format")
    if form is not None:
        fields["response_format"] = _format(form, where)
    return fields


def renamed(given: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return pairs: a part of a chat field's name, and the text that replaces it in errors."""
    where = _format_field(given)
    return (("response_format.json_schema", where), ("response_format", where), *_RENAMED)


def _format_field(given: Mapping[str, Any]) -> str:
    """Return the field that has the output's form: the newer name, unless only the older is there.

    `output_format` is the name in Anthropic's beta, which some clients still use.
    """
    is_old = "output_format" in given and given.get("output_config", {}).get("format") is None
    return "output_format" if is_old else "output_config.format"


def _tool(tool: Any) -> Any:
    """Convert a tool to the form of chats.

    A tool that Anthropic's servers would run keeps only its type, so the chat rejects it.
    """
    if not isinstance(tool, Mapping):
        return tool
    if tool.get("type") not in (None, "custom"):
        return {"type": tool["type"]}
    keys = {"name": "name", "description": "description", "input_schema": "parameters"}
    function = {own: tool[key] for key, own in keys.items() if key in tool}
    return {"type": "function", "function": {**function, "strict": tool.get("strict", False)}}


def _format(given: Any, where: str) -> Any:
    if not isinstance(given, Mapping):
        raise field_error(where, f"{quoted(given)} must be an object with a type")
    if given.get("type") != "json_schema":
        raise wrong_key(where, given, "type", "'json_schema'")
    own = {"name": "answer", "schema": given.get("schema")}
    return {"type": "json_schema", "json_schema": own}
