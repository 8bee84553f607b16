"""`ChatPrompts`: converts the `messages` of a request file's line to the token ids of a prompt."""

from __future__ import annotations

import functools
import os
from typing import Any

from gptmanager.callbacks import ChatTemplate
from gptmanager.errors import CapacityError, ConfigError, InvalidRequestError, quoted

_WITHOUT_CONTENT = ("tool_calls",)  # a message with one of these keys may have no content


class ChatPrompts:
    """Renders messages with a checkpoint's chat template. The first `render` loads the template."""

    def __init__(self, model: str | os.PathLike[str]) -> None:
        self._model = model

    def render(self, messages: Any) -> list[int]:
        """Return the token ids of the rendered messages.

        Raise InvalidRequestError, which names the wrong field or says why the template fails.
        """
        _check(messages)
        try:
            return self._template.render(messages)
        except ConfigError as error:
            raise InvalidRequestError(f"messages: {error}") from error
        except CapacityError as error:
            raise InvalidRequestError(str(error)) from error

    def close(self) -> None:
        """End the child process that runs the template, if it has been started."""
        if "_template" in vars(self):
            self._template.close()

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate.of_folder(self._model)


def _check(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise InvalidRequestError(
            f"messages = {quoted(messages)} must be a list of at least one message"
        )
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise InvalidRequestError(f"{where} = {quoted(message)} must be an object")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str):
            raise InvalidRequestError(f"{where}.role = {quoted(role)} must be a string")
        has_more = any(message.get(key) for key in _WITHOUT_CONTENT)
        if not isinstance(content, str) and not (content is None and has_more):
            raise InvalidRequestError(f"{where}.content = {quoted(content)} must be a string")
