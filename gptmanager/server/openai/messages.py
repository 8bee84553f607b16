"""Messages of a chat, as a client sends them and as chat templates want them.

Decides what a message may hold. Knows nothing of templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gptmanager.memory.checkpoint_files import shown
from gptmanager.server.errors import ApiError

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

# what answers hold that a client sends back, and this server has no use for; null or empty
_UNUSED = ("refusal", "annotations", "audio", "function_call")
_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", *_UNUSED)

_TEXT = {"type": "string"}
_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": _TEXT},
}
# what the OpenAPI document tells of them; beside calls an assistant's content may be absent
MESSAGES_SCHEMA: Mapping[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": list(ROLES)},
            "content": {"anyOf": [_TEXT, {"type": "array", "items": _PART}, {"type": "null"}]},
            "name": {"type": ["string", "null"]},
            "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
            "tool_call_id": {"type": ["string", "null"]},
        },
    },
}


def read_messages(messages: Any, *, lenient: bool = False) -> list[dict[str, Any]]:
    """The messages with their contents as texts, and the arguments of calls as objects.

    Parts of type "text" are joined by line breaks. ApiError (400) names what is wrong, and where.
    `lenient`: unknown keys of a message are left out.
    """
    if not isinstance(messages, list) or not messages:
        raise _wrong("messages", f"{shown(messages)} is no list of one or more messages")
    return [_read(one, f"messages[{index}]", lenient) for index, one in enumerate(messages)]


def _read(message: Any, where: str, lenient: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _wrong(where, f"{shown(message)} is no object with role and content")
    given = {key: value for key, value in message.items() if value is not None}
    role = given.get("role")
    if role not in ROLES:
        raise _wrong(f"{where}.role", f"{shown(role)} is none of {', '.join(ROLES)}")
    for key, value in given.items():
        if key not in _KEYS and not lenient:
            raise _wrong(f"{where}.{key}", f"is unknown: a message has {', '.join(_KEYS[:6])}")
        if key in _UNUSED and value:
            raise _wrong(f"{where}.{key}", f"{shown(value)} is not supported")
    read: dict[str, Any] = {"role": role}
    calls = given.get("tool_calls")
    if calls:
        if role != "assistant":
            raise _wrong(f"{where}.tool_calls", f"stands in a message of role {role}")
        read["tool_calls"] = _calls(calls, f"{where}.tool_calls")
    read["content"] = _content(given, f"{where}.content", bool(calls))
    for key in ("name", "tool_call_id", "reasoning_content"):
        if key in given:
            if not isinstance(given[key], str):
                raise _wrong(f"{where}.{key}", f"{shown(given[key])} is no text")
            read[key] = given[key]
    return read


def _content(message: Mapping[str, Any], where: str, has_calls: bool) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        if has_calls:
            return ""
        raise _wrong(where, "is missing: a text, or a list of parts of type text, is needed")
    if not isinstance(content, list):
        raise _wrong(where, f"{shown(content)} is neither a text nor a list of parts")
    return "\n".join(_part(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, Mapping):
        raise _wrong(where, f"{shown(part)} is no part such as {{'type': 'text', 'text': ...}}")
    kind = part.get("type")
    if kind != "text":
        raise _wrong(f"{where}.type", f"{shown(kind)} is not supported: the model reads text only")
    if not isinstance(part.get("text"), str):
        raise _wrong(f"{where}.text", f"{shown(part.get('text'))} is no text")
    return str(part["text"])


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise _wrong(where, f"{shown(calls)} is no list of calls")
    return [_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _wrong(f"{where}.function", f"{shown(function)} is no object with name, arguments")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise _wrong(f"{where}.function.arguments", f"is no JSON: {error}") from None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise _wrong(f"{where}.function.arguments", f"{shown(arguments)} is no object")
    read: dict[str, Any] = {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
    if isinstance(call.get("id"), str):
        read["id"] = call["id"]
    return read


def _wrong(where: str, what: str) -> ApiError:
    return ApiError(400, f"{where}: {what}", type="invalid_request_error", param=where)
