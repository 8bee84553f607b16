"""The fields that a line of requests may have: their names, and the JSON values that they take."""

from __future__ import annotations

from typing import Any

import orjson

from gptmanager.errors import InvalidRequestError
from gptmanager.memory.checkpoint_files import shown
from gptmanager.request.inference_request import TENSOR_ALIASES, TENSORS

# what a line may say beside the names of tensors and their properties
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
_NAMES = frozenset((*TENSORS, *_KEYWORDS, "is_streaming", "request_id", "prompt", "stop"))
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


def read_fields(text: bytes) -> dict[str, Any]:
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
