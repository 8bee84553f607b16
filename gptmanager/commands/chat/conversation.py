"""`Conversation`: the messages of a chat, and the answers to choose from.

The module is independent of tokens and terminals.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import orjson

from gptmanager.errors import ConfigError, quoted

Message = dict[str, str]


class Answer(NamedTuple):
    """An answer of the model, and its thoughts before it."""

    content: str
    thoughts: str = ""

    @property
    def message(self) -> Message:
        more = {"reasoning_content": self.thoughts} if self.thoughts else {}
        return _message("assistant", self.content) | more


class Conversation:
    """Questions, each with its answer, after an optional system prompt."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self._messages: list[Message] = []
        self._answers: list[Answer] = []  # to the last question; one of them is in the messages
        self._written: set[Path] = set()

    @property
    def messages(self) -> list[Message]:
        """Return all messages, the system prompt first."""
        first = [] if self.system is None else [_message("system", self.system)]
        return [*first, *self._messages]

    @property
    def last_question(self) -> str | None:
        """The last message of the user, or None before the first."""
        return self._messages[-2]["content"] if self._messages else None

    def asking(self, question: str, *, again: bool = False) -> list[Message]:
        """Return the messages followed by a question, without adding the question to the chat.

        `again`: the question replaces the last question and its answer.
        """
        messages = self.messages[:-2] if again else self.messages
        return [*messages, _message("user", question)]

    def add(self, question: str, answers: Sequence[Answer], *, again: bool = False) -> None:
        """Add a question with its answers. The chat continues with the first answer."""
        if again:
            del self._messages[-2:]
        self._answers = [*answers]
        self._messages += [_message("user", question), answers[0].message]

    def pick(self, number: int) -> None:
        """Continue the chat with one of the answers to the last question; `number` 1 is the first.

        Raises ConfigError if `number` is not between 1 and the number of answers.
        """
        if not 1 <= number <= len(self._answers):
            count = len(self._answers)
            raise ConfigError(
                f"the number of the answer must be 1 to {count}, got {number}"
                if count
                else "no question has been answered yet: ask a question first"
            )
        self._messages[-1] = self._answers[number - 1].message

    def clear(self) -> None:
        """Remove all messages but the system prompt."""
        self._messages.clear()
        self._answers.clear()

    def save(self, path: Path) -> None:
        """Write the messages as a line of JSON, for `gptmanager run --requests`.

        A file that exists is replaced only if this conversation has written it. Raises ConfigError
        for any other file that exists, and if the file cannot be written.
        """
        own = Path(os.path.abspath(path))
        try:
            with open(own, "wb" if own in self._written else "xb") as file:
                self._written.add(own)
                file.write(orjson.dumps({"messages": self.messages}) + b"\n")
        except FileExistsError:
            raise ConfigError(f"{quoted(str(path))} exists: choose another name") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"{quoted(str(path))} cannot be written: {reason}") from None


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
