"""Converts the fields of an HTTP request into requests for the engine.

This module decides defaults, limits that depend on the model, seeds of choices, and the ends of
outputs. It is independent of prompt texts and of answers.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gptmanager.server.engine.call import EngineRequest
from gptmanager.server.engine.model_card import ModelCard
from gptmanager.server.fields import bad_request
from gptmanager.server.text.outputs import Ends
from gptmanager.terminal.sampling import SAMPLING_VALUES

_RANDOM_SEED = -1  # by which clients of llama.cpp and vLLM ask for a random seed
_SERVING = ("cache_salt", "deadline_s", "priority")
_BY_NAME = {
    **{name: value.tensor for name, value in SAMPLING_VALUES.items()},
    **{name: name for name in _SERVING},
}


@dataclass(frozen=True)
class GenerationOptions:
    """The options of a call, which are the same for each of its prompts.

    `given` has the fields of the request. `num_top` and `num_prompt_top` are the numbers of top log
    probabilities for each token of the output and of the prompt; None means no log probabilities.
    `processor` is a logits post-processor. `prompt_table` has the embeddings of prompt tokens with
    ids beyond the vocabulary.
    """

    given: Mapping[str, Any]
    num_top: int | None = None
    num_prompt_top: int | None = None
    processor: Any = None
    prompt_table: Any = None

    @property
    def num_choices(self) -> int:
        """The number of outputs for each prompt."""
        return int(self.given.get("n", 1))

    @property
    def beam_width(self) -> int:
        """The number of beams, or 1 if the choices are sampled."""
        if not self.given.get("use_beam_search"):
            return 1
        return int(self.given.get("beam_width", self.num_choices))

    @property
    def num_requests(self) -> int:
        """The number of engine requests for each prompt."""
        return 1 if self.beam_width > 1 else self.num_choices

    @property
    def streams(self) -> bool:
        """Whether the client wants a stream."""
        return bool(self.given.get("stream"))

    @property
    def is_ended_here(self) -> bool:
        """Whether the server, not the engine, decides where an output ends."""
        given = self.given
        has_late_stop = bool(given.get("min_tokens") and given.get("stop_token_ids"))
        return self.beam_width > 1 or bool(given.get("stop")) or has_late_stop


def check(options: GenerationOptions, card: ModelCard) -> None:
    """Check fields against the model and against each other. Raises ApiError (400)."""
    given = options.given
    if given.get("stream_options") is not None and not options.streams:
        raise bad_request("stream_options", "stream_options needs stream = true")
    if "beam_width" in given and not given.get("use_beam_search"):
        raise bad_request("beam_width", "beam_width needs use_beam_search = true")
    if given.get("use_beam_search"):
        _check_beams(options, card)
    if card.tokenizer is None:
        for name in ("stop", "bad_words"):
            if given.get(name):
                raise bad_request(name, f"{name} needs a tokenizer, and the model has none")
    for token in given.get("logit_bias", ()):
        if token >= card.vocab_size:
            raise bad_request(
                "logit_bias", f"logit_bias: token {token} is outside 0 to {card.vocab_size - 1}"
            )
    for index, token in enumerate(given.get("stop_token_ids", ())):
        if token >= card.vocab_size:
            where = f"stop_token_ids[{index}]"
            raise bad_request(where, f"{where} = {token} is outside 0 to {card.vocab_size - 1}")


def check_min_tokens(given: Mapping[str, Any], max_new_tokens: int) -> None:
    """Raise ApiError (400) if outputs of `max_new_tokens` cannot have their minimum length."""
    least = given.get("min_tokens", 0)
    if least > max_new_tokens:
        raise bad_request(
            "min_tokens",
            f"min_tokens = {least} must be at most {max_new_tokens}, the maximum number of new "
            "tokens",
        )


def _check_beams(options: GenerationOptions, card: ModelCard) -> None:
    width = options.beam_width
    if options.streams:
        raise bad_request(
            "stream",
            "stream = true is not supported with beam search: its texts are known at the end only",
        )
    if width > card.max_beam_width:
        name = "beam_width" if "beam_width" in options.given else "n"
        raise bad_request(
            name, f"{name} = {width} exceeds --max-beam-width = {card.max_beam_width}"
        )
    if options.num_choices > width:
        raise bad_request("n", f"n = {options.num_choices} is more than beam_width = {width}")
    if options.given.get("stop"):
        raise bad_request("stop", "stop is not supported with beam search; use stop_token_ids")


def ends_of(options: GenerationOptions, card: ModelCard) -> Ends:
    """Return the tokens and texts that end the outputs of a request."""
    given = options.given
    return Ends(
        end_ids=frozenset(() if given.get("ignore_eos") else card.token_defaults.end_ids),
        stop_ids=frozenset(given.get("stop_token_ids", ())),
        stops=tuple(given.get("stop", ())),
        keeps_stop=given.get("include_stop_str_in_output", False),
        min_tokens=given.get("min_tokens", 0),
    )


def requests_of(
    options: GenerationOptions,
    card: ModelCard,
    prompts: Sequence[list[int]],
    max_new_tokens: Sequence[int],
    seed: int,
) -> list[list[EngineRequest]]:
    """Return the engine's requests for each prompt: one per choice, or one search with beams.

    `seed` is used if the call names none, or -1.
    """
    common = _common(options, card)
    if options.num_top is not None:
        common["return_log_probs"] = True
        if options.num_top:
            common["num_top_log_probs"] = options.num_top
    width, adapter = options.beam_width, _adapter(options, card)
    if width > 1:
        common.update(beam_width=width, num_return_sequences=options.num_choices)
    base = options.given.get("seed", _RANDOM_SEED)
    base = seed if base == _RANDOM_SEED else base
    found: list[list[EngineRequest]] = []
    for tokens, most in zip(prompts, max_new_tokens, strict=True):
        of_prompt = []
        for choice in range(options.num_requests):
            by_name = {**common, "random_seed": mixed_seed(base, len(found), choice)}
            if choice == 0 and options.num_prompt_top is not None:
                by_name["num_prompt_log_probs"] = options.num_prompt_top
            of_prompt.append(
                EngineRequest(
                    tokens,
                    most,
                    adapter=adapter,
                    is_ended_by_caller=options.is_ended_here,
                    **by_name,
                )
            )
        found.append(of_prompt)
    return found


def scoring_request(
    options: GenerationOptions, card: ModelCard, tokens: list[int]
) -> EngineRequest:
    """Return the engine's request for a prompt that is only scored."""
    given = options.given
    by_name = {name: given[name] for name in _SERVING if name in given}
    by_name["num_prompt_log_probs"] = options.num_prompt_top
    return EngineRequest(tokens, 1, adapter=_adapter(options, card), is_scoring=True, **by_name)


def _adapter(options: GenerationOptions, card: ModelCard) -> str | None:
    name = options.given.get("model")
    return None if not name or name in card.names else name


def mixed_seed(seed: int, prompt_index: int, choice: int) -> int:
    """Return the seed of one choice: a hash, so that the choices of adjacent seeds differ."""
    key = struct.pack("<QQQ", seed % 2**64, prompt_index, choice)
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def _common(options: GenerationOptions, card: ModelCard) -> dict[str, Any]:
    given, defaults, width = options.given, card.sampling_defaults, options.beam_width
    chosen = {"temperature": 1.0, **defaults, **given}
    if width > 1:  # beam search ranks by log probability and does not sample
        defaults = {name: defaults[name] for name in defaults if name == "repetition_penalty"}
        chosen = {**defaults, **given, "temperature": given.get("temperature") or 1.0}
    by_name = {
        ours: chosen[name] for name, ours in _BY_NAME.items() if chosen.get(name) is not None
    }
    if by_name.get("runtime_top_k") == -1:
        by_name["runtime_top_k"] = 0
    if given.get("logit_bias"):
        by_name["embedding_bias"] = _bias(given["logit_bias"], card.vocab_size)
    if options.prompt_table is not None:
        by_name["prompt_embedding_table"] = options.prompt_table
    if options.processor is not None:
        by_name["logits_post_processor"] = options.processor
    for name, ours in (("length_penalty", "len_penalty"), ("early_stopping", "early_stopping")):
        if name in given and width > 1:
            by_name[ours] = given[name]
    by_name.update(_engine_ends(options))
    # an end that only the server finds needs a stream, so that it is found during generation
    by_name["is_streaming"] = width == 1 and (options.streams or options.is_ended_here)
    return by_name


def _engine_ends(options: GenerationOptions) -> dict[str, Any]:
    """Return the engine's parameters for the end of an output.

    Until an output has `min_tokens` tokens, the engine bans end tokens. The engine cannot ignore
    stop tokens during that time, so with `min_tokens`, `Output` looks for stop tokens instead.
    """
    given = options.given
    found: dict[str, Any] = {}
    min_tokens = given.get("min_tokens", 0)
    if min_tokens:
        found["min_length"] = min_tokens
    if given.get("ignore_eos"):
        found["end_id"] = -1
    if given.get("stop_token_ids") and not min_tokens:
        found["stop_words_list"] = [[token] for token in given["stop_token_ids"]]
    return found


def _bias(by_token: Mapping[int, float], vocab_size: int) -> Any:
    bias = np.zeros(vocab_size, dtype=np.float32)
    for token, value in by_token.items():
        bias[token] = value
    return bias
