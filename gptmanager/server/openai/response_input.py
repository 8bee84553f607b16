"""Convert the items and fields of /v1/responses into the messages and fields of a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gptmanager.errors import quoted
from gptmanager.server.fields import field_error, wrong_key
from gptmanager.server.http.warning_header import Warnings

# A field of Chat Completions, and the text that replaces the field in errors.
RENAMED = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("tool_choice.allowed_tools.", "tool_choice."),
    ("tool_choice.function", "tool_choice"),
    ("].function", "]"),
    ("max_completion_tokens", "max_output_tokens"),
)
# Fields with the same name and meaning in /v1/responses and in Chat Completions. Some of them are
# not in OpenAI's API.
SAME = (
    *("model", "stream", "temperature", "top_p", "parallel_tool_calls"),
    *("top_k", "min_p", "seed", "stop", "stop_token_ids", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "chat_template_kwargs", "enable_thinking", "priority", "deadline_s"),
    *("cache_salt", "min_tokens", "ignore_eos"),
)
_ROLES = ("system", "developer", "user", "assistant")
_EXTRA_TOOLS = ("web_search", "image_generation", "namespace")
_KINDS = ("message", "function_call", "function_call_output", "reasoning")
_ALLOWED = ", ".join((*_KINDS, "item_reference"))  # an earlier step replaces each item_reference


def items_of(given: Any) -> list[Any]:
    """Return the field `input` as a list of items; a text becomes one message of the user."""
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def listed(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an input item in full, as OpenAI lists it: a text of a message becomes a part."""
    if "role" not in item:
        return dict(item)
    content = item.get("content")
    if isinstance(content, str):
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        content = [{"type": kind, "text": content}]
    return {**item, "type": "message", "content": content}


def messages_of(
    items: Sequence[Any], earlier: Sequence[Any] = (), instructions: str | None = None
) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Return the messages of a chat, and for each message's index its place in the request's body.

    `earlier` are the items of the earlier response that the new response continues. Reasoning, a
    text and calls of the assistant that follow each other become one message. Raise ApiError (400)
    for a wrong item.
    """
    messages: list[dict[str, Any]] = []
    places: dict[int, str] = {}
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
        places[0] = "instructions"
    for index, item in enumerate((*earlier, *items), -len(earlier)):
        where = f"input[{index}]" if index >= 0 else "previous_response_id"
        message = _message(item, where)
        last = messages[-1] if messages else {}
        if last.get("role") == message["role"] == "assistant" and _continues(last, message):
            calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
            last.update(message, **({"tool_calls": calls} if calls else {}))
            if "content" in message:  # only a content can be wrong
                places[len(messages) - 1] = where
        else:
            places[len(messages)] = where
            messages.append(message)
    return messages, places


def outputs_renamed(
    messages: Sequence[Mapping[str, Any]], places: Mapping[int, str]
) -> list[tuple[str, str]]:
    """Return pairs for errors: the content of a tool's message, and the field that it was."""
    of_tools = [places[index] for index, one in enumerate(messages) if one["role"] == "tool"]
    return [(f"{place}.content", f"{place}.output") for place in of_tools]


def _continues(last: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    """Return whether `message` belongs to `last`. The order is: reasoning, a text, calls."""
    if "tool_calls" in message:
        return True
    return "content" in message and "content" not in last and "tool_calls" not in last


def _message(item: Any, where: str) -> dict[str, Any]:
    """Convert an item to a message."""
    if not isinstance(item, Mapping):
        raise field_error(where, f"{quoted(item)} must be an object")
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind not in _KINDS:
        raise wrong_key(where, item, "type", f"one of {_ALLOWED}")
    if kind == "message":
        if item.get("role") not in _ROLES:
            raise wrong_key(where, item, "role", f"one of {', '.join(_ROLES)}")
        return {"role": item["role"], "content": item.get("content")}
    if kind == "reasoning":
        return {"role": "assistant", "reasoning_content": _reasoning_text(item)}
    name, has_id = item.get("name"), item.get("call_id") is not None
    if kind == "function_call_output" and isinstance(name, str) and not has_id:
        # A tool reports what the model has not called it for, such as a new goal.
        return {"role": "tool", "name": name, "content": item.get("output")}
    names = ("name", "arguments", "call_id") if kind == "function_call" else ("call_id",)
    for name in names:
        if not isinstance(item.get(name), str):
            raise field_error(f"{where}.{name}", f"{quoted(item.get(name))} must be a string")
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item["call_id"], "content": item.get("output")}
    function = {"name": item["name"], "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call]}


def _reasoning_text(item: Mapping[str, Any]) -> str:
    """Return the text of a reasoning item, or of the item's summary if the item has no text."""
    for key in ("content", "summary"):
        parts = item.get(key)
        parts = parts if isinstance(parts, list) else []
        texts = [one.get("text") for one in parts if isinstance(one, Mapping)]
        if texts:
            return "\n".join(one for one in texts if isinstance(one, str))
    return ""


def chat_fields(given: Mapping[str, Any], warnings: Warnings) -> dict[str, Any]:
    """Return the fields of a chat except `messages`. Add fields without effect to `warnings`."""
    fields = {name: given[name] for name in SAME if name in given}
    if "max_output_tokens" in given:
        fields["max_completion_tokens"] = given["max_output_tokens"]
    tools, own = given.get("tools", ()), own_tools(given)
    left_out = [f"tools[{i}]" for i in sorted({*range(len(tools))} - {*own})]
    warnings.add_ignored(left_out, "tools that the model does not see, as no server runs them here")
    if own:
        fields["tools"] = [_tool(tools[i]) for i in own]
    if "tool_choice" in given:
        fields["tool_choice"] = _choice(given["tool_choice"])
    text, reasoning = given.get("text", {}), given.get("reasoning", {})
    if "format" in text:
        fields["response_format"] = _format(text["format"])
    if "effort" in reasoning:
        fields["reasoning_effort"] = reasoning["effort"]
    ignored = {
        "text.verbosity": text.get("verbosity") not in (None, "medium"),
        "truncation": given.get("truncation") == "auto",
    }
    warnings.add_ignored(
        [name for name, is_given in ignored.items() if is_given], "fields that have no effect here"
    )
    return fields


def own_tools(given: Mapping[str, Any]) -> list[int]:
    """Return the indices of the tools that are not left out."""
    return [i for i, one in enumerate(given.get("tools", ())) if not _is_extra(one)]


def _is_extra(tool: Any) -> bool:
    """Return whether a tool may be left out: clients offer it whether the server has it or not.

    Other tools of OpenAI's servers, such as `file_search`, name data that the answer depends on.
    """
    return isinstance(tool, Mapping) and str(tool.get("type")).startswith(_EXTRA_TOOLS)


def _tool(tool: Any) -> Any:
    """Convert a function to the form of chats. Return other tools unchanged; chats reject them."""
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or "function" in tool:
        return tool
    function = {key: value for key, value in tool.items() if key != "type"}
    return {"type": "function", "function": function}


def _choice(choice: Any) -> Any:
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        listed = [_tool(one) for one in tools] if isinstance(tools, list) else tools
        own = {"mode": choice.get("mode", "auto"), "tools": listed}
        return {"type": "allowed_tools", "allowed_tools": own}
    return choice


def _format(given: Any) -> Any:
    if not isinstance(given, Mapping) or given.get("type") != "json_schema":
        return given
    own = {key: value for key, value in given.items() if key != "type"}
    return {"type": "json_schema", "json_schema": own}
