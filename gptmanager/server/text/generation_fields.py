"""The fields that completions and chats share: sampling, ends, streams and log probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from gptmanager.callbacks.processors.banned_texts import MAX_WORD_LETTERS, MAX_WORDS
from gptmanager.callbacks.text.stop_strings import MAX_STOPS
from gptmanager.errors import quoted
from gptmanager.server.fields import (
    AsItIs,
    Field,
    Flag,
    Integer,
    ListOf,
    Number,
    Object,
    Text,
    TextOrTexts,
    bad_request,
    by_name,
)
from gptmanager.server.request_fields import NotSupported
from gptmanager.terminal.sampling import LEAST_TEMPERATURE, SAMPLING_VALUES

MAX_CHOICES = 128  # for each prompt
MAX_TOP_LOG_PROBS = 20
MAX_BIASES = 1 << 16  # more would block the event loop for a noticeable time
_MAX_STOP_TOKENS = 1024
DEADLINE = Number(0, 1e9, excludes_low=True)
_INT64 = (-(2**63), 2**64 - 1)


def _limits(name: str) -> tuple[float, float]:
    return SAMPLING_VALUES[name].low, SAMPLING_VALUES[name].high


class Temperature:
    """A number from 0 to 100. Less than 1e-30 is 0.

    Clients that leave a 0 out, such as Go's, send the smallest number of 32 bits in place of it.
    """

    def read(self, where: str, value: Any) -> float:
        found = Number(*_limits("temperature")).read(where, value)
        return found if found >= LEAST_TEMPERATURE else 0.0

    def schema(self) -> dict[str, Any]:
        return Number(*_limits("temperature")).schema()


UNLIMITED = -1  # a number of new tokens by which clients of llama.cpp and LM Studio set no limit


class NewTokens(NamedTuple):
    """A number of new tokens, at least `low`, or UNLIMITED unless `is_limited`.

    The context length is checked later.
    """

    low: int
    is_limited: bool = False

    def read(self, where: str, value: Any) -> int:
        if type(value) in (int, float) and value == UNLIMITED and not self.is_limited:
            return UNLIMITED
        return Integer(self.low).read(where, value)

    def schema(self) -> dict[str, Any]:
        own = Integer(self.low).schema()
        return own if self.is_limited else {"anyOf": [{"const": UNLIMITED}, own]}


class TokenBias:
    """An object of token id -> bias from -100 to 100."""

    def read(self, where: str, value: Any) -> dict[int, float]:
        found, number = {}, Number(-100, 100)
        given = Object().read(where, value)
        if len(given) > MAX_BIASES:
            raise bad_request(
                where, f"{where} has {len(given)} tokens, at most {MAX_BIASES} are allowed"
            )
        for key, bias in given.items():
            if not (key.isascii() and key.isdecimal() and len(key) < 10):
                raise bad_request(where, f"{where}: the key {quoted(key)} must be a token id")
            found[int(key)] = number.read(f"{where}.{key}", bias)
        return found

    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "maxProperties": MAX_BIASES,
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": Number(-100, 100).schema(),
        }


class EarlyStopping:
    """False, true or "never", which `read` converts to 0, 1 or 2."""

    def read(self, where: str, value: Any) -> int:
        if value == "never":
            return 2
        if not isinstance(value, bool):
            raise bad_request(where, f'{where} = {quoted(value)} must be true, false or "never"')
        return int(value)

    def schema(self) -> dict[str, Any]:
        return {"enum": [True, False, "never"]}


STREAM_OPTIONS = Object(
    by_name(
        [
            Field("include_usage", Flag(), "a last chunk with the usage"),
            Field("continuous_usage_stats", Flag(), "the usage so far in each chunk"),
            Field("include_obfuscation", Flag(), "without effect"),
        ]
    )
)

SAMPLING = (
    Field("temperature", Temperature(), "0: greedy; absent: the checkpoint's, else 1"),
    Field("top_p", Number(*_limits("top_p")), "absent: the checkpoint's, else 1"),
    Field("top_k", Integer(*_limits("top_k")), "0 or -1: unlimited; absent: the checkpoint's"),
    Field(
        "min_p", Number(*_limits("min_p")), "minimum probability, relative to the likeliest token"
    ),
    Field("seed", Integer(*_INT64), "the same seed gives the same choices; -1: a random one"),
    Field("random_seed", Integer(*_INT64), "seed by another name"),
    Field("n", Integer(1, MAX_CHOICES), "number of choices for each prompt"),
    Field(
        "presence_penalty",
        Number(*_limits("presence_penalty")),
        "subtracted once from logits of generated tokens",
    ),
    Field(
        "frequency_penalty",
        Number(*_limits("frequency_penalty")),
        "subtracted for each occurrence of a token",
    ),
    Field(
        "repetition_penalty",
        Number(*_limits("repetition_penalty")),
        "above 1: repeated tokens are less likely",
    ),
    Field(
        "repeat_penalty",
        Number(*_limits("repetition_penalty")),
        "repetition_penalty by another name",
    ),
    Field("logit_bias", TokenBias(), "token id -> -100 to 100, added to its logit"),
    Field("bad_words", TextOrTexts(MAX_WORDS, MAX_WORD_LETTERS), "texts that no output contains"),
    Field("min_tokens", Integer(0, 2**31 - 1), "no output ends before this number of tokens"),
    Field("stop", TextOrTexts(MAX_STOPS), "texts that end an output"),
    Field(
        "stop_token_ids",
        ListOf(Integer(0, 2**31 - 1), longest=_MAX_STOP_TOKENS),
        "tokens that end an output",
    ),
    Field("include_stop_str_in_output", Flag(), "the stop string is part of the output"),
    Field("ignore_eos", Flag(), "the model's end token does not end an output"),
    Field("skip_special_tokens", Flag(), "absent: true"),
    Field("use_beam_search", Flag(), "choices are the n best beams"),
    Field("beam_width", Integer(1, 2**31 - 1), "beams of a search; absent: n"),
    Field(
        "length_penalty", Number(-100, 100), "a beam's log probability is divided by length ** this"
    ),
    Field("early_stopping", EarlyStopping(), "when a beam search stops; see the documentation"),
)
SERVING = (
    Field("model", Text(), "the model's name, or an adapter's"),
    Field("stream", Flag(), "server-sent events"),
    Field("stream_options", STREAM_OPTIONS),
    Field("priority", Number(-1e9, 1e9), "default 0.5; higher runs first"),
    Field("deadline_s", DEADLINE, "seconds from its arrival, after which the request times out"),
    Field("cache_salt", Text(1, 1024), "only requests with the same salt share cached blocks"),
    Field("request_id", Text(1, 256), "returned as `id`"),
    Field(
        "prompt_logprobs",
        Integer(0, MAX_TOP_LOG_PROBS),
        "number of most likely tokens to return for each token of the prompt",
    ),
    Field("return_token_ids", Flag(), "return token ids in addition to texts"),
    Field("return_tokens_as_token_ids", Flag(), "in log probabilities, write tokens as token_id:N"),
)
# fields that change no answer on any server
IGNORED = tuple(
    Field(name, AsItIs(), "accepted; has no effect on the answer")
    for name in (
        *("user", "store", "metadata", "service_tier", "safety_identifier", "prediction"),
        *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_prompt"),
        *("keep_alive", "guided_decoding_backend"),
    )
)
# fields that can change answers on other servers, each with the values that change nothing
_NOT_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "include_reasoning": (True,),
    "modalities": (["text"],),
    "moderation": (),
    "options": ({},),
    "reasoning": ({},),
    "safe_prompt": (False,),
    "search_parameters": ({"mode": "off"},),
    "spaces_between_special_tokens": (True,),
    "thinking": ({"type": "disabled"},),
    "truncate_prompt_tokens": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
NOT_SUPPORTED = tuple(
    Field(name, NotSupported(neutral), "not supported: ignored, and reported in the header Warning")
    for name, neutral in _NOT_SUPPORTED.items()
)
# other servers' names for fields
_ALIASES = {"repeat_penalty": "repetition_penalty", "random_seed": "seed"}


def with_known_names(given: dict[str, Any]) -> dict[str, Any]:
    """Replace aliases by this server's field names. If both are given, the alias is ignored."""
    for alias, name in _ALIASES.items():
        if alias in given:
            given.setdefault(name, given.pop(alias))
    return given
