"""`ChatTemplate`: renders the messages of a chat as the token ids of a prompt.

The template of a checkpoint runs in a separate process with limited time and memory.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gptmanager.callbacks.text.checkpoint import (
    load_tokenizer,
    read_tokenizer_config,
    special_tokens_of,
)
from gptmanager.callbacks.text.control_tokens import ControlTokens
from gptmanager.callbacks.text.template_process import TemplateProcess, pick, read_chat_templates
from gptmanager.callbacks.text.template_rendering import TemplateError
from gptmanager.environment.distribution import install_command
from gptmanager.errors import CapacityError, ConfigError, InvalidRequestError, quoted_path
from gptmanager.lifecycle.child_process import NotStartedError
from gptmanager.lifecycle.per_process import PerProcess


class ChatTemplate:
    """Renders chats with the template and the tokenizer of a checkpoint folder.

        with ChatTemplate.of_folder(folder) as template:
            prompt = template.render([{"role": "user", "content": "Hello"}])

    At the end of a `with` block, the template's process ends. Any number of threads may render.
    """

    def __init__(
        self, templates: Mapping[str, str], tokenizer: Tokenizer, special_tokens: Mapping[str, str]
    ) -> None:
        self._templates = templates
        self._tokenizer = tokenizer
        # `encode` treats special tokens as plain text
        self._tokenizer.encode_special_tokens = True
        self._special_tokens = special_tokens
        self._control_tokens = ControlTokens(tokenizer)
        # the lock guards the process, which answers one thread at a time
        self._own = PerProcess(lambda: (threading.Lock(), TemplateProcess()))
        self._is_closed = False

    @classmethod
    def of_folder(cls, path: str | os.PathLike[str]) -> ChatTemplate:
        """Read the chat template, the tokenizer and its special tokens from a checkpoint folder.

        Raise ConfigError if jinja2 or the template is missing, or if a file cannot be read.
        """
        if importlib.util.find_spec("jinja2") is None:
            command = install_command("server")
            raise ConfigError(f"chat templates need jinja2, which is not installed: {command}")
        templates = read_chat_templates(path)
        if pick(templates, has_tools=False) is None:
            raise ConfigError(f"{quoted_path(Path(path))} has no chat template: pass token ids")
        special = special_tokens_of(read_tokenizer_config(path))
        return cls(templates, load_tokenizer(path), special)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a prompt.

        `variables` are further variables of the template, such as `enable_thinking`. Text in the
        arguments never becomes a control token. Raise InvalidRequestError for messages that the
        template refuses, or cannot render within the limits of time and memory, CapacityError if
        the template's process cannot be started, and ValueError after `close`.
        """
        template = pick(self._templates, has_tools=tools is not None)
        given = {
            "template": template,
            "messages": self._control_tokens.marked(messages),
            "variables": {
                **self._special_tokens,
                "tools": self._control_tokens.marked(tools),
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
                **self._control_tokens.marked(dict(variables or {})),
            },
        }
        lock, process = self._own.get()
        with lock:
            if self._is_closed:
                raise ValueError("the chat template is closed")
            try:
                text = process.ask(given)
            except TemplateError as error:
                raise InvalidRequestError(f"messages: the chat template: {error}") from None
            except NotStartedError as error:
                raise CapacityError(f"the chat template: {error}") from None
        tokens: list[int] = []
        for piece in self._control_tokens.pieces(text):
            if isinstance(piece, int):
                tokens.append(piece)
            else:
                tokens += self._tokenizer.encode(piece, add_special_tokens=False).ids
        return tokens

    def close(self) -> None:
        """End the process. A running `render` ends first; later calls raise ValueError."""
        lock, process = self._own.get()
        with lock:
            self._is_closed = True
            process.close()

    def __enter__(self) -> ChatTemplate:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
