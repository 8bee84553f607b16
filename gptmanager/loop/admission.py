"""Admission: from what a host sent to a request that the loop can run, or to a RequestError.

Decides validity only, against limits that are fixed when the manager starts; knows nothing of
what else is running.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gptmanager.config import PromptLookup
from gptmanager.decoding.beam_search import BeamParams
from gptmanager.decoding.drafting import Drafter
from gptmanager.decoding.random_numbers import derive_seed
from gptmanager.decoding.stop_words import StopWords
from gptmanager.errors import CapacityError, InvalidRequestError
from gptmanager.lifecycle.log import logger
from gptmanager.loop.active_request import ActiveRequest
from gptmanager.request.inference_request import (
    PROPERTY_OF_TENSOR,
    TENSOR_ALIASES,
    InferenceRequest,
)
from gptmanager.request.input_rows import HostRows
from gptmanager.request.llm_request import RETENTION_PRIORITIES, OutputConfig, SamplingParams
from gptmanager.request.post_processor import read_post_processor
from gptmanager.request.read_tensors import (
    INT32,
    read_bias,
    read_bool,
    read_float,
    read_int,
    read_rows,
    read_token_ids,
    read_word_list,
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may be, and how many may wait. Lengths in tokens.

    `pool_limited`: it is the KV cache that bounds `max_seq_len`. `max_run_len` bounds prompt +
    new tokens - 1 where a request may have to run its whole history as one context again (an
    evicting policy without chunks). `max_num_requests`: how many may run at once; `max_waiting`:
    how many may wait beside them, None: any number. `hidden_size` 0: the model takes no embeddings
    of prompts.
    """

    vocab_size: int
    max_seq_len: int
    max_input_len: int
    num_blocks: int
    tokens_per_block: int
    pool_limited: bool = False
    max_run_len: int | None = None
    max_beam_width: int = 1
    lookup: PromptLookup | None = None
    takes_drafts: bool = True
    exclude_input_in_output: bool = False
    gather_context_logits: bool = False
    gather_generation_logits: bool = False
    normalize_log_probs: bool = True
    hidden_size: int = 0
    seed: int = 0
    max_num_requests: int = 0
    max_waiting: int | None = None


# inputs whose support has not landed
_LATER = ("position_ids", "lora_task_id", "lora_weights", "lora_config")
_TINY, _HUGE = 1e-30, 1e30  # of a penalty or a temperature
_SAMPLING_TENSORS = ("runtime_top_k", "runtime_top_p", "runtime_min_p", "temperature")


def admit(request: InferenceRequest, limits: Limits, now: float) -> ActiveRequest:
    """Check a whole request; raises RequestError for the first thing that is wrong with it."""
    tensors = {TENSOR_ALIASES.get(name, name): value for name, value in request.tensors.items()}
    for name in tensors:
        if name not in PROPERTY_OF_TENSOR:
            raise InvalidRequestError(f"Invalid tensor name: {name}")
        if tensors[name] is None:
            raise InvalidRequestError(f"Cannot set nullptr when calling {name}")
        if name in _LATER:
            raise InvalidRequestError(f"{name} is refused: its support has not landed yet")
    for name in ("input_ids", "request_output_len"):
        if name not in tensors:
            raise InvalidRequestError(f"Undefined tensor: {name}")
    prompt_table, num_virtual = _read_prompt_table(tensors, limits)
    prompt = read_token_ids("input_ids", tensors["input_ids"], limits.vocab_size + num_virtual)
    max_new_tokens = read_int("request_output_len", tensors["request_output_len"], 1, INT32[1])
    drafts, draft_logits = _read_drafts(tensors, len(prompt), limits)
    max_new_tokens = _fit(request.request_id, len(prompt), max_new_tokens, limits)
    sampling = _read_sampling(request.request_id, tensors, limits)
    beams = _read_beams(tensors, sampling, limits)
    if beams is not None:
        _check_pool(len(prompt), max_new_tokens, beams.width, limits)
        if drafts:
            raise InvalidRequestError(
                f"draft_input_ids is refused with beam_width = {beams.width}: it follows one text"
            )
    pad_default = max(sampling.end_id, 0)
    return ActiveRequest(
        request.request_id,
        prompt,
        max_new_tokens,
        sampling,
        is_streaming=read_bool("is_streaming", request.is_streaming),
        pad_id=read_int("pad_id", tensors.get("pad_id", pad_default), *INT32),
        stop_words=_read_stop_words(tensors, limits, sampling.end_id),
        include_stop=read_bool("include_stop_in_output", tensors.get("include_stop_in_output", 0)),
        exclude_input=limits.exclude_input_in_output,
        deadline_s=_seconds("deadline_s", request.deadline_s),
        queue_timeout_s=_seconds("queue_timeout_s", request.queue_timeout_s),
        priority=read_float("priority", request.priority, -math.inf),
        arrival_time=now,
        cache_salt=_salt(request.cache_salt),
        retention_priority=_retention_priority(request.retention_priority),
        beams=beams,
        processor=read_post_processor(request.logits_post_processor),
        client_id=_client_id(request.client_id),
        prompt_table=prompt_table,
        drafts=drafts[: max_new_tokens - 1],
        draft_logits=None if sampling.greedy else draft_logits,
        drafter=(
            None
            if limits.lookup is None or beams is not None
            else Drafter(limits.lookup, limits.vocab_size)
        ),
        output_config=_read_wanted(tensors, limits),
    )


def _read_drafts(
    tensors: dict[str, Any], prompt_len: int, limits: Limits
) -> tuple[tuple[int, ...], HostRows | None]:
    """Tokens that may follow the prompt, and the logits that they were drawn from."""
    if "draft_input_ids" not in tensors:
        if "draft_logits" in tensors:
            raise InvalidRequestError(
                "Undefined tensor: draft_input_ids, but draft_logits is given"
            )
        return (), None
    if not limits.takes_drafts:
        raise InvalidRequestError("draft_input_ids is refused: the attention has a window")
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
    """The logits that `drafts` were drawn from."""
    rows = read_rows("draft_logits", value, vocab_size, bans=True)
    if rows.count != len(drafts):
        raise InvalidRequestError(
            f"draft_logits has {rows.count} rows, draft_input_ids {len(drafts)} tokens"
        )
    numbers = rows.numbers
    for place, token in enumerate(drafts):
        if numbers is not None and numbers[place, token] == -math.inf:
            raise InvalidRequestError(
                f"draft_logits[{place}, {token}] = -inf, but draft_input_ids[{place}] = {token}: "
                "a token that could not have been drawn"
            )
    return rows


def _fit(request_id: int, prompt_len: int, max_new_tokens: int, limits: Limits) -> int:
    """The number of new tokens that fit behind the prompt."""
    if prompt_len == 0:
        raise InvalidRequestError("input_ids is empty, expected at least 1 token")
    if prompt_len > limits.max_input_len:
        text = (
            f"Prompt length ({prompt_len}) exceeds maximum input length ({limits.max_input_len})."
        )
        if limits.pool_limited and prompt_len >= limits.max_seq_len:
            needed = -(-(prompt_len + 1) // limits.tokens_per_block)
            blocks = f"KV cache blocks of {limits.tokens_per_block} tokens"
            if needed > limits.num_blocks:
                raise CapacityError(
                    f"{text} It needs {needed} {blocks}, the cache has {limits.num_blocks}."
                )
            raise CapacityError(
                f"{text} {limits.num_blocks} {blocks} are taken to hold {limits.max_seq_len} of "
                "one request: (blocks - 1) x tokens_per_block + 1."
            )
        raise InvalidRequestError(text)
    room = limits.max_seq_len - prompt_len
    if max_new_tokens > room:
        logger.warning(
            "request %d: request_output_len = %d lowered to %d: prompt of %d tokens, "
            "max_seq_len = %d",
            *(request_id, max_new_tokens, room, prompt_len, limits.max_seq_len),
        )
        max_new_tokens = room
    run_len = prompt_len + max_new_tokens - 1
    if limits.max_run_len is not None and run_len > limits.max_run_len:
        raise InvalidRequestError(
            "Request sequence length is potentially greater than max input length: prompt + new "
            f"tokens - 1 = {run_len}, limit {limits.max_run_len}. This cannot be run unless "
            "context chunking is enabled or the GUARANTEED_NO_EVICT scheduling policy is used"
        )
    return max_new_tokens


def _read_sampling(request_id: int, tensors: dict[str, Any], limits: Limits) -> SamplingParams:
    end_id = read_int("end_id", tensors.get("end_id", -1), -1, limits.vocab_size - 1)
    try:
        return SamplingParams(
            **_read_choice(request_id, tensors, limits),
            **_read_adjustments(tensors, limits),
            end_id=end_id,
        )
    except InvalidRequestError as error:
        raise InvalidRequestError(f"Incorrect sampling config: {error}") from None


def _read_choice(request_id: int, tensors: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """How a token is drawn. A temperature is refused where float32 cannot hold it."""
    temperature = read_float("temperature", tensors.get("temperature", 1.0), 0.0)
    if temperature and not _TINY <= temperature <= _HUGE:
        raise InvalidRequestError(
            f"temperature = {temperature:g} must be 0 or within {_TINY:g}..{_HUGE:g}"
        )
    top_k = read_int("runtime_top_k", tensors.get("runtime_top_k", 0), 0, INT32[1])
    top_p = read_float("runtime_top_p", tensors.get("runtime_top_p", 1.0), 0.0, 1.0)
    min_p = read_float("runtime_min_p", tensors.get("runtime_min_p", 0.0), 0.0, 1.0)
    asked = any(name in tensors for name in _SAMPLING_TENSORS)
    greedy = not asked or top_k == 1 or top_p == 0.0 or temperature == 0.0
    seed = (
        read_int("random_seed", tensors["random_seed"], 0, 2**64 - 1)
        if "random_seed" in tensors
        else derive_seed(limits.seed, request_id)
    )
    return {
        "greedy": greedy,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
    }


def _read_adjustments(tensors: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """What changes the logits first. Penalties are refused where float32 cannot hold them."""
    read: dict[str, Any] = {
        "min_length": read_int("min_length", tensors.get("min_length", 0), 0, INT32[1]),
        "no_repeat_ngram_size": read_int(
            "noRepeatNgramSize", tensors.get("noRepeatNgramSize", 0), 0, INT32[1]
        ),
        "repetition_penalty": read_float(
            "repetition_penalty", tensors.get("repetition_penalty", 1.0), _TINY, _HUGE
        ),
    }
    for name in ("presence_penalty", "frequency_penalty"):
        read[name] = read_float(name, tensors.get(name, 0.0), -_HUGE, _HUGE)
    if "bad_words_list" in tensors:
        words = read_word_list("bad_words_list", tensors["bad_words_list"], limits.vocab_size)
        read["bad_words"] = tuple(map(tuple, words))
    if "embedding_bias" in tensors:
        read["embedding_bias"] = read_bias(
            "embedding_bias", tensors["embedding_bias"], limits.vocab_size
        )
    return read


def _read_wanted(tensors: dict[str, Any], limits: Limits) -> OutputConfig:
    """What the request or the manager's options ask for besides tokens."""

    def is_asked(name: str) -> bool:
        return read_bool(name, tensors.get(name, False))

    return OutputConfig(
        log_probs=is_asked("return_log_probs"),
        normalized=limits.normalize_log_probs,
        generation_logits=is_asked("return_generation_logits") or limits.gather_generation_logits,
        context_logits=is_asked("return_context_logits") or limits.gather_context_logits,
    )


def _read_beams(
    tensors: dict[str, Any], sampling: SamplingParams, limits: Limits
) -> BeamParams | None:
    """None: one beam and one text, whatever else is said of beams."""
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


def _check_pool(prompt_len: int, max_new_tokens: int, beam_width: int, limits: Limits) -> None:
    """Beams share the full blocks of the prompt; the rest each has for itself."""
    size = limits.tokens_per_block
    shared = prompt_len // size
    needed = shared + (-(-(prompt_len + max_new_tokens) // size) - shared) * beam_width
    if needed > limits.num_blocks:
        raise CapacityError(
            f"{beam_width} beams of {prompt_len} + {max_new_tokens} tokens need {needed} KV cache "
            f"blocks of {size} tokens, the cache has {limits.num_blocks}"
        )


def _read_stop_words(tensors: dict[str, Any], limits: Limits, end_id: int) -> StopWords | None:
    """Of words with `end_id` in them none can end a text: it has ended before, or by that."""
    if "stop_words_list" not in tensors:
        return None
    words = read_word_list("stop_words_list", tensors["stop_words_list"], limits.vocab_size)
    words = [word for word in words if end_id not in word]
    return StopWords(words) if words else None


def _read_prompt_table(tensors: dict[str, Any], limits: Limits) -> tuple[HostRows | None, int]:
    """The request's own embeddings, and how many token ids they add to the vocabulary."""
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


def _salt(value: Any) -> str | int | None:
    if value is None:
        return None
    if isinstance(value, str):  # a subclass may hash and compare as it likes, in anybody's lookup
        return str.__str__(value)
    if isinstance(value, int):
        return int.__index__(value)
    raise InvalidRequestError(f"cache_salt = {value!r} is neither a str nor an int")


def _retention_priority(value: Any) -> int | None:
    return None if value is None else read_int("retention_priority", value, *RETENTION_PRIORITIES)


def _client_id(value: Any) -> int | None:
    return None if value is None else read_int("client_id", value, 0, 2**64 - 1)


def _seconds(name: str, value: Any) -> float | None:
    """None, also for infinity: no limit."""
    if value is None or (isinstance(value, (float, np.floating)) and value == math.inf):
        return None
    return read_float(name, value, 0.0)
