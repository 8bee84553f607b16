"""Functions that reduce the data of an iteration to what a replay reads, for a black box.

Requests are copied, because a host may overwrite its arrays later, or pass a part of a larger
array. Numbers that only the executor reads are kept as a digest, processors as a name, and errors
as a text. Otherwise the black box would keep whole objects of the host in memory.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch

from gptmanager.errors import response_text
from gptmanager.loop.admission import read_draft_logits
from gptmanager.peft_cache.work import AdapterDone
from gptmanager.recorder.requests import Opaque, RecordedError, recorded_processor, without_weights
from gptmanager.recorder.sizes import value_bytes
from gptmanager.request.arrays import ROW_INPUTS, is_too_large
from gptmanager.request.inference_request import KEYWORDS, InferenceRequest
from gptmanager.request.input_rows import HostRows
from gptmanager.request.post_processor import RequestProcessor, is_post_processor
from gptmanager.request.read_tensors import read_bias, read_int, read_rows, read_token_ids
from gptmanager.step import Failure, Intake, Schedule, SequenceStart, StepResult

_Effect = TypeVar("_Effect", Failure, AdapterDone)


class Keeper:
    """A copier of intakes. It reads rows of numbers as admission does, so it needs their widths."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        self._vocab_size = vocab_size
        self._hidden_size = hidden_size

    def intake(self, intake: Intake) -> Intake:
        """Return a copy of an intake, with only the data that a replay reads."""
        return replace(
            intake,
            requests=tuple(map(self._request, intake.requests)),
            failures=tuple(map(_without_error, intake.failures)),
            adapters=tuple(map(_without_error, intake.adapters)),
        )

    def _request(self, request: InferenceRequest) -> InferenceRequest:
        keywords = {name: _copied(getattr(request, name)) for name in KEYWORDS}
        keywords["logits_post_processor"] = _named(request.logits_post_processor)
        kept = {
            name: self._tensor(name, value, request)
            for name, value in list(request.tensors.items())
        }
        return InferenceRequest(request.request_id, kept, **keywords)

    def _tensor(self, name: str, value: Any, request: InferenceRequest) -> Any:
        if name == "lora_weights" and isinstance(value, (np.ndarray, torch.Tensor, list, tuple)):
            with suppress(BaseException):  # admission refuses it
                return without_weights(value)
        if name in ROW_INPUTS:
            with suppress(BaseException):  # the error ends the request, also in a replay
                rows = self._rows(name, value, request.tensors)
                if rows is None:
                    return HostRows(None)
                request.tensors[name] = rows  # admission reuses `rows`: a digest is slow to compute
                return rows.without_numbers()
        try:
            value_bytes(value)
            if is_too_large(name, value):
                return Opaque(type(value).__name__)
        except BaseException:  # noqa: B036 - an object of the host; admission refuses it
            return Opaque(type(value).__name__)
        return _copied(value)

    def _rows(self, name: str, value: Any, tensors: dict[str, Any]) -> HostRows | None:
        """Read rows of numbers as admission does; return None if all are zero."""
        if name == "embedding_bias":
            return read_bias(name, value, self._vocab_size)
        if name == "draft_logits":
            drafts = read_token_ids("draft_input_ids", tensors["draft_input_ids"], self._vocab_size)
            return read_draft_logits(value, drafts, self._vocab_size)
        rows = read_rows(name, value, self._hidden_size)
        size = tensors.get("prompt_vocab_size", rows.count)
        return rows.first(read_int("prompt_vocab_size", size, 1, rows.count))


def kept_schedule(schedule: Schedule) -> Schedule:
    """Return a schedule without the numbers that only the executor reads."""
    return replace(schedule, starts=tuple(map(_without_numbers, schedule.starts)))


def kept_result(result: StepResult) -> StepResult:
    """Return a result without logits and log probabilities, and with errors as text."""
    return replace(result, extras=None, failures=tuple(map(_without_error, result.failures)))


def _copied(value: Any) -> Any:
    """Return a copy of an array, and any other value as it is."""
    with suppress(BaseException):  # some tensors cannot be copied
        if isinstance(value, np.ndarray):
            return value.copy()
        if isinstance(value, torch.Tensor):
            return value.detach().clone()
    return value


def _without_error(value: _Effect) -> _Effect:
    """Replace an error by its text, because an error keeps stack frames and their tensors alive."""
    if value.error is None:
        return value
    return value._replace(error=RecordedError(response_text(value.error)))


def _named(processor: Any) -> Any:
    try:
        if not is_post_processor(processor):
            return processor  # None, or a value that admission refuses
        named = RequestProcessor(processor)
    except BaseException:  # noqa: B036 - an object of the host; it is refused
        return Opaque(type(processor).__name__)
    return recorded_processor(named.name, named.prepares)


def _without_numbers(start: SequenceStart) -> SequenceStart:
    table, logits = start.prompt_table, start.draft_logits
    return start._replace(
        sampling=start.sampling.without_numbers(),
        prompt_table=None if table is None else table.without_numbers(),
        draft_logits=None if logits is None else logits.without_numbers(),
    )
