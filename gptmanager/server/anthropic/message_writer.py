"""`MessageWriter`: writes the answer of /v1/messages as blocks, and as the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from gptmanager.server.errors import ApiError, anthropic_error
from gptmanager.server.http.responses import named_event

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_CONTEXT_IS_FULL = "model_context_window_exceeded"
_EMPTY: Mapping[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


class MessageWriter:
    """Writes content blocks in the order in which the model generates them.

    `usage` returns the token counts so far, in the form of `usage` in Chat Completions.
    `is_clamped`: the end of the context limits the answer, and not the request's `max_tokens`.
    """

    keep_alive = named_event({"type": "ping"})

    def __init__(
        self,
        answer_id: str,
        model: str,
        usage: Callable[[], Mapping[str, Any]],
        *,
        is_clamped: bool = False,
    ) -> None:
        self.answer_id = answer_id
        self._reasons = _REASONS | ({"length": _CONTEXT_IS_FULL} if is_clamped else {})
        self._usage = usage
        self._content: list[dict[str, Any]] = []
        self._is_open = False  # whether the last block has not ended
        self._arguments = ""  # arguments of the last call
        self._message: dict[str, Any] = {
            "id": answer_id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": self._content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def begin(self) -> list[dict[str, Any]]:
        message = {**self._message, "content": [], "usage": self._tokens()}
        return [{"type": "message_start", "message": message}]

    def add(self, delta: dict[str, Any]) -> list[dict[str, Any]]:
        if "tool_calls" in delta:
            (call,) = delta["tool_calls"]
            return self._add_call(call)
        kind, key = ("thinking", "reasoning") if "reasoning" in delta else ("text", "content")
        events, text = [], delta[key]
        if not self._is_open or self._content[-1]["type"] != kind:
            events = [*self._close(), self._open(dict(_EMPTY[kind]))]
        self._content[-1][kind] += text
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def end(self, reason: str, stop_reason: str | int | None) -> list[dict[str, Any]]:
        is_text = reason == "stop" and isinstance(stop_reason, str)
        found = {
            "stop_reason": "stop_sequence" if is_text else self._reasons[reason],
            "stop_sequence": stop_reason if is_text else None,
        }
        # clients read the first block, also if the model writes nothing
        events = [] if self._content else [self._open(dict(_EMPTY["text"]))]
        events += self._close()
        usage = self._tokens()
        self._message |= {**found, "usage": usage}
        return [
            *events,
            {"type": "message_delta", "delta": found, "usage": usage},
            {"type": "message_stop"},
        ]

    def failed(self, error: ApiError) -> list[dict[str, Any]]:
        return [anthropic_error(error)]

    def whole(self) -> dict[str, Any]:
        return self._message

    def _add_call(self, call: Mapping[str, Any]) -> list[dict[str, Any]]:
        events, function = [], call["function"]
        if "id" in call:
            block = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
            events, self._arguments = [*self._close(), self._open(block)], ""
        text = function["arguments"]
        if text:
            self._arguments += text
            events.append(self._delta({"type": "input_json_delta", "partial_json": text}))
        return events

    def _open(self, block: dict[str, Any]) -> dict[str, Any]:
        self._content.append(block)
        self._is_open = True
        return self._event("content_block_start", content_block=dict(block))

    def _close(self) -> list[dict[str, Any]]:
        """End the last block."""
        if not self._is_open:
            return []
        self._is_open, block = False, self._content[-1]
        if block["type"] == "tool_use":
            block["input"] = _object(self._arguments)
        signed = block["type"] == "thinking"
        delta = [self._delta({"type": "signature_delta", "signature": ""})] if signed else []
        return [*delta, self._event("content_block_stop")]

    def _delta(self, delta: Mapping[str, Any]) -> dict[str, Any]:
        return self._event("content_block_delta", delta=delta)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "index": len(self._content) - 1, **fields}

    def _tokens(self) -> dict[str, int]:
        usage = self._usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }


def _object(text: str) -> Any:
    """Return the arguments of a call as JSON, or {} if they are not a complete object.

    The JSON is that of the model: orjson would refuse integers of more than 64 bits.
    """
    try:
        found = json.loads(text, parse_int=float, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return {}
    return orjson.Fragment(text) if isinstance(found, dict) else {}


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
