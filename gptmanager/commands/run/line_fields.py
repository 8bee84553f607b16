"""The fields of a request line: their names, and which JSON values are valid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from gptmanager.errors import InvalidRequestError, quoted
from gptmanager.request.inference_request import TENSOR_ALIASES, TENSORS

# keywords of `InferenceRequest`: fields that are not tensors
_KEYWORDS = (
    "priority", "deadline_s", "queue_timeout_s", "client_id", "cache_salt", "retention_priority",
)  # fmt: skip
_ALIASES = {
    **TENSOR_ALIASES,
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "min_p": "runtime_min_p",
    "streaming": "is_streaming",
}
_NAMES = frozenset(
    (*TENSORS, *_KEYWORDS, "is_streaming", "request_id", "prompt", "messages", "stop", "lora")
)
# each: names of fields, a check of their JSON values, and a description of valid values
_KINDS: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (
        ("input_lengths", "request_output_len", "pad_id", "beam_width", "runtime_top_k",
         "min_length", "early_stopping", "noRepeatNgramSize", "random_seed", "client_id",
         "num_return_sequences", "prompt_vocab_size", "lora_task_id", "retention_priority",
         "num_top_log_probs", "num_prompt_log_probs"),
        lambda value: type(value) is int, "an integer",
    ),
    (
        ("temperature", "runtime_top_p", "runtime_min_p", "len_penalty", "repetition_penalty",
         "presence_penalty", "frequency_penalty", "priority", "deadline_s", "queue_timeout_s"),
        lambda value: type(value) in (int, float), "a number",
    ),
    (
        ("is_streaming", "return_log_probs", "return_context_logits", "return_generation_logits",
         "include_stop_in_output"),
        lambda value: type(value) is bool, "true or false",
    ),
    (
        ("input_ids", "draft_input_ids", "position_ids"),
        lambda value: _are_ids(value), "a list of token ids",
    ),
    (
        ("end_id",),
        lambda value: type(value) is int or bool(value) and _are_ids(value),
        "an integer or a list of token ids",
    ),
    (
        ("bad_words_list", "stop_words_list"),
        lambda value: isinstance(value, list) and all(map(_are_ids, value)),
        "a list of lists of token ids",
    ),
    (
        ("embedding_bias", "prompt_embedding_table", "draft_logits", "lora_weights", "lora_config"),
        lambda value: _are_numbers(value), "a list of numbers, or of lists of them",
    ),
    (("lora",), lambda value: isinstance(value, str) and "\0" not in value, "a folder"),
    (("cache_salt",), lambda value: type(value) in (str, int), "a string or an integer"),
)  # fmt: skip


def read_fields(text: bytes) -> dict[str, Any]:
    """Return the fields of a line: name of the tensor or keyword -> value.

    Fields that are null are omitted. Raises InvalidRequestError if the line is not valid.
    """
    try:
        given = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        problem = "not UTF-8" if "UTF-8" in error.msg else error
        raise InvalidRequestError(f"invalid JSON: {problem}") from error
    if not isinstance(given, dict):
        raise InvalidRequestError("not a JSON object")
    # Requests stream by default, so that the live view shows their tokens.
    fields: dict[str, Any] = {"is_streaming": True}
    names: dict[str, str] = {}
    for given_name, value in given.items():
        name = _ALIASES.get(given_name, given_name)
        if name not in _NAMES:
            raise InvalidRequestError(f"unknown field {quoted(given_name)}")
        if name in names:
            raise InvalidRequestError(f"{names[name]} and {given_name} are the same field")
        names[name] = given_name
        if value is not None:
            fields[name] = value
    for name, value in fields.items():
        if need := _need(name, value):
            raise InvalidRequestError(f"{names[name]} must be {need}, got {quoted(value)}")
    return fields


def _need(name: str, value: Any) -> str | None:
    """Return a description of valid values if a field's value is invalid, otherwise None.

    Fields that `_KINDS` does not list are checked later: the result is None.
    """
    for names, fits, need in _KINDS:
        if name in names:
            return None if fits(value) else need
    return None


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(i) is int and 0 <= i < 2**31 for i in value)


def _are_numbers(value: Any) -> bool:
    """Return whether a value is a list of numbers or of lists of numbers. No list may be empty."""
    if not isinstance(value, list) or not value:
        return False
    if isinstance(value[0], list):
        return all(isinstance(row, list) and _are_numbers_alone(row) for row in value)
    return _are_numbers_alone(value)


def _are_numbers_alone(values: list[Any]) -> bool:
    return bool(values) and all(type(value) in (int, float) for value in values)
