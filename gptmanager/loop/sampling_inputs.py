"""How a request wants its tokens chosen, read from its tensors."""

from __future__ import annotations

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
