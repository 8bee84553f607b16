"""Chat templates: where a checkpoint keeps them, and how one is filled in with bounds.

Decides which template a request gets, and how long filling it in may take. Knows nothing of what
messages mean.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson

from gptmanager.errors import ConfigError
from gptmanager.server.openai import template_program
from gptmanager.server.openai.template_program import TemplateError

MAX_SECONDS = 5.0  # that a template may take
MAX_BYTES = 1 << 29  # of memory

_DEFAULT = "default"
_WITH_TOOLS = "tool_use"
_START_S = 30.0  # Python and jinja2 are read: no fault of a template


def read_chat_templates(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Name -> text of a checkpoint's templates; the usual one is called "default".

    In the order of transformers: chat_template.jinja with additional_chat_templates/*.jinja, else
    the key `chat_template` of tokenizer_config.json (a text, or a list of named ones), else that
    of chat_template.json. Empty where there are none. ConfigError for files that cannot be read.
    """
    own = Path(folder) / "chat_template.jinja"
    if own.is_file():
        named = sorted((Path(folder) / "additional_chat_templates").glob("*.jinja"))
        return {_DEFAULT: _read(own), **{path.stem: _read(path) for path in named}}
    for name in ("tokenizer_config.json", "chat_template.json"):
        path = Path(folder) / name
        if path.is_file():
            try:
                config = json.loads(_read(path))
            except ValueError as error:
                raise ConfigError(f"{path} is no JSON: {error}") from None
            found = config.get("chat_template") if isinstance(config, dict) else None
            if found is not None:
                return _named(found, path)
    return {}


def read_template_file(path: str | os.PathLike[str]) -> dict[str, str]:
    """The one template of a file, for requests with and without tools."""
    return {_DEFAULT: _read(Path(path))}


def pick(templates: Mapping[str, str], has_tools: bool) -> str | None:
    """The template of a request; None if there is none."""
    if has_tools and _WITH_TOOLS in templates:
        return templates[_WITH_TOOLS]
    return templates.get(_DEFAULT)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: a chat template cannot be read: {error}") from None


def _named(found: Any, path: Path) -> dict[str, str]:
    listed = [{"name": _DEFAULT, "template": found}] if isinstance(found, str) else found
    try:
        named = {one["name"]: one["template"] for one in listed}
    except (KeyError, TypeError):
        named = {}
    if not named or not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise ConfigError(f"{path}: chat_template is neither a text nor a list of named ones")
    return named


class TemplateProcess:
    """Fills in templates in a process of its own, one after another.

    So a template that runs for ever, or eats memory, harms requests of this process alone: it has
    `max_seconds`, then the process is ended, and the next request starts another. It starts with
    the first request, in about 0.1 s.
    """

    def __init__(self, max_seconds: float = MAX_SECONDS, max_bytes: int = MAX_BYTES) -> None:
        self._max_seconds = max_seconds
        self._max_bytes = max_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., TemplateProcess] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gptmanager-chat-template")

    async def fill_in(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        *,
        continue_final_message: bool = False,
    ) -> str:
        """What `template_program.fill_in` returns; TemplateError for all that goes wrong."""
        given = {
            "template": template,
            "messages": messages,
            "variables": variables,
            "continue_final_message": continue_final_message,
        }
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, given)

    def close(self) -> None:
        """End the process; it may be started again."""
        self._thread.submit(self._stop).result()

    def _ask(self, given: Mapping[str, Any]) -> str:
        try:
            line = orjson.dumps(given)
        except TypeError as error:
            raise TemplateError(f"cannot be given to a chat template: {error}") from None
        if self._process is None or self._process.poll() is not None:
            self._start()
        answer = self._exchange(line, self._max_seconds)
        if "error" in answer:
            raise TemplateError(answer["error"])
        return str(answer["text"])

    def _start(self) -> None:
        self._stop()
        command = [sys.executable or "python", "-I", "-S", str(Path(template_program.__file__))]
        pipe = subprocess.PIPE
        try:
            self._process = process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, bufsize=0
            )
        except OSError as error:
            raise TemplateError(f"no process can be started for it: {error}") from None
        self._end = weakref.finalize(self, _end, process)
        self._exchange(orjson.dumps({"path": sys.path, "max_bytes": self._max_bytes}), _START_S)

    def _stop(self) -> None:
        self._process = None
        if self._end is not None:
            self._end()

    def _exchange(self, line: bytes, seconds: float) -> dict[str, Any]:
        """One line out, one line in, within `seconds`."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        until = time.monotonic() + seconds
        answered, found = select.poll(), [b""]
        answered.register(process.stdout, select.POLLIN)
        try:
            _write(process.stdin.fileno(), line + b"\n")
            while not found[-1].endswith(b"\n"):
                if not answered.poll(max(0.0, until - time.monotonic()) * 1000):
                    raise TemplateError(f"it takes more than {seconds:g} s")
                found.append(os.read(process.stdout.fileno(), 1 << 20))
                if not found[-1]:
                    raise TemplateError(f"it takes more than {self._max_bytes} bytes")
        except OSError as error:
            self._stop()
            raise TemplateError(f"its process has ended: {error}") from None
        except TemplateError:
            self._stop()
            raise
        answer: dict[str, Any] = orjson.loads(b"".join(found))
        return answer


def _write(file: int, line: bytes) -> None:
    view = memoryview(line)
    while view:
        view = view[os.write(file, view) :]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
