"""Converts the messages that a client sends into the form that chat templates expect.

Unknown keys of a message are ignored, because clients send back answers of other servers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from gptmanager.callbacks.answers.parsing.python_values import STRICT_JSON
from gptmanager.callbacks.answers.tool_format import ToolFormat
from gptmanager.errors import quoted
from gptmanager.server.errors import ApiError
from gptmanager.server.fields import field_error, wrong_key

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

_MAY_BE_EMPTY = ("assistant", "tool", "function")  # roles with an optional content
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_THOUGHTS = ("thinking", "redacted_thinking", "reasoning")  # parts that are not shown to the model
_READABLE = "the model reads text, and embeddings of type image_embeds or prompt_embeds"
_MOST_OBJECTS = 10_000  # arguments with more [ and { than this are not parsed
_FUNCTION_CALL = "function_call"  # id given to a deprecated call, which has no id of its own


_TEXT = {"type": "string"}
_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": list(_TEXT_PARTS[:3])}, "text": _TEXT},
}
# For the OpenAPI document. The content of an assistant's message may be absent.
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


def read_messages(messages: Any) -> list[dict[str, Any]]:
    """Return the messages with their contents as strings, and the arguments of calls as objects.

    Text parts are joined by line breaks. Arguments that are not a JSON object stay strings, for
    instance if a call was cut off. The deprecated `function_call` and role "function" become
    `tool_calls` and "tool". Raises ApiError (400) with the wrong field and the reason.
    """
    if not isinstance(messages, list) or not messages:
        raise field_error("messages", f"{quoted(messages)} must be a list of one or more messages")
    return [_read(one, f"messages[{index}]") for index, one in enumerate(messages)]


def count_items(messages: Any, most: int) -> int:
    """Return the number of messages, or the number of their parts and calls if that is larger.

    Each message, part and call, except a thought, becomes at least one token, and at most `most`
    tokens fit. If there are more than `most` messages, their parts and calls are not counted.
    """
    if not isinstance(messages, list):
        return 0
    lists = [
        value
        for message in (messages if len(messages) <= most else ())
        if isinstance(message, dict)
        for key in ("content", "tool_calls")
        if isinstance(value := message.get(key), list)
    ]
    return max(len(messages), sum(map(len, lists)))


def one_call_each(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Split each message with several calls into one message per call.

    This is for templates that reject several calls. Each result is moved behind its call.
    """
    found: list[dict[str, Any]] = []
    moved: dict[Any, list[dict[str, Any]]] = {}  # results by the ids of their calls
    rest = list(messages)[::-1]
    while rest:
        message = rest.pop()
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            found.append(message)
            continue
        while rest and rest[-1]["role"] == "tool":
            moved.setdefault(rest[-1].get("tool_call_id"), []).append(rest.pop())
        for call in calls:
            found.append({**message, "tool_calls": [call]})
            # Only the first of these messages keeps the content.
            message = {"role": message["role"], "content": ""}
            found += moved.pop(call.get("id"), ())
        found += [result for results in moved.values() for result in results]
        moved.clear()
    return found


def arguments_as_objects(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Return the messages with objects as arguments, for templates that accept nothing else.

    Arguments that are a string become `{"arguments": string}`. Returns None if no arguments are a
    string.
    """

    def replaced(call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        if isinstance(arguments, str):
            arguments = {"arguments": arguments}
        return {**call, "function": {**call["function"], "arguments": arguments}}

    found = [
        one | {"tool_calls": [*map(replaced, one["tool_calls"])]} if "tool_calls" in one else one
        for one in messages
    ]
    return None if found == list(messages) else found


def with_calls_as_text(
    messages: Sequence[dict[str, Any]], form: ToolFormat
) -> list[dict[str, Any]]:
    """Add calls to the content as the model writes them, for templates that ignore `tool_calls`."""
    found = []
    for one in arguments_as_objects(messages) or messages:
        functions = [call["function"] for call in one.get("tool_calls", ())]
        text = form.text([(it["name"], it["arguments"]) for it in functions])
        if functions and text is not None:
            content = f"{one['content']}{text}"
            one = {key: it for key, it in one.items() if key != "tool_calls"} | {"content": content}
        found.append(one)
    return found


def _read(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise field_error(where, f"{quoted(message)} must be an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise wrong_key(where, message, "role", f"one of {', '.join(ROLES)}")
    read: dict[str, Any] = {"role": role}
    calls = _calls_of(message, where)
    if calls:
        if role != "assistant":
            raise field_error(
                f"{where}.tool_calls", f"a message of role {role} must not have tool_calls"
            )
        read["tool_calls"] = calls
    read["content"] = _content(message, role, f"{where}.content")
    for key in ("name", "tool_call_id"):
        value = message.get(key)
        if value is not None:
            if not isinstance(value, str):
                raise field_error(f"{where}.{key}", f"{quoted(value)} must be a string")
            read[key] = value
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(thoughts, str):  # some clients send an object, which no template supports
        read["reasoning_content"] = thoughts
    if role == "function":
        read.update(role="tool", tool_call_id=_FUNCTION_CALL)
    return read


def _content(message: Mapping[str, Any], role: str, where: str) -> str:
    content = message.get("content")
    if content is None and role == "assistant":
        content = message.get("refusal")  # a text that replaces the content
    if isinstance(content, str):
        return content
    if content is None:
        if role in _MAY_BE_EMPTY:
            return ""
        raise field_error(where, "is missing; it must be a string or a list of parts of type text")
    if not isinstance(content, list):
        raise field_error(where, f"{quoted(content)} must be a string or a list of parts")
    parts = (_part(part, role, f"{where}[{index}]") for index, part in enumerate(content))
    return "\n".join(part for part in parts if part is not None)


def _part(part: Any, role: str, where: str) -> str | None:
    """Return the text of a part; None for a thought, which the model does not see."""
    if not isinstance(part, Mapping):
        raise not_a_part(where, part)
    kind = part.get("type")
    if role == "assistant" and kind in _THOUGHTS:
        return None
    if kind not in _TEXT_PARTS:
        raise unreadable(where, kind)
    key = "refusal" if kind == "refusal" else "text"
    text = part.get(key)
    if not isinstance(text, str):
        raise wrong_key(where, part, key, "a string")
    return text


def not_a_part(where: str, value: Any) -> ApiError:
    """Return the error (400) for a value in place of a part of a message."""
    return field_error(
        where, f"{quoted(value)} must be an object such as {{'type': 'text', 'text': ...}}"
    )


def unreadable(where: str, kind: Any) -> ApiError:
    """Return the error (400) for a part of a message with a type that the model cannot read."""
    problem = "is missing" if kind is None else f"{quoted(kind)} is not supported"
    return field_error(f"{where}.type", f"{problem}: {_READABLE}")


def _calls_of(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    calls, legacy = message.get("tool_calls"), message.get("function_call")
    if calls:
        where = f"{where}.tool_calls"
        if not isinstance(calls, list):
            raise field_error(where, f"{quoted(calls)} must be a list of calls")
        return [_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]
    if legacy:
        call = {"id": _FUNCTION_CALL, "function": legacy}
        return [_call(call, f"{where}.function_call", legacy=True)]
    return []


def _call(call: Any, where: str, *, legacy: bool = False) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    inner = where if legacy else f"{where}.function"
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise field_error(inner, f"{quoted(function)} must be an object with name and arguments")
    arguments = _arguments(function.get("arguments"))
    if not isinstance(arguments, Mapping | str):
        raise field_error(
            f"{inner}.arguments", f"{quoted(arguments)} must be an object, or a string with one"
        )
    read: dict[str, Any] = {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
    if isinstance(call.get("id"), str):
        read["id"] = call["id"]
    return read


def _arguments(given: Any) -> Any:
    """Parse arguments that are a JSON string with an object. None, "" and "null" give {}.

    Anything else, and a string that would take long to parse, is returned as it is.
    """
    if given is None:
        return {}
    if not isinstance(given, str):
        return given
    if given.count("[") + given.count("{") > _MOST_OBJECTS:  # parsing would take long
        return given
    try:
        found = STRICT_JSON.decode(given or "{}")
        # Raises for numbers and depths that cannot be sent to the template's process.
        orjson.dumps([[[[[[[[found]]]]]]]])
    except (ValueError, TypeError, RecursionError):
        return given
    if found is None:
        return {}
    return found if isinstance(found, dict) else given
