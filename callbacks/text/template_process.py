"""Reads a checkpoint's chat templates, picks the template for a request, and renders it.

A child process renders, with limits of time and memory.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson

from gptmanager.callbacks.text import template_rendering
from gptmanager.callbacks.text.template_rendering import TemplateError
from gptmanager.errors import ConfigError
from gptmanager.lifecycle.child_process import (
    ChildProcess,
    NoAnswerError,
    NotStartedError,
    RefusedError,
)
from gptmanager.memory.checkpoint.untrusted_files import read_object
from gptmanager.models.checkpoint_parts import gguf_checkpoint

MAX_SECONDS = 5.0  # to render a template
MAX_BYTES = 1 << 29  # limit of memory

_MAX_CHARACTERS = 1 << 24  # characters of a template
_DEFAULT = "default"
_WITH_TOOLS = "tool_use"


def read_chat_templates(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Return name -> text of a checkpoint's templates; the usual template is called "default".

    The first of these sources that exists is read, as in transformers:

    - chat_template.jinja, with additional_chat_templates/*.jinja
    - the key `chat_template` of tokenizer_config.json: a string, or a list of named templates
    - the key `chat_template` of chat_template.json

    A GGUF file contains its own templates. The result is empty for a model without templates. Raise
    ConfigError for files that cannot be read.
    """
    if (gguf := gguf_checkpoint(folder)) is not None:
        found = (gguf.part("tokenizer_config.json") or {}).get("chat_template")
        return {} if found is None else _named(found, Path(folder))
    own = Path(folder) / "chat_template.jinja"
    if own.is_file():
        named = sorted((Path(folder) / "additional_chat_templates").glob("*.jinja"))
        return {_DEFAULT: _read(own), **{path.stem: _read(path) for path in named}}
    for name in ("tokenizer_config.json", "chat_template.json"):
        path = Path(folder) / name
        found = read_object(path).get("chat_template") if path.is_file() else None
        if found is not None:
            return _named(found, path)
    return {}


def read_template_file(path: str | os.PathLike[str]) -> dict[str, str]:
    """Return the template in a file, which is used for requests with and without tools."""
    return {_DEFAULT: _read(Path(path))}


def pick(templates: Mapping[str, str], has_tools: bool) -> str | None:
    """Return the template for a request with or without tools, or None if there is none."""
    if has_tools and _WITH_TOOLS in templates:
        return templates[_WITH_TOOLS]
    return templates.get(_DEFAULT)


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            found = file.read(_MAX_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read the chat template: {error}") from None
    if len(found) > _MAX_CHARACTERS:
        raise ConfigError(f"{path}: the chat template has more than {_MAX_CHARACTERS} characters")
    return found


def _named(found: Any, path: Path) -> dict[str, str]:
    listed = [{"name": _DEFAULT, "template": found}] if isinstance(found, str) else found
    try:
        named = {one["name"]: one["template"] for one in listed}
    except (KeyError, TypeError):
        named = {}
    if not named or not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise ConfigError(
            f"{path}: chat_template must be a string or a list of objects with name and template"
        )
    return named


class TemplateProcess:
    """Renders templates in a child process, one after another.

    A template that never ends, or that needs too much memory, affects only the current request: the
    child is killed after `max_seconds`, and the next request starts a new one. The first request
    starts the child, which takes about 0.1 s.
    """

    def __init__(self, max_seconds: float = MAX_SECONDS, max_bytes: int = MAX_BYTES) -> None:
        self._max_seconds = max_seconds
        self._child = ChildProcess(template_rendering.__name__, {}, max_bytes)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gptmanager-chat-template")

    async def fill_in(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        continue_final_message: bool = False,
    ) -> str:
        """Return the text of `template_rendering.fill_in` with these arguments.

        Raise TemplateError if the template or its process fails, and NotStartedError if the process
        cannot be started.
        """
        given = {
            "template": template,
            "messages": messages,
            "variables": variables,
            "continue_final_message": continue_final_message,
        }
        try:
            filling = asyncio.get_running_loop().run_in_executor(self._thread, self.ask, given)
        except RuntimeError as error:  # the thread cannot be started
            raise NotStartedError(f"no process can be started: {error}") from None
        return await filling

    def close(self) -> None:
        """End the process; the next request starts it again."""
        self._thread.submit(self._child.stop).result()

    def ask(self, given: Mapping[str, Any]) -> str:
        """Do the same as `fill_in`, with its arguments in `given`.

        Only one thread at a time may call this method.
        """
        try:
            return str(self._child.ask(orjson.dumps(given), self._max_seconds))
        except TypeError as error:
            raise TemplateError(f"cannot be passed to a chat template: {error}") from None
        except NotStartedError:
            raise
        except (NoAnswerError, RefusedError) as error:
            raise TemplateError(str(error)) from None
