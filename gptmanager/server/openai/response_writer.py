"""`ResponseWriter`: writes the answer of /v1/responses as items, and as the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from gptmanager.server.errors import ApiError
from gptmanager.server.http.responses import COMMENT

_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
# type of an item -> type of its only part
_TEXTS = {"reasoning": "reasoning_text", "message": "output_text"}


def response_of_item(item_id: str) -> str:
    """Return the id of the response that an output item with this id would belong to."""
    return f"resp_{item_id.partition('_')[2].rpartition('_')[0]}"


class ResponseWriter:
    """Writes items in the order in which the model generates them.

    `head`: the fields of the response that depend only on the request. `usage` returns the usage so
    far, in the form of a chat completion.
    """

    keep_alive = COMMENT

    def __init__(
        self, answer_id: str, head: Mapping[str, Any], usage: Callable[[], Mapping[str, Any]]
    ) -> None:
        self.answer_id = answer_id
        self._usage = usage
        self._output: list[dict[str, Any]] = []
        self._is_open = False  # whether the last item is still generated
        self._num_events = 0
        self._response: dict[str, Any] = {
            "id": answer_id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": self._output,
            "usage": None,
            **head,
        }

    def begin(self) -> list[dict[str, Any]]:
        return [self._of_response("created"), self._of_response("in_progress")]

    def add(self, delta: dict[str, Any]) -> list[dict[str, Any]]:
        if "tool_calls" in delta:
            (call,) = delta["tool_calls"]
            return self._add_call(call)
        kind = "reasoning" if "reasoning" in delta else "message"
        events = []
        if not self._is_open or self._output[-1]["type"] != kind:
            events = self._close() + self._open_text(kind)
        part, text = self._output[-1]["content"][0], delta.get("reasoning", delta.get("content"))
        part["text"] += text
        fields: dict[str, Any] = {"delta": text}
        if kind == "message":
            fields["logprobs"] = delta.get("logprobs", [])
            part["logprobs"] += fields["logprobs"]
        return [*events, self._of_part(f"{_TEXTS[kind]}.delta", fields)]

    def end(self, reason: str, stop_reason: str | int | None) -> list[dict[str, Any]]:
        is_cut = reason == "length"
        status = "incomplete" if is_cut else "completed"
        # clients read the first item, also if the model has ended without a text
        events = [] if self._output else self._open_text("message")
        events += self._close(status)
        if is_cut:
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        return [*events, self._last(status)]

    def failed(self, error: ApiError) -> list[dict[str, Any]]:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        events = [] if self._num_events else self.begin()  # clients expect these first
        self._response["error"] = {"code": code, "message": error.message}
        return [*events, *self._close("incomplete"), self._last("failed")]

    def whole(self) -> dict[str, Any]:
        return self._response

    # Items ---------------------------------------------------------------------------------------

    def _open(self, item: dict[str, Any]) -> dict[str, Any]:
        prefix = _PREFIXES[item["type"]]
        own_id = f"{prefix}_{self.answer_id.removeprefix('resp_')}_{len(self._output)}"
        self._output.append({"id": own_id, **item, "status": "in_progress"})
        self._is_open = True
        return self._event("output_item.added", self._place(item=dict(self._output[-1])))

    def _open_text(self, kind: str) -> list[dict[str, Any]]:
        item: dict[str, Any] = {"type": kind, "content": []}
        if kind == "reasoning":
            item["summary"] = []
        else:
            item["role"] = "assistant"
        added = self._open(item)
        part: dict[str, Any] = {"type": _TEXTS[kind], "text": ""}
        if kind == "message":
            part |= {"annotations": [], "logprobs": []}
        self._output[-1]["content"] = [part]
        return [added, self._of_part("content_part.added", {"part": deepcopy(part)})]

    def _add_call(self, call: Mapping[str, Any]) -> list[dict[str, Any]]:
        events, function = [], call["function"]
        if "id" in call:
            item = {"type": "function_call", "call_id": call["id"], "name": function["name"]}
            events = [*self._close(), self._open({**item, "arguments": ""})]
        text = function["arguments"]
        if text:
            self._output[-1]["arguments"] += text
            events.append(self._of_item("function_call_arguments.delta", delta=text))
        return events

    def _close(self, status: str = "completed") -> list[dict[str, Any]]:
        """End the last item."""
        if not self._is_open:
            return []
        self._is_open, item = False, self._output[-1]
        item["status"] = status
        if item["type"] == "function_call":
            own = {"arguments": item["arguments"], "name": item["name"]}
            events = [self._of_item("function_call_arguments.done", **own)]
        else:
            (part,), kind = item["content"], _TEXTS[item["type"]]
            fields = {name: part[name] for name in ("text", "logprobs") if name in part}
            done = self._of_part(f"{kind}.done", fields)
            events = [done, self._of_part("content_part.done", {"part": part})]
        return [*events, self._event("output_item.done", self._place(item=item))]

    # Events --------------------------------------------------------------------------------------

    def _last(self, status: str) -> dict[str, Any]:
        usage = self._usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        thoughts = usage["completion_tokens_details"]["reasoning_tokens"]
        self._response |= {"status": status, "completed_at": int(time.time())}
        self._response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": thoughts},
            "total_tokens": usage["total_tokens"],
        }
        return self._of_response(status)

    def _of_response(self, name: str) -> dict[str, Any]:
        return self._event(name, {"response": {**self._response, "output": [*self._output]}})

    def _of_part(self, name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        return self._of_item(name, content_index=0, **fields)

    def _of_item(self, name: str, /, **fields: Any) -> dict[str, Any]:
        return self._event(name, {"item_id": self._output[-1]["id"], **self._place(**fields)})

    def _place(self, **fields: Any) -> dict[str, Any]:
        return {"output_index": len(self._output) - 1, **fields}

    def _event(self, name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        number, self._num_events = self._num_events, self._num_events + 1
        return {"type": f"response.{name}", "sequence_number": number, **fields}
