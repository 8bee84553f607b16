"""Check a request from the host, and create an `ActiveRequest` from it.

A request is checked only against limits that are fixed when the manager starts, not against the
other active requests. If the request is invalid, a RequestError is raised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from gptmanager.decoding.end_rule import EndRule
from gptmanager.decoding.prompt_lookup import Drafter, RequestDrafts
from gptmanager.decoding.sampling.random_numbers import derive_seed
from gptmanager.decoding.search.beam_search import BeamParams
from gptmanager.decoding.stop_words import StopWords
from gptmanager.errors import AdapterError, InvalidRequestError
from gptmanager.loop.active_request import ActiveRequest
from gptmanager.loop.limits import Limits, check_pool, fit_length
from gptmanager.loop.request_times import RequestTimes
from gptmanager.request.adapter import LoraInputs, read_lora
from gptmanager.request.inference_request import (
    TENSOR_ALIASES,
    TENSORS,
    InferenceRequest,
    similar_property,
)
from gptmanager.request.input_rows import HostRows, drawn_draft
from gptmanager.request.llm_request import RETENTION_PRIORITIES
from gptmanager.request.output_options import OutputConfig, OutputOptions
from gptmanager.request.post_processor import read_post_processor
from gptmanager.request.read_tensors import (
    INT32,
    read_bias,
    read_bool,
    read_end_ids,
    read_float,
    read_float_rows,
    read_int,
    read_rows,
    read_token_ids,
    read_word_list,
)
from gptmanager.request.sampling_params import SamplingParams

# inputs that are not supported yet
_LATER = ("position_ids",)
_LORA_TENSORS = ("lora_task_id", "lora_weights", "lora_config")

_TINY, _HUGE = 1e-30, 1e30  # range of penalties and temperatures
_MOST_LOG_PROBS = 128  # per position
_SAMPLING_TENSORS = ("runtime_top_k", "runtime_top_p", "runtime_min_p", "temperature")


def admit(request: InferenceRequest, limits: Limits, now: float) -> ActiveRequest:
    """Return the active request; raise RequestError for the first invalid value.

    `now` is the time when the request arrived, in seconds of the same clock as `Intake.now`.
    """
    tensors = _tensors_of(request)
    prompt_table, num_virtual = _read_prompt_table(tensors, limits)
    prompt = read_token_ids("input_ids", tensors["input_ids"], limits.vocab_size + num_virtual)
    max_new_tokens = read_int("request_output_len", tensors["request_output_len"], 1, INT32[1])
    drafts, draft_logits = _read_drafts(tensors, len(prompt), limits)
    max_new_tokens = fit_length(request.request_id, len(prompt), max_new_tokens, limits)
    sampling = _read_sampling(request.request_id, tensors, limits)
    beams = _read_beams(tensors, sampling, limits)
    if beams is not None:
        check_pool(len(prompt), max_new_tokens, beams.width, limits)
        if drafts:
            name = "num_return_sequences" if beams.sampled else "beam_width"
            raise InvalidRequestError(
                f"draft_input_ids must not be given with {name} = {beams.width} (must be 1)"
            )
    drafter = None
    if limits.lookup is not None and beams is None:
        drafter = Drafter(limits.lookup, limits.vocab_size)
    return ActiveRequest(
        request.request_id,
        prompt,
        sampling,
        _read_end_rule(tensors, limits, max_new_tokens, sampling.end_ids),
        _read_output_options(request, tensors, limits, sampling.end_ids),
        RequestTimes(
            now,
            _time_limit("deadline_s", request.deadline_s, now),
            _time_limit("queue_timeout_s", request.queue_timeout_s, now),
        ),
        RequestDrafts(
            drafts[: max_new_tokens - 1], None if sampling.greedy else draft_logits, drafter
        ),
        beams=beams,
        priority=read_float("priority", request.priority, -math.inf),
        cache_salt=_salt(request.cache_salt),
        retention_priority=_optional_int(
            "retention_priority", request.retention_priority, *RETENTION_PRIORITIES
        ),
        processor=read_post_processor(request.logits_post_processor),
        client_id=_optional_int("client_id", request.client_id, 0, 2**64 - 1),
        prompt_table=prompt_table,
        lora=_read_adapter(tensors, limits),
    )


def _tensors_of(request: InferenceRequest) -> dict[str, Any]:
    """Return the tensors by name. Raise an error for missing, unknown and unsupported ones."""
    tensors = {TENSOR_ALIASES.get(name, name): value for name, value in request.tensors.items()}
    for name, value in tensors.items():
        if name not in TENSORS:
            raise InvalidRequestError(f"Invalid tensor name: {name}{similar_property(name)}")
        if value is None:
            raise InvalidRequestError(
                f"Cannot set nullptr when calling {name}: None is not a tensor; to leave {name} "
                "out, do not set it"
            )
        if name in _LATER:
            raise InvalidRequestError(f"{name} is refused: it is not supported yet")
    for name in ("input_ids", "request_output_len"):
        if name not in tensors:
            raise InvalidRequestError(f"Undefined tensor: {name}")
    return tensors


def _read_drafts(
    tensors: dict[str, Any], prompt_len: int, limits: Limits
) -> tuple[tuple[int, ...], HostRows | None]:
    """Return the draft tokens, and rows of `drawn_draft` if their logits are given."""
    if "draft_input_ids" not in tensors:
        if "draft_logits" in tensors:
            raise InvalidRequestError(
                "Undefined tensor: draft_input_ids, but draft_logits is given"
            )
        return (), None
    if limits.drafts_refused:
        raise InvalidRequestError(f"draft_input_ids is refused: {limits.drafts_refused}")
    drafts = read_token_ids("draft_input_ids", tensors["draft_input_ids"], limits.vocab_size)
    total = prompt_len + len(drafts)
    if total > limits.max_input_len:
        raise InvalidRequestError(
            f"Prompt length + number of draft tokens ({prompt_len} + {len(drafts)}) exceeds "
            f"maximum input length ({limits.max_input_len})."
        )
    if "draft_logits" not in tensors:
        return tuple(drafts), None
    return tuple(drafts), read_draft_logits(tensors["draft_logits"], drafts, limits.vocab_size)


def read_draft_logits(value: Any, drafts: Sequence[int], vocab_size: int) -> HostRows:
    """Read the logits from which `drafts` were sampled, and return rows of `drawn_draft`.

    Raise InvalidRequestError for invalid logits.
    """
    if isinstance(value, HostRows):  # already read by the recorder, or from a recording
        return value
    logits = read_float_rows("draft_logits", value, vocab_size, bans=True)
    if len(logits) != len(drafts):
        raise InvalidRequestError(
            f"draft_logits has {len(logits)} rows, draft_input_ids {len(drafts)} tokens"
        )
    for index, token in enumerate(drafts):
        if logits[index, token] == -math.inf:
            raise InvalidRequestError(
                f"draft_logits[{index}, {token}] = -inf, but draft_input_ids[{index}] = {token}: "
                "this token cannot have been sampled"
            )
    drawn = np.empty(len(drafts), dtype=drawn_draft(vocab_size))
    drawn["token"], drawn["logits"] = drafts, logits
    return HostRows(drawn)


def _read_sampling(request_id: int, tensors: dict[str, Any], limits: Limits) -> SamplingParams:
    """Read the sampling parameters. Raise InvalidRequestError for the first invalid one."""
    end_ids = read_end_ids(tensors.get("end_id", -1), limits.vocab_size - 1)
    try:
        return _read_sampling_params(request_id, tensors, limits, end_ids)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"Incorrect sampling config: {error}") from None


def _read_sampling_params(
    request_id: int, tensors: dict[str, Any], limits: Limits, end_ids: tuple[int, ...]
) -> SamplingParams:
    """Read the sampling parameters.

    The ranges of temperatures and penalties ensure that float32 neither overflows nor underflows.
    """

    def count(name: str) -> int:
        return read_int(name, tensors.get(name, 0), 0, INT32[1])

    def number(name: str, default: float, low: float, high: float = math.inf) -> float:
        return read_float(name, tensors.get(name, default), low, high)

    temperature = number("temperature", 1.0, 0.0)
    if temperature and not _TINY <= temperature <= _HUGE:
        raise InvalidRequestError(
            f"temperature = {temperature:g} must be 0 or within {_TINY:g}..{_HUGE:g}"
        )
    top_k, top_p = count("runtime_top_k"), number("runtime_top_p", 1.0, 0.0, 1.0)
    asked = any(name in tensors for name in _SAMPLING_TENSORS)
    seed, words, bias = map(tensors.get, ("random_seed", "bad_words_list", "embedding_bias"))
    return SamplingParams(
        greedy=not asked or top_k == 1 or top_p == 0.0 or temperature == 0.0,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=number("runtime_min_p", 0.0, 0.0, 1.0),
        seed=(
            derive_seed(limits.seed, request_id)
            if seed is None
            else read_int("random_seed", seed, 0, 2**64 - 1)
        ),
        min_length=count("min_length"),
        no_repeat_ngram_size=count("noRepeatNgramSize"),
        repetition_penalty=number("repetition_penalty", 1.0, _TINY, _HUGE),
        presence_penalty=number("presence_penalty", 0.0, -_HUGE, _HUGE),
        frequency_penalty=number("frequency_penalty", 0.0, -_HUGE, _HUGE),
        bad_words=(
            tuple(map(tuple, read_word_list("bad_words_list", words, limits.vocab_size)))
            if words is not None
            else ()
        ),
        embedding_bias=(
            read_bias("embedding_bias", bias, limits.vocab_size) if bias is not None else None
        ),
        end_ids=end_ids,
    )


def _read_output_options(
    request: InferenceRequest,
    tensors: dict[str, Any],
    limits: Limits,
    end_ids: tuple[int, ...],
) -> OutputOptions:
    """Return the outputs that the request or the manager's options ask for."""

    def is_asked(name: str) -> bool:
        return read_bool(name, tensors.get(name, False))

    def count(name: str, none: int) -> int:
        found = read_int(name, tensors.get(name, none), none, _MOST_LOG_PROBS)
        return min(found, limits.vocab_size)

    num_prompt = count("num_prompt_log_probs", -1)
    if num_prompt >= 0 and "prompt_embedding_table" in tensors:
        raise InvalidRequestError(
            f"num_prompt_log_probs = {num_prompt} is refused with prompt_embedding_table: its "
            "tokens have no logits"
        )
    config = OutputConfig(
        log_probs=is_asked("return_log_probs"),
        normalized=limits.normalize_log_probs,
        generation_logits=is_asked("return_generation_logits") or limits.gather_generation_logits,
        context_logits=is_asked("return_context_logits") or limits.gather_context_logits,
        num_top_log_probs=count("num_top_log_probs", 0),
        num_prompt_log_probs=num_prompt,
    )
    return OutputOptions(
        read_bool("is_streaming", request.is_streaming),
        read_int("pad_id", tensors.get("pad_id", end_ids[0] if end_ids else 0), *INT32),
        limits.exclude_input_in_output,
        config,
    )


def _read_beams(
    tensors: dict[str, Any], sampling: SamplingParams, limits: Limits
) -> BeamParams | None:
    """Read the beam search parameters; None for `beam_width` 1 with a single result."""
    width = read_int("beam_width", tensors.get("beam_width", 1), 1, limits.max_beam_width)
    count = read_int("num_return_sequences", tensors.get("num_return_sequences", 1), 1, INT32[1])
    len_penalty = read_float("len_penalty", tensors.get("len_penalty", 1.0), -math.inf)
    early_stopping = read_int("early_stopping", tensors.get("early_stopping", 0), *INT32)
    if width == 1:
        if count > limits.max_beam_width:
            raise InvalidRequestError(
                f"num_return_sequences = {count} exceeds max_beam_width = {limits.max_beam_width}"
            )
        return None if count == 1 else BeamParams(count, sampled=True)
    if count > width:
        raise InvalidRequestError(f"num_return_sequences = {count} exceeds beam_width = {width}")
    for name, value, neutral in (
        ("runtime_top_k", sampling.top_k, (0, 1)),
        ("runtime_top_p", sampling.top_p, (0, 1)),
        ("runtime_min_p", sampling.min_p, (0,)),
    ):
        if value not in neutral:
            raise InvalidRequestError(
                f"Incorrect sampling config: {name} = {value:g} with beam_width = {width}: beams "
                "are searched, not sampled"
            )
    if sampling.temperature == 0:
        raise InvalidRequestError(
            f"Incorrect sampling config: temperature = 0 with beam_width = {width}"
        )
    returned = count if "num_return_sequences" in tensors else width
    return BeamParams(width, len_penalty, early_stopping, returned)


def _read_end_rule(
    tensors: dict[str, Any], limits: Limits, max_new_tokens: int, end_ids: tuple[int, ...]
) -> EndRule:
    """Build the end rule, without the stop words that contain an end id.

    A stop word that contains an end id has no effect: the end id alone ends the output.
    """
    words, ends = [], frozenset(end_ids)
    if "stop_words_list" in tensors:
        words = read_word_list("stop_words_list", tensors["stop_words_list"], limits.vocab_size)
        words = [word for word in words if ends.isdisjoint(word)]
    include_stop = read_bool("include_stop_in_output", tensors.get("include_stop_in_output", 0))
    return EndRule(max_new_tokens, ends, StopWords(words) if words else None, include_stop)


def _read_prompt_table(tensors: dict[str, Any], limits: Limits) -> tuple[HostRows | None, int]:
    """Return the rows of the prompt embedding table, and the number of virtual token ids."""
    if "prompt_embedding_table" not in tensors:
        if "prompt_vocab_size" in tensors:
            raise InvalidRequestError(
                "Undefined tensor: prompt_embedding_table, but prompt_vocab_size is given"
            )
        return None, 0
    if not limits.hidden_size:
        raise InvalidRequestError("prompt_embedding_table is refused: the model takes none")
    rows = read_rows(
        "prompt_embedding_table", tensors["prompt_embedding_table"], limits.hidden_size
    )
    size = read_int(
        "prompt_vocab_size", tensors.get("prompt_vocab_size", rows.count), 1, rows.count
    )
    return rows.first(size), size


def _read_adapter(tensors: dict[str, Any], limits: Limits) -> LoraInputs | None:
    """Return a request's adapter, without reading its weights; None without an adapter."""
    given = [name for name in _LORA_TENSORS if name in tensors]
    if limits.adapters is not None:
        return read_lora(tensors, limits.adapters)
    if given:
        raise AdapterError(
            f"{given[0]} is refused: the model takes no adapters, or PeftCacheManagerConfig leaves "
            "no page for them"
        )
    return None


def _salt(value: Any) -> str | int | None:
    if value is None:
        return None
    # Subclasses of str and int are converted: their own code would run in every lookup.
    if isinstance(value, str):
        text = str.__str__(value)
        return f"str {text}" if text.startswith(("int ", "str ")) else text  # not a long integer
    if isinstance(value, int):
        number = int.__index__(value)
        # The state of a loop as JSON has integers of at most 64 bits.
        return number if -(2**63) <= number < 2**64 else f"int {number:#x}"
    raise InvalidRequestError(f"cache_salt = {value!r} must be a str or an int")


def _optional_int(name: str, value: Any, low: int, high: int) -> int | None:
    return None if value is None else read_int(name, value, low, high)


def _time_limit(name: str, value: Any, now: float) -> float | None:
    """Return the time `value` seconds after `now`; None if `value` is None or infinity."""
    if value is None or (isinstance(value, (float, np.floating)) and value == math.inf):
        return None
    return now + read_float(name, value, 0.0)
