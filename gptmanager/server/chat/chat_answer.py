"""The text of one answer as a chat message, and as the deltas of a stream.

Separates content from tool calls. Independent of tokens and protocols.
"""

from __future__ import annotations

import uuid
from typing import Any

from gptmanager.server.chat.tool_parsing import (
    Arguments,
    CallBegins,
    Content,
    Found,
    ToolCallParser,
)
from gptmanager.server.text.tools import ToolFormat, Tools


class ChatAnswer:
    """Takes text in pieces; the deltas, joined, are the message.

    `tools` None: all text is content. If the request allows one call only, later calls are dropped.
    `is_deprecated`: write the call as the deprecated `function_call`.
    """

    def __init__(
        self,
        tools: Tools | None = None,
        form: ToolFormat | None = None,
        *,
        is_deprecated: bool = False,
    ) -> None:
        self._parser = (
            None
            if tools is None or form is None
            else ToolCallParser(tools.parameters, tagged=form.tagged)
        )
        self._is_deprecated = is_deprecated
        self._is_alone = tools is not None and not tools.parallel
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []

    def push(self, text: str) -> list[dict[str, Any]]:
        """Take new text; return the deltas that the client gets now."""
        if self._parser is not None:
            return self._deltas(self._parser.push(text))
        return self._deltas([Content(text)] if text else [])

    def flush(self) -> list[dict[str, Any]]:
        """Return the deltas that were held back at the end."""
        return [] if self._parser is None else self._deltas(self._parser.flush())

    def message(self) -> dict[str, Any]:
        """Return the whole message; call `flush` first."""
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._calls:
            message["content"] = content or None
            if self._is_deprecated:
                message["function_call"] = self._calls[0]["function"]
            else:
                message["tool_calls"] = self._calls
        return message

    def finish_reason(self, reason: str) -> str:
        """Return the finish reason for the client; `reason` is that of the text.

        An answer with calls gets the reason `tool_calls`, upon which a client runs the calls,
        unless the last call was cut off.
        """
        is_call = bool(self._calls) and reason == "stop" and not self._is_cut
        called = "function_call" if self._is_deprecated else "tool_calls"
        return called if is_call else reason

    @property
    def _is_cut(self) -> bool:
        """Whether the arguments of the last call sent to the client are incomplete."""
        parser = self._parser
        return (
            parser is not None and parser.is_in_arguments and parser.num_calls == len(self._calls)
        )

    def _deltas(self, found: list[Found]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for one in found:
            if isinstance(one, Content):
                self._content.append(one.text)
                deltas.append({"content": one.text})
            elif not (self._is_alone and one.index > 0):
                call = self._call(one)
                is_old = self._is_deprecated
                deltas.append(
                    {"function_call": call["function"]} if is_old else {"tool_calls": [call]}
                )
        return deltas

    def _call(self, found: CallBegins | Arguments) -> dict[str, Any]:
        if isinstance(found, Arguments):
            self._calls[found.index]["function"]["arguments"] += found.text
            return {"index": found.index, "function": {"arguments": found.text}}
        function = {"name": found.name, "arguments": ""}
        call = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
        self._calls.append(call)
        return {"index": found.index, **call, "function": dict(function)}
