"""`EventAnswer`: an answer as named events, for the protocols of Anthropic and of /v1/responses.

An answer in one piece is made from the same events, so it has the same content as a stream.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from gptmanager.server.chat.chat_call import PreparedChat
from gptmanager.server.errors import ApiError
from gptmanager.server.http.responses import named_event
from gptmanager.server.text.log_probs import TokenLogProb


class EventWriter(Protocol):
    """Writes the events of one answer. An event is an object with its name as `type`."""

    @property
    def answer_id(self) -> str: ...

    @property
    def keep_alive(self) -> bytes:
        """The frame that a stream repeats while it waits for its first event."""

    def begin(self) -> list[dict[str, Any]]:
        """Return the events before the first text."""

    def add(self, delta: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events for a delta of a chat.

        If the request asks for log probabilities, `delta` has `logprobs`, one for each token of its
        content.
        """

    def end(self, reason: str, stop_reason: str | int | None) -> list[dict[str, Any]]:
        """Return the last events. `reason` is a finish reason of /v1/chat/completions."""

    def failed(self, error: ApiError) -> list[dict[str, Any]]:
        """Return the last events of an answer that has failed."""

    def whole(self) -> dict[str, Any]:
        """Return the whole answer, after `end`."""


class EventAnswer:
    """Passes the only output of a chat to a writer.

    `model`: the model's name in the log. `at_end` is called with the whole answer before its last
    events are passed on. `list_tokens` converts log probabilities to the form of the protocol.
    """

    def __init__(
        self,
        chat: PreparedChat,
        writer: EventWriter,
        model: str,
        at_end: Callable[[dict[str, Any]], None] = lambda _: None,
        list_tokens: Callable[[list[TokenLogProb]], list[Any]] = list,
    ) -> None:
        self._chat = chat
        self._writer = writer
        self._model = model
        self._at_end = at_end
        self._list_tokens = list_tokens

    @property
    def keep_alive(self) -> bytes:
        return self._writer.keep_alive

    def log_fields(self) -> dict[str, Any]:
        """Return the fields of the log line that describe the answer so far."""
        head = {"answer": self._writer.answer_id, "model": self._model}
        return {**head, **self._chat.answer.log_fields()}

    async def whole(self) -> dict[str, Any]:
        """Wait for the end of the answer, and return the whole answer."""
        async for _ in self._events():
            pass
        return self._writer.whole()

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield the events of the answer, encoded for a stream. Raises ApiError if the
        answer fails.
        """
        async for event in self._events():
            yield named_event(event)

    def last_frame(self, error: ApiError) -> bytes:
        """Return the last events of a stream that has failed."""
        return b"".join(map(named_event, self._writer.failed(error)))

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        (message,), writer = self._chat.messages, self._writer
        has_begun = False
        async for _, delta in self._chat.answer.deltas():
            if not has_begun:  # not earlier: a refused request has no events
                has_begun = True
                for event in writer.begin():
                    yield event
            found = message.push(delta.text, delta.log_probs)
            if delta.finish_reason is not None:
                found += message.flush()
            for one in found:
                if "log_probs" in one:
                    listed = one.pop("log_probs")
                    shape = functools.partial(self._list_tokens, listed)
                    one["logprobs"] = await self._chat.answer.shaped(shape, len(listed))
                for event in writer.add(one):
                    yield event
            if delta.finish_reason is not None:
                reason = message.finish_reason(delta.finish_reason)
                if reason == "timeout":
                    raise ApiError(504, "the request timed out")
                last = writer.end(reason, self._chat.answer.outputs[0].stop_reason)
                self._at_end(writer.whole())
                for event in last:
                    yield event
