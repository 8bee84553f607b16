"""Requests as JSON lines: what `gptmanager run` reads.

A line is an object with `prompt` (text) or `input_ids`, `max_new_tokens`, and any tensor name or
keyword of `InferenceRequest`; `streaming` and `stop` (texts) besides. A line that cannot be read
is a value here, not an end: the others run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import orjson
from tokenizers import Tokenizer

from gptmanager.api import InferenceRequest
from gptmanager.errors import ConfigError, InvalidRequestError


@dataclass(frozen=True, slots=True)
class RequestLine:
    """One line: a request, or what is wrong with it."""

    number: int  # from 1
    request_id: int
    prompt: str | None = None
    request: InferenceRequest | None = None
    error: InvalidRequestError | None = None


def read_requests(
    lines: Iterable[bytes], tokenizer: Tokenizer | None, *, max_new_tokens: int
) -> Iterator[RequestLine]:
    """Every line that is not empty. `max_new_tokens` is for lines that name none."""
    first_use: dict[int, int] = {}
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        line = _read_line(number, text, tokenizer, max_new_tokens)
        if line.request is not None and first_use.setdefault(line.request_id, number) != number:
            error = f"line {number}: line {first_use[line.request_id]} has the same request_id"
            line = replace(line, request=None, error=InvalidRequestError(error))
        yield line


def _read_line(
    number: int, line: bytes, tokenizer: Tokenizer | None, max_new_tokens: int
) -> RequestLine:
    request_id: Any = number
    prompt = None
    try:
        fields = orjson.loads(line)
        if not isinstance(fields, dict):
            raise InvalidRequestError("not a JSON object")
        request_id = fields.pop("request_id", number)
        prompt = fields.pop("prompt", None)
        fields["input_ids"] = _input_ids(fields, prompt, tokenizer)
        fields["is_streaming"] = fields.pop("streaming", True)
        if "stop" in fields:
            fields["stop_words_list"] = _stop_words(fields.pop("stop"), tokenizer)
        limit = fields.pop("request_output_len", max_new_tokens)
        limit = fields.pop("max_new_tokens", limit)
        request = InferenceRequest.from_tokens(request_id, fields.pop("input_ids"), limit, **fields)
    except (InvalidRequestError, ConfigError, AttributeError, TypeError, ValueError) as error:
        shown_id = request_id if isinstance(request_id, int) else number
        return RequestLine(
            number, shown_id, prompt, error=InvalidRequestError(f"line {number}: {error}")
        )
    return RequestLine(number, request_id, prompt, request)


def _input_ids(fields: dict[str, Any], prompt: Any, tokenizer: Tokenizer | None) -> Any:
    if prompt is None:
        if "input_ids" not in fields:
            raise InvalidRequestError("neither prompt nor input_ids is given")
        return fields["input_ids"]
    if "input_ids" in fields:
        raise InvalidRequestError("both prompt and input_ids are given")
    return _encode("prompt", prompt, tokenizer).ids


def _stop_words(stop: Any, tokenizer: Tokenizer | None) -> list[list[int]]:
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list):
        raise InvalidRequestError(f"stop = {stop!r} is neither a text nor a list of texts")
    return [_encode("stop", text, tokenizer, special=False).ids for text in texts]


def _encode(name: str, text: Any, tokenizer: Tokenizer | None, *, special: bool = True) -> Any:
    if not isinstance(text, str):
        raise InvalidRequestError(f"{name} = {text!r} is not a text")
    if tokenizer is None:
        raise InvalidRequestError(f"{name} is a text, but the model folder has no tokenizer.json")
    return tokenizer.encode(text, add_special_tokens=special)
