"""Reads request files: JSON lines for `gptmanager run`.

A line is an object with exactly one of `prompt` (text), `messages` (a chat) and `input_ids`.
Optional are `max_new_tokens`, any input of an `InferenceRequest` by its name, `streaming` (default
true), `stop` (texts), `lora` (a folder), `top_k`, `top_p` and `min_p`. A line that cannot be read
becomes a `RequestLine` with an error, and the other lines run.
"""

from __future__ import annotations

import codecs
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tokenizers import Tokenizer

from gptmanager.callbacks.text.stop_strings import checked_stops
from gptmanager.callbacks.text.text_encoder import LONG_TEXT, TextEncoder
from gptmanager.commands.run.adapter_folders import AdapterFolders
from gptmanager.commands.run.chat_prompts import ChatPrompts
from gptmanager.commands.run.line_fields import read_fields
from gptmanager.errors import ConfigError, InvalidRequestError, quoted, response_text
from gptmanager.request.inference_request import InferenceRequest


@dataclass(frozen=True, slots=True)
class RequestLine:
    """One line of the file: a request, a long line still to be encoded, or an error."""

    number: int  # from 1
    request_id: int | None  # None if the line's id is invalid
    prompt: str | None = None
    request: InferenceRequest | None = None
    stop: Sequence[str] | None = None  # texts that end the output
    error: InvalidRequestError | None = None
    # Set if the line is long: encodes its text, and returns the line with its request or error.
    build: Callable[[], RequestLine] | None = None


def read_requests(
    lines: Iterable[bytes],
    tokenizer: Tokenizer | None,
    *,
    defaults: Mapping[str, Any],
    max_tokens: int | None = None,
    folder: str = "",
    chats: ChatPrompts | None = None,
    model: Path | None = None,
) -> Iterator[RequestLine]:
    """Yield a `RequestLine` for every line that is not blank. The default of `request_id` is the
    line's number.

    `defaults`: values for lines without these fields, by tensor name, and `stop`;
    `request_output_len` is one of them. `folder`: where relative adapter paths start. `max_tokens`:
    the most tokens of prompt and output together. If a token can represent only a limited number of
    bytes, a long text that cannot fit is refused before it is encoded. A long line is yielded with
    `build` set, which any thread may call to encode the text. `chats` renders messages. If `chats`
    is None, lines with messages are refused. If `model` is given, adapters must fit that
    checkpoint.
    """
    first_use: dict[int | None, int] = {}
    encoder, adapters = TextEncoder(tokenizer, max_tokens), AdapterFolders(Path(folder), model)
    for number, text in enumerate(lines, start=1):
        if number == 1:  # editors on Windows write a byte order mark
            text = text.removeprefix(codecs.BOM_UTF8)
        if not text.strip():
            continue
        line = _read_line(number, text, encoder, adapters, defaults, chats)
        if line.error is None and first_use.setdefault(line.request_id, number) != number:
            first = first_use[line.request_id]
            error = f"request_id = {line.request_id} is already used in line {first}"
            line = replace(line, request=None, build=None, error=_error(number, error))
        yield line


def read_file(path: str, tokenizer: Tokenizer | None, **options: Any) -> list[RequestLine]:
    """Return the lines of a file, or of the standard input for "-".

    `options`: the keyword arguments of `read_requests`. Raises ConfigError if the file cannot be
    read.
    """
    try:
        if path != "-":
            with open(path, "rb") as lines:
                options.setdefault("folder", os.path.dirname(path))
                return list(read_requests(lines, tokenizer, **options))
        if sys.stdin is None:  # closed by `<&-` in the shell
            raise ConfigError("--requests -: the standard input is closed")
        if sys.stdin.isatty():
            print("type one JSON object per line; Ctrl-D ends the requests", file=sys.stderr)
        return list(read_requests(sys.stdin.buffer, tokenizer, **options))
    except OSError as error:
        raise ConfigError(f"--requests {path}: {error.strerror}") from error


def build_in_thread(lines: Sequence[RequestLine]) -> SimpleQueue[tuple[float, RequestLine]]:
    """Start a thread that builds these lines in order, and return the queue of its results.

    A result is a pair: the `time.monotonic()` at which the line was ready, and the line. The thread
    is never joined, so it cannot delay the end of the command.
    """
    built: SimpleQueue[tuple[float, RequestLine]] = SimpleQueue()

    def work() -> None:
        for line in lines:
            try:
                result = line if line.build is None else line.build()
            except Exception as error:  # for example a MemoryError
                told = _error(line.number, response_text(error))
                result = replace(line, build=None, error=told)
            built.put((time.monotonic(), result))

    if lines:
        threading.Thread(target=work, name="gptmanager-texts", daemon=True).start()
    return built


def _read_line(
    number: int,
    text: bytes,
    encoder: TextEncoder,
    adapters: AdapterFolders,
    defaults: Mapping[str, Any],
    chats: ChatPrompts | None,
) -> RequestLine:
    request_id: Any = number
    prompt = None
    try:
        fields = read_fields(text)
        request_id = fields.pop("request_id", number)
        prompt = fields.pop("prompt", None)
        fields = {**defaults, **fields}
        adapters.take(fields)
        build = functools.partial(_build, number, request_id, prompt, fields, encoder, chats)
        if len(text) < LONG_TEXT or type(request_id) is not int:
            return build()
    except InvalidRequestError as error:
        return _wrong(number, request_id, prompt, error)
    return RequestLine(number, request_id, prompt, build=build)


def _build(
    number: int,
    request_id: Any,
    prompt: Any,
    fields: dict[str, Any],
    encoder: TextEncoder,
    chats: ChatPrompts | None,
) -> RequestLine:
    try:
        input_ids = _input_ids(fields, prompt, encoder, chats)
        stop = _stop_texts(fields, encoder)
        length = fields.pop("request_output_len")
        request = InferenceRequest.from_tokens(request_id, input_ids, length, **fields)
    except (InvalidRequestError, TypeError, ValueError, OverflowError) as error:
        return _wrong(number, request_id, prompt, error)
    return RequestLine(number, request_id, prompt, request, stop)


def _wrong(number: int, request_id: Any, prompt: Any, error: Exception) -> RequestLine:
    return RequestLine(
        number,
        request_id if type(request_id) is int else None,
        prompt if isinstance(prompt, str) else None,
        error=_error(number, error),
    )


def _input_ids(
    fields: dict[str, Any], prompt: Any, encoder: TextEncoder, chats: ChatPrompts | None
) -> list[int]:
    messages, ids = fields.pop("messages", None), fields.pop("input_ids", None)
    given = {"prompt": prompt, "messages": messages, "input_ids": ids}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise InvalidRequestError(f"both {names[0]} and {names[1]} are given: pass one of them")
    if prompt is not None:
        return encoder.encode("prompt", prompt, special=True)
    if messages is not None:
        if chats is None:
            raise InvalidRequestError("messages can only be used with a model's chat template")
        return chats.render(messages)
    if ids is None:
        raise InvalidRequestError("neither prompt nor input_ids nor messages are given")
    found: list[int] = ids
    return found


def _stop_texts(fields: dict[str, Any], encoder: TextEncoder) -> tuple[str, ...] | None:
    """Return the texts of `stop`, or None if there are none."""
    stop = fields.pop("stop", ())
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise InvalidRequestError(f"stop must be a string or a list of strings, got {quoted(stop)}")
    if texts:
        encoder.encode("stop", texts[0], special=False)  # raises without a tokenizer
    return checked_stops(texts) or None


def _error(number: int, error: object) -> InvalidRequestError:
    return InvalidRequestError(f"line {number}: {error}")
