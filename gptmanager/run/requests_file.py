"""Requests as JSON lines, and results as JSON lines: what `gptmanager run` reads and writes.

A line is an object with `prompt` (text) or `input_ids`, `max_new_tokens`, and any input of an
`InferenceRequest` by its name; `streaming` (default true), `stop` (texts) and `top_k`, `top_p`,
`min_p` besides. A line that cannot be read is a value here, not an end: the others run.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import FileIO, RawIOBase
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import orjson
from tokenizers import Tokenizer

from gptmanager.callbacks import GenerationResult, TextStream
from gptmanager.errors import (
    ConfigError,
    GptManagerError,
    InvalidRequestError,
    response_text,
)
from gptmanager.memory.checkpoint_files import shown
from gptmanager.request.inference_request import (
    PROPERTY_OF_TENSOR,
    TENSOR_ALIASES,
    InferenceRequest,
)
from gptmanager.run.text_encoder import LONG_TEXT, TextEncoder

# what a line may say beside the names of tensors and their properties
_KEYWORDS = (
    "priority", "deadline_s", "queue_timeout_s", "client_id", "cache_salt", "retention_priority",
)  # fmt: skip
_ALIASES = {
    **TENSOR_ALIASES,
    **{name: tensor for tensor, name in PROPERTY_OF_TENSOR.items()},
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "min_p": "runtime_min_p",
    "streaming": "is_streaming",
}
_NAMES = frozenset(
    (*PROPERTY_OF_TENSOR, *_KEYWORDS, "is_streaming", "request_id", "prompt", "stop")
)
_INTEGERS = frozenset(
    (
        "input_lengths", "request_output_len", "end_id", "pad_id", "beam_width", "runtime_top_k",
        "min_length", "early_stopping", "noRepeatNgramSize", "random_seed", "num_return_sequences",
        "prompt_vocab_size", "lora_task_id", "client_id", "retention_priority",
    )
)  # fmt: skip
_NUMBERS = frozenset(
    (
        "temperature", "runtime_top_p", "runtime_min_p", "len_penalty", "repetition_penalty",
        "presence_penalty", "frequency_penalty", "priority", "deadline_s", "queue_timeout_s",
    )
)  # fmt: skip
_FLAGS = frozenset(
    (
        "is_streaming", "return_log_probs", "return_context_logits", "return_generation_logits",
        "include_stop_in_output",
    )
)  # fmt: skip
_IDS = frozenset(("input_ids", "draft_input_ids", "position_ids"))
_WORDS = frozenset(("bad_words_list", "stop_words_list"))
_ARRAYS = frozenset(
    ("embedding_bias", "prompt_embedding_table", "draft_logits", "lora_weights", "lora_config")
)
_COUNTS = ("pauses", "cached_tokens", "prompt_tokens", "generated_tokens")  # among the metrics


@dataclass(frozen=True, slots=True)
class RequestLine:
    """One line: a request, or what is wrong with it."""

    number: int  # from 1
    request_id: int | None  # None: the line gives one that cannot be
    prompt: str | None = None
    request: InferenceRequest | None = None
    error: InvalidRequestError | None = None
    build: Callable[[], RequestLine] | None = None  # what it is, which takes long to tell


def read_requests(
    lines: Iterable[bytes],
    tokenizer: Tokenizer | None,
    *,
    max_new_tokens: int,
    max_tokens: int | None = None,
) -> Iterator[RequestLine]:
    """Every line that is not empty. Without a `request_id` it gets its number as its id.

    `max_new_tokens` is for lines that name none. A long one can be built later, and in another
    thread. `max_tokens`: no request has more, so that a longer text need not be encoded.
    """
    first_use: dict[int | None, int] = {}
    encoder = TextEncoder(tokenizer, max_tokens)
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        line = _read_line(number, text, encoder, max_new_tokens)
        if line.error is None and first_use.setdefault(line.request_id, number) != number:
            error = f"request_id = {line.request_id} is that of line {first_use[line.request_id]}"
            line = replace(line, request=None, build=None, error=_error(number, error))
        yield line


def read_file(path: str, tokenizer: Tokenizer | None, **options: Any) -> list[RequestLine]:
    """The lines of a file, of the standard input for "-". `options`: as of `read_requests`.

    Raises ConfigError.
    """
    try:
        if path != "-":
            with open(path, "rb") as lines:
                return list(read_requests(lines, tokenizer, **options))
        if sys.stdin is None:  # `<&-`
            raise ConfigError("--requests -: the standard input is closed")
        if sys.stdin.isatty():
            print("reading requests, a JSON object a line; Ctrl-D ends them", file=sys.stderr)
        return list(read_requests(sys.stdin.buffer, tokenizer, **options))
    except OSError as error:
        raise ConfigError(f"--requests {path}: {error.strerror}") from error


def built_apart(lines: Sequence[RequestLine]) -> SimpleQueue[RequestLine]:
    """What comes of lines that take long, in their order, from a thread that nobody waits for."""
    built: SimpleQueue[RequestLine] = SimpleQueue()

    def work() -> None:
        for line in lines:
            try:
                built.put(line if line.build is None else line.build())
            except Exception as error:  # no memory, say
                told = _error(line.number, response_text(error))
                built.put(replace(line, build=None, error=told))

    if lines:
        threading.Thread(target=work, name="gptmanager-texts", daemon=True).start()
    return built


def new_file(option: str, path: Path) -> FileIO:
    """An empty file to write, in a folder that is made if need be. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("wb", buffering=0)
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}") from error


def result_line(
    line: RequestLine,
    outcome: GenerationResult | BaseException | None,
    tokenizer: Tokenizer | None,
) -> dict[str, Any]:
    """What the output file says of a line. `outcome` None: the line holds no request."""
    result: dict[str, Any] = {"line": line.number, "request_id": line.request_id}
    if line.prompt is not None:
        result["prompt"] = line.prompt
    if not isinstance(outcome, GenerationResult):
        error = outcome or line.error or InvalidRequestError("was not submitted")
        return {**result, "error": response_text(error)}
    output_ids = outcome.generated_ids[0]
    if tokenizer is not None:
        stream = TextStream(tokenizer, outcome.prompt_ids)
        result["text"] = stream.push(output_ids) + stream.flush()
    metrics = outcome.metrics
    return {
        **result,
        "output_ids": output_ids,
        "finish_reason": outcome.finish_reasons[0].name,
        "metrics": {n: int(metrics[n]) if n in _COUNTS else metrics[n] for n in metrics},
    }


class Results:
    """What became of each line.

    `file` has them in the order of the lines, each as soon as it and all before it are known;
    `close` writes those that are known behind one that is not.
    """

    def __init__(
        self, lines: Sequence[RequestLine], tokenizer: Tokenizer | None, file: RawIOBase | None
    ) -> None:
        self._lines = lines
        self._tokenizer = tokenizer
        self._file = file
        self._num_written = 0
        self.by_number: dict[int, dict[str, Any]] = {}

    def add(
        self, line: RequestLine, outcome: GenerationResult | BaseException | None
    ) -> dict[str, Any]:
        result = result_line(line, outcome, self._tokenizer)
        self.by_number[line.number] = result
        while self._num_written < len(self._lines):
            known = self.by_number.get(self._lines[self._num_written].number)
            if known is None:
                break
            self._write(known)
        return result

    def close(self) -> None:
        for line in self._lines[self._num_written :]:
            if line.number in self.by_number:
                self._write(self.by_number[line.number])

    def _write(self, result: dict[str, Any]) -> None:
        self._num_written += 1
        line = memoryview(orjson.dumps(result) + b"\n")
        try:
            while self._file is not None and line:
                line = line[self._file.write(line) :]
        except OSError as error:
            name = getattr(self._file, "name", "")
            self._file = None  # what comes behind a gap would be misread
            raise GptManagerError(f"--output {name}: {error.strerror}") from error


def _read_line(number: int, text: bytes, encoder: TextEncoder, max_new_tokens: int) -> RequestLine:
    request_id: Any = number
    prompt = None
    try:
        fields = _fields(text)
        request_id = fields.pop("request_id", number)
        prompt = fields.pop("prompt", None)
        fields.setdefault("request_output_len", max_new_tokens)
        build = functools.partial(_build, number, request_id, prompt, fields, encoder)
        if len(text) < LONG_TEXT or type(request_id) is not int:
            return build()
    except InvalidRequestError as error:
        return _wrong(number, request_id, prompt, error)
    return RequestLine(number, request_id, prompt, build=build)


def _build(
    number: int, request_id: Any, prompt: Any, fields: dict[str, Any], encoder: TextEncoder
) -> RequestLine:
    try:
        input_ids = _input_ids(fields, prompt, encoder)
        fields["stop_words_list"] = _stop_words(fields, encoder)
        length = fields.pop("request_output_len")
        request = InferenceRequest.from_tokens(request_id, input_ids, length, **fields)
    except (InvalidRequestError, TypeError, ValueError, OverflowError) as error:
        return _wrong(number, request_id, prompt, error)
    return RequestLine(number, request_id, prompt, request)


def _wrong(number: int, request_id: Any, prompt: Any, error: Exception) -> RequestLine:
    return RequestLine(
        number,
        request_id if type(request_id) is int else None,
        prompt if isinstance(prompt, str) else None,
        error=_error(number, error),
    )


def _fields(text: bytes) -> dict[str, Any]:
    """The line's object, every field under its tensor's or keyword's name."""
    try:
        given = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidRequestError(f"no JSON: {error}") from error
    if not isinstance(given, dict):
        raise InvalidRequestError("not a JSON object")
    fields: dict[str, Any] = {"is_streaming": True}  # by default, so that it can be watched
    names: dict[str, str] = {}
    for given_name, value in given.items():
        name = _ALIASES.get(given_name, given_name)
        if name not in _NAMES:
            raise InvalidRequestError(f"unknown field {shown(given_name)}")
        if name in names:
            raise InvalidRequestError(f"{names[name]} and {given_name} are the same field")
        names[name] = given_name
        if value is not None:
            fields[name] = value
    for name, value in fields.items():
        if need := _need(name, value):
            raise InvalidRequestError(f"{names[name]} = {shown(value)} is not {need}")
    return fields


def _need(name: str, value: Any) -> str | None:
    """What the JSON value of a field must be and is not; None: it is, or others say."""
    if name in _INTEGERS:
        return None if type(value) is int else "an integer"
    if name in _NUMBERS:
        return None if type(value) in (int, float) else "a number"
    if name in _FLAGS:
        return None if type(value) is bool else "true or false"
    if name in _IDS:
        return None if _are_ids(value) else "a list of token ids"
    if name in _WORDS:
        is_list = isinstance(value, list) and all(map(_are_ids, value))
        return None if is_list else "a list of lists of token ids"
    if name in _ARRAYS:
        return None if _are_numbers(value) else "a list of numbers, or of lists of them"
    if name == "cache_salt":
        return None if type(value) in (str, int) else "a text or an integer"
    return None


def _input_ids(fields: dict[str, Any], prompt: Any, encoder: TextEncoder) -> list[int]:
    if prompt is not None and "input_ids" in fields:
        raise InvalidRequestError("both prompt and input_ids are given")
    if prompt is not None:
        return encoder.encode("prompt", prompt, special=True)
    if "input_ids" not in fields:
        raise InvalidRequestError("neither prompt nor input_ids is given")
    ids: list[int] = fields.pop("input_ids")
    return ids


def _stop_words(fields: dict[str, Any], encoder: TextEncoder) -> list[list[int]] | None:
    """`stop_words_list`, then the tokens of the texts in `stop`; None: neither is given."""
    words = fields.pop("stop_words_list", [])
    stop = fields.pop("stop", [])
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list):
        raise InvalidRequestError(f"stop = {shown(stop)} is neither a text nor a list of texts")
    return [*words, *(encoder.encode("stop", text, special=False) for text in texts)] or None


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(i) is int and 0 <= i < 2**31 for i in value)


def _are_numbers(value: Any) -> bool:
    """A list of numbers, or of lists of them, none of which is empty."""
    if not isinstance(value, list) or not value:
        return False
    if isinstance(value[0], list):
        return all(isinstance(row, list) and _are_numbers_alone(row) for row in value)
    return _are_numbers_alone(value)


def _are_numbers_alone(values: list[Any]) -> bool:
    return bool(values) and all(type(value) in (int, float) for value in values)


def _error(number: int, error: object) -> InvalidRequestError:
    return InvalidRequestError(f"line {number}: {error}")
