"""Combines the responses to a request into a `GenerationResult`, or into an error to raise.

Interprets the tensors of responses by name. Does not use threads, queues or waiting.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from gptmanager import REQUEST_METRICS, FinishReason, InferenceRequest, NamedTensor, errors

# tensor -> its axis of tokens; a streaming response has the values of new tokens only
_PER_TOKEN = {
    **{"context_logits": 1, "generation_logits": 2, "output_log_probs": 2},
    **{"top_log_probs": 2, "top_log_prob_ids": 2},
}
_TOKENS = ("output_ids", "sequence_length")


@dataclass(frozen=True, eq=False)
class GenerationResult:
    """The output of a request that ended without an error: a sequence for each beam, best first.

    `generated_ids`: the tokens without prompt and padding; of a cancelled request, the tokens
    generated so far. `metrics` has the fields of `REQUEST_METRICS`: counts, and times in seconds
    since the manager fetched the request, NaN for an event that did not happen.
    """

    request_id: int
    generated_ids: tuple[tuple[int, ...], ...]
    finish_reasons: tuple[FinishReason, ...]
    metrics: Mapping[str, float]
    _prompt: np.ndarray = field(repr=False)
    _parts: Mapping[str, list[torch.Tensor]] = field(repr=False)

    @cached_property
    def prompt_ids(self) -> tuple[int, ...]:
        return tuple(self._prompt.tolist())

    @cached_property
    def output_ids(self) -> tuple[tuple[int, ...], ...]:
        """Prompt and generated tokens, without padding, even if the responses have no prompt."""
        return tuple(self.prompt_ids + generated for generated in self.generated_ids)

    @cached_property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """All response tensors by name; streamed parts are joined."""
        return MappingProxyType({name: _joined(name, parts) for name, parts in self._parts.items()})

    def __getstate__(self) -> dict[str, Any]:
        """Copy the tensors: those of a step share memory, which a pickle would hold as a whole."""
        state = {one.name: getattr(self, one.name) for one in fields(self)}
        parts = {name: [part.clone() for part in own] for name, own in self._parts.items()}
        return {**state, "metrics": dict(self.metrics), "_parts": parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, metrics=MappingProxyType(state["metrics"]))


class ResponseCollector:
    """Collects the responses to `request`, in their order.

    `exclude_input`: the manager's `OptionalParams.exclude_input_in_output`.
    """

    def __init__(self, request: InferenceRequest, *, exclude_input: bool = False) -> None:
        self._request = request
        self._exclude_input = exclude_input
        self._streamed: list[list[int]] = []  # one list for each beam
        self._parts: dict[str, list[torch.Tensor]] = {}

    def add(self, tensors: Iterable[NamedTensor]) -> list[int]:
        """Add a response; return its new tokens if the request streams, else an empty list.

        With several beams, return the tokens of the best beam.
        """
        by_name = dict(tensors)
        tokens: list[int] = []
        if self._request.is_streaming:
            output_ids = by_name.pop("output_ids", None)
            lengths = by_name.pop("sequence_length", None)
            by_name.pop("output_offset", None)
            if output_ids is not None and lengths is not None:
                tokens = self._stream(output_ids.tolist()[0], lengths.tolist()[0])
        for name, tensor in by_name.items():
            if name in _PER_TOKEN:
                self._parts.setdefault(name, []).append(tensor)
            else:
                self._parts[name] = [tensor]
        return tokens

    def new_tensors(self, seen: dict[str, int]) -> dict[str, torch.Tensor]:
        """Return the tensors by name that were added since the last call with the same `seen`.

        Parts are joined. Tokens are not included: `add` has returned them. `seen`: the number of
        parts of each tensor that the caller has; updated here.
        """
        found = {}
        for name, parts in self._parts.items():
            first = seen.get(name, 0) if name in _PER_TOKEN else 0
            if name not in _TOKENS and len(parts) > first:
                found[name] = _joined(name, parts[first:])
                seen[name] = len(parts)
        return found

    def result(self) -> GenerationResult:
        """Return the whole result. Call it after the final response."""
        prompt = _prompt_of(self._request)
        if self._request.is_streaming:
            generated = tuple(map(tuple, self._streamed or [[]]))
            beams = [torch.tensor(beam, dtype=torch.int32) for beam in generated]
            padded = torch.nn.utils.rnn.pad_sequence(beams, batch_first=True)
            self._parts["output_ids"] = [padded[None]]
            self._parts["sequence_length"] = [torch.tensor([[*map(len, generated)]]).int()]
        else:
            generated = self._without_prompt(prompt)
        return GenerationResult(
            request_id=self._request.request_id,
            generated_ids=generated,
            finish_reasons=tuple(FinishReason(value) for value in self._values("finish_reasons")),
            metrics=MappingProxyType(
                dict(zip(REQUEST_METRICS, self._values("request_metrics"), strict=False))
            ),
            _prompt=prompt,
            _parts=self._parts,
        )

    def _stream(self, beams: list[list[int]], lengths: list[int]) -> list[int]:
        new = [beam[:length] for beam, length in zip(beams, lengths, strict=True)]
        self._streamed = self._streamed or [[] for _ in new]
        for beam, tokens in zip(self._streamed, new, strict=True):
            beam += tokens
        return new[0]

    def _without_prompt(self, prompt: np.ndarray) -> tuple[tuple[int, ...], ...]:
        if "output_ids" not in self._parts:
            return ()
        lengths = self._values("sequence_length")
        beams = self._parts["output_ids"][0].numpy().reshape(len(lengths), -1)
        # a host may have forgotten exclude_input: so the tokens are compared
        included = not self._exclude_input and all(
            length >= len(prompt) and np.array_equal(beam[: len(prompt)], prompt)
            for beam, length in zip(beams, lengths, strict=True)
        )
        start = len(prompt) if included else 0
        return tuple(
            tuple(beam[start:length].tolist()) for beam, length in zip(beams, lengths, strict=True)
        )

    def _values(self, name: str) -> list[int]:
        parts = self._parts.get(name)
        return [] if parts is None else parts[-1].reshape(-1).tolist()


def cancelled_response(request: InferenceRequest) -> list[NamedTensor]:
    """Return the final response to a request that was never fetched: no tokens, CANCELLED."""
    counts = {"pauses": 0, "cached_tokens": 0, "generated_tokens": 0}
    counts["prompt_tokens"] = len(_prompt_of(request))
    metrics = [counts.get(name, math.nan) for name in REQUEST_METRICS]
    return [
        NamedTensor("output_ids", torch.empty((1, 1, 0), dtype=torch.int32)),
        NamedTensor("sequence_length", torch.zeros((1, 1), dtype=torch.int32)),
        NamedTensor("finish_reasons", torch.tensor([[FinishReason.CANCELLED]], dtype=torch.int32)),
        NamedTensor("request_metrics", torch.tensor(metrics, dtype=torch.float64)),
    ]


def error_of(text: str) -> errors.GptManagerError:
    """Return the error of an error response, which begins with the name of the error's class.

    A text without the name of a class of `gptmanager.errors` becomes a RequestError.
    """
    match = re.match(r"(\w+): ", text)
    cls = getattr(errors, match.group(1), None) if match else None
    if match and isinstance(cls, type) and issubclass(cls, errors.GptManagerError):
        return cls(text[match.end() :])
    return errors.RequestError(text)


def _joined(name: str, parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=_PER_TOKEN[name])


def _prompt_of(request: InferenceRequest) -> np.ndarray:
    ids = request.tensors.get("input_ids", ())
    return np.asarray(ids.cpu() if isinstance(ids, torch.Tensor) else ids).reshape(-1)
