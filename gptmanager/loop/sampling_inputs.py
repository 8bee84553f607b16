"""How a request wants its tokens chosen, read from its tensors."""

from __future__ import annotations

import math
from typing import Any

from gptmanager.decoding.random_numbers import derive_seed
from gptmanager.errors import InvalidRequestError
from gptmanager.loop.limits import Limits
from gptmanager.request.read_tensors import INT32, read_bias, read_float, read_int, read_word_list
from gptmanager.request.sampling_params import SamplingParams

_TINY, _HUGE = 1e-30, 1e30  # of a penalty or a temperature
_SAMPLING_TENSORS = ("runtime_top_k", "runtime_top_p", "runtime_min_p", "temperature")


def read_sampling(request_id: int, tensors: dict[str, Any], limits: Limits) -> SamplingParams:
    """Raises InvalidRequestError for the first thing that is wrong."""
    end_id = read_int("end_id", tensors.get("end_id", -1), -1, limits.vocab_size - 1)
    try:
        return _read(request_id, tensors, limits, end_id)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"Incorrect sampling config: {error}") from None


def _read(request_id: int, tensors: dict[str, Any], limits: Limits, end_id: int) -> SamplingParams:
    """A temperature or a penalty is refused where float32 cannot hold it."""

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
        end_id=end_id,
    )
