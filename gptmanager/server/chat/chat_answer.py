"""`ChatAnswer`: converts the text of one answer to a chat message, or to the deltas of a stream.

A parser separates thoughts, content and tool calls. The deltas have the form of OpenAI's chat
completions; /v1/responses and Anthropic's API convert them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

from gptmanager.callbacks.answers.parsing.answer_parts import (
    AnswerParser,
    Arguments,
    CallBegins,
    Content,
    Found,
    Thought,
)
from gptmanager.callbacks.answers.tool_format import random_id
from gptmanager.server.chat.content_tokens import ContentTokens
from gptmanager.server.text.log_probs import TokenLogProb


class ChatAnswer:
    """Receives the text of an answer in pieces, and returns deltas, which add up to the message.

    Without a `parser`, all text is content. With `is_alone`, only the first call is kept. With
    `is_deprecated`, that call is written as the deprecated `function_call`. `new_id` returns the id
    of a call to which the model gave no id of its own.
    """

    def __init__(
        self,
        parser: AnswerParser | None = None,
        *,
        is_alone: bool = False,
        is_deprecated: bool = False,
        new_id: Callable[[], str] = random_id,
    ) -> None:
        self._parser = parser
        self._is_deprecated = is_deprecated
        self._is_alone = is_alone
        self._new_id = new_id
        self._thoughts: list[str] = []
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._num_pushed = 0  # characters
        self._tokens = ContentTokens()
        # `_num_tokens` tokens begin in the first `_num_ended` thoughts, which have ended.
        self._num_ended = self._num_tokens = 0

    def push(self, text: str, log_probs: Sequence[TokenLogProb] = ()) -> list[dict[str, Any]]:
        """Add new text to the answer; return the deltas that can be sent now.

        `log_probs`: the log probabilities of the tokens that begin in the new text. If they are
        given, a delta of content has its tokens' log probabilities under the key `log_probs`.
        """
        self._tokens.push(log_probs)
        begin, self._num_pushed = self._num_pushed, self._num_pushed + len(text)
        if self._parser is not None:
            return self._deltas(self._parser.push(text))
        return self._deltas([Content(text, begin, self._num_pushed)] if text else [])

    def flush(self) -> list[dict[str, Any]]:
        """End the answer: return the deltas of the text that was held back until now."""
        return [] if self._parser is None else self._deltas(self._parser.flush())

    def message(self) -> dict[str, Any]:
        """Return the whole message; call `flush` first."""
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._thoughts:
            message.update(_thought_fields("".join(self._thoughts)))
        if self._calls or self._thoughts:
            message["content"] = content or None
        if self._calls:
            if self._is_deprecated:
                message["function_call"] = self._calls[0]["function"]
            else:
                message["tool_calls"] = self._calls
        return message

    def finish_reason(self, reason: str) -> str:
        """Return the finish reason for the client; `reason` is the reason why the text ended.

        If `reason` is "stop", and the answer has calls, and the arguments of the last call are
        complete, the result is "tool_calls" (or the deprecated "function_call"), so that the client
        runs the calls. Otherwise the result is `reason`.
        """
        is_call = bool(self._calls) and reason == "stop" and not self._is_cut
        called = "function_call" if self._is_deprecated else "tool_calls"
        return called if is_call else reason

    def num_reasoning_tokens(self, starts: Sequence[int]) -> int:
        """Return the number of tokens that begin in a thought.

        `starts`: for each token so far, the number of characters of the answer before the token.
        """
        thoughts = [] if self._parser is None else self._parser.thoughts
        running = 0
        for span in thoughts[self._num_ended :]:
            last = span.certain if span.end is None else span.end
            end = len(starts) if last is None else bisect_left(starts, last)
            running = end - bisect_left(starts, span.begin)
            if span.end is not None:
                self._num_ended += 1
                self._num_tokens += running
                running = 0
        return self._num_tokens + running

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
            if isinstance(one, Thought):
                self._thoughts.append(one.text)
                deltas.append(_thought_fields(one.text))
            elif isinstance(one, Content):
                self._content.append(one.text)
                listed = self._tokens.take(one.begin, one.end)
                deltas.append({"content": one.text, **({"log_probs": listed} if listed else {})})
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
        taken = {call["id"] for call in self._calls}
        own_id = self._new_id() if found.id in ("", *taken) else found.id
        call = {"id": own_id, "type": "function", "function": function}
        self._calls.append(call)
        return {"index": found.index, **call, "function": dict(function)}


def _thought_fields(text: str) -> dict[str, str]:
    """Return the fields of a thought, under both names that clients look for."""
    return {"reasoning_content": text, "reasoning": text}
