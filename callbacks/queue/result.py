"""Combines the responses to a request into a `GenerationResult`, or into an error to raise.

This module interprets the tensors of responses by name. Threads and waiting are in `generation`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from gptmanager import REQUEST_METRICS, FinishReason, InferenceRequest, NamedTensor, errors
from gptmanager.callbacks.text.stopped_text import StoppedText

# name of a tensor -> its axis of tokens; a streamed response has only the values of new tokens
_PER_NEW_TOKEN = {
    **{"generation_logits": 2, "output_log_probs": 2, "top_log_probs": 2, "top_log_prob_ids": 2}
}
_PER_TOKEN = {"context_logits": 1, **_PER_NEW_TOKEN}
_TOKENS = ("output_ids", "sequence_length")


@dataclass(frozen=True, eq=False)
class GenerationResult:
    """The output of a request that ended without an error: one sequence per beam, best first.

    `generated_ids` has the tokens of each sequence, without prompt and padding. If the request was
    cancelled, these are the tokens generated before. `metrics` has the fields of `REQUEST_METRICS`.
    Times are in seconds since the manager fetched the request, and NaN for an event that did not
    happen.

    `texts` is empty without `stop`. With `stop` it has the text of each sequence. If a stop string
    ended a sequence, its text is cut before the stop string, its last token is the one that
    completes the stop string, and its finish reason is STOP_WORDS.
    """

    request_id: int
    generated_ids: tuple[tuple[int, ...], ...]
    finish_reasons: tuple[FinishReason, ...]
    metrics: Mapping[str, float]
    _prompt: np.ndarray = field(repr=False)
    _parts: Mapping[str, list[torch.Tensor]] = field(repr=False)
    texts: tuple[str, ...] = ()

    @cached_property
    def prompt_ids(self) -> tuple[int, ...]:
        """The tokens of the prompt."""
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
        """Return the state to pickle, with copies of the tensors.

        The tensors of a step share memory, and a pickle would store all of this memory.
        """
        state = {one.name: getattr(self, one.name) for one in fields(self)}
        parts = {name: [part.clone() for part in own] for name, own in self._parts.items()}
        return {**state, "metrics": dict(self.metrics), "_parts": parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, metrics=MappingProxyType(state["metrics"]))


class ResponseCollector:
    """Collects the responses to `request`, in their order.

    `exclude_input` is the manager's `OptionalParams.exclude_input_in_output`. `new_text` creates
    the `StoppedText` of one output, which decides where the output ends. If `new_text` is None, no
    text is decoded.
    """

    def __init__(
        self,
        request: InferenceRequest,
        *,
        exclude_input: bool = False,
        new_text: Callable[[], StoppedText] | None = None,
    ) -> None:
        self._request = request
        self._exclude_input = exclude_input
        self._new_text = new_text
        self._outputs: list[list[int]] = []  # the generated tokens of each beam
        self._texts: list[StoppedText] = []
        self._parts: dict[str, list[torch.Tensor]] = {}

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has ended every output."""
        return bool(self._texts) and all(text.is_stopped for text in self._texts)

    @property
    def text_pieces(self) -> Sequence[str]:
        """The pieces of the best beam's text that were released so far."""
        return self._texts[0].pieces if self._texts else ()

    def add(self, tensors: Iterable[NamedTensor]) -> list[int]:
        """Add a response; return its new tokens if the request streams, else an empty list.

        With several beams, return the new tokens of the best beam.
        """
        by_name = dict(tensors)
        rows = self._take_rows(by_name)
        if rows and self._new_text is not None:
            self._texts = self._texts or [self._new_text() for _ in rows]
            _cut_rows(rows, by_name, self._texts)
        if not self._request.is_streaming or not self._outputs:
            self._outputs = rows
        else:
            for output, row in zip(self._outputs, rows, strict=bool(rows)):
                output += row
        for name, tensor in by_name.items():
            if name in _PER_TOKEN:
                self._parts.setdefault(name, []).append(tensor)
            else:
                self._parts[name] = [tensor]
        return rows[0].copy() if rows and self._request.is_streaming else []

    def new_tensors(self, seen: dict[str, int]) -> dict[str, torch.Tensor]:
        """Return, by name, the tensors that were added since the last call with the same `seen`.

        A tensor that is not in `_PER_TOKEN` is returned by every call. Streamed parts of a tensor
        are joined. Tokens are left out, because `add` has returned them. `seen` maps the name of a
        tensor to the number of its parts that the caller has received, and is updated.
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
        outputs = self._outputs or ([[]] if self._request.is_streaming else [])
        if outputs and (self._request.is_streaming or self._texts):
            beams = [torch.tensor(beam, dtype=torch.int32) for beam in outputs]
            padded = torch.nn.utils.rnn.pad_sequence(beams, batch_first=True)
            self._parts["output_ids"] = [padded[None]]
            self._parts["sequence_length"] = [torch.tensor([[*map(len, outputs)]]).int()]
        values: list[float] = self._values("request_metrics")
        metrics = dict(zip(REQUEST_METRICS, values, strict=False))
        for text in self._texts:
            text.finish()
        if len(outputs) == 1 and self.is_stopped:  # the manager may have counted cut tokens
            metrics["generated_tokens"] = float(len(outputs[0]))
        return GenerationResult(
            request_id=self._request.request_id,
            generated_ids=tuple(map(tuple, outputs)),
            finish_reasons=self._finish_reasons(),
            metrics=MappingProxyType(metrics),
            _prompt=prompt_of(self._request),
            _parts=self._parts,
            texts=tuple(text.text for text in self._texts),
        )

    def _finish_reasons(self) -> tuple[FinishReason, ...]:
        pairs = itertools.zip_longest(self._values("finish_reasons"), self._texts)
        return tuple(
            FinishReason.STOP_WORDS if text is not None and text.is_stopped else FinishReason(value)
            for value, text in pairs
        )

    def _take_rows(self, by_name: dict[str, torch.Tensor]) -> list[list[int]]:
        """Return the generated tokens of a response, one list for each beam.

        If the request streams, the tensors with tokens are removed from `by_name`.
        """
        ids, lengths = by_name.get("output_ids"), by_name.get("sequence_length")
        if self._request.is_streaming:
            for name in (*_TOKENS, "output_offset"):
                by_name.pop(name, None)
        if ids is None or lengths is None:
            return []
        ends = lengths.reshape(-1).tolist()
        rows: list[list[int]] = [row[:end] for row, end in zip(ids.tolist()[0], ends, strict=True)]
        return rows if self._request.is_streaming else self._without_prompt(rows)

    def _without_prompt(self, rows: list[list[int]]) -> list[list[int]]:
        prompt = prompt_of(self._request).tolist()
        # The tokens are compared, because `exclude_input` may differ from the manager's option.
        if self._exclude_input or any(row[: len(prompt)] != prompt for row in rows):
            return rows
        return [row[len(prompt) :] for row in rows]

    def _values(self, name: str) -> list[Any]:
        parts = self._parts.get(name)
        return [] if parts is None else parts[-1].reshape(-1).tolist()


def _cut_rows(
    rows: Sequence[list[int]], by_name: dict[str, torch.Tensor], texts: Sequence[StoppedText]
) -> None:
    """Remove the tokens after a stop string from a response, and their values in other tensors."""
    width = max(map(len, rows))
    for row, text in zip(rows, texts, strict=True):
        del row[text.push(row) :]
    longest = max(map(len, rows))
    for name in by_name.keys() & _PER_NEW_TOKEN.keys():
        axis = _PER_NEW_TOKEN[name]
        if by_name[name].shape[axis] == width:
            by_name[name] = by_name[name].narrow(axis, 0, longest)


def cancelled_response(request: InferenceRequest) -> list[NamedTensor]:
    """Return the final response to a request that was never fetched: no tokens, CANCELLED."""
    counts = {"pauses": 0, "cached_tokens": 0, "generated_tokens": 0}
    counts["prompt_tokens"] = len(prompt_of(request))
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


def prompt_of(request: InferenceRequest) -> np.ndarray:
    """Return the prompt's token ids `[n]`; empty without input_ids."""
    ids = request.tensors.get("input_ids", ())
    return np.asarray(ids.cpu() if isinstance(ids, torch.Tensor) else ids).reshape(-1)
