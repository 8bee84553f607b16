"""The inputs of logits post-processors in a step: rows, histories, and the stream.

This module does not know which processors are called, or what they do to the logits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gptmanager.cuda.device.streams import Stream
from gptmanager.request.post_processor import BoundProcessor, RequestProcessor
from gptmanager.step import SequenceStart

Ints = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]


class ModelStream:
    """The stream on which the logits of `device` are computed; does nothing on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._contexts: list[AbstractContextManager[Any]] = []

    @property
    def cuda_stream(self) -> int:
        """The `cudaStream_t`; 0 on the CPU."""
        return 0 if self._stream is None else int(self._stream.cuda_stream)

    @property
    def stream_id(self) -> int:
        return 0 if self._stream is None else int(self._stream.stream_id)

    @property
    def device_index(self) -> int:
        """The index of the CUDA device; -1 on the CPU."""
        return -1 if self._stream is None else int(self._stream.device_index)

    def __cuda_stream__(self) -> tuple[int, int]:
        """Implement CUDA's stream protocol, which `cupy.cuda.Stream.from_external` reads."""
        return 0, self.cuda_stream

    def synchronize(self) -> None:
        """Wait until all enqueued work has run."""
        if self._stream is not None:
            self._stream.synchronize()

    def __enter__(self) -> ModelStream:
        if self._stream is not None:
            context: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
            context.__enter__()
            self._contexts.append(context)
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._stream is not None:
            self._contexts.pop().__exit__(*exc)


class ProcessedSequence:
    """A sequence with a logits post-processor.

    `shared` is the object to call. It is the request's own callable, or a processor that several
    requests share. `error` ends the request if it is not None.
    """

    __slots__ = (
        "beam_width", "bound", "client_id", "end_ids", "error", "history", "is_searched",
        "orig_prompt_len", "request", "request_id", "shared",
    )  # fmt: skip

    def __init__(self, start: SequenceStart, request: RequestProcessor) -> None:
        self.request = request
        self.bound = request.post_processor
        self.shared = self.bound.owner if isinstance(self.bound, BoundProcessor) else self.bound
        self.beam_width = start.beam_width
        self.is_searched = start.beam_width > 1 and not start.sampled
        self.orig_prompt_len = start.orig_prompt_len
        self.end_ids = frozenset(start.sampling.end_ids)
        self.client_id = start.client_id
        self.request_id = -1  # set by its first row
        self.history: list[int] = []
        self.error: BaseException | None = None

    @property
    def has_ended(self) -> bool:
        return self.request.post_processor is None

    def beams(self, tokens: Tokens, lines: Ints, length: int) -> list[list[int]]:
        """Return the history of each beam. A single beam has one list, which each call extends."""
        if self.beam_width > 1:  # beams fork, so their histories change
            beams: list[list[int]] = tokens[lines, :length].tolist()
            return beams
        history = self.history
        history.extend(tokens[lines[0], len(history) : length].tolist())
        return [history]


@dataclass(slots=True, eq=False)
class Rows:
    """The rows of one step that share a processor; each beam has a row.

    `logits` float32 `[S, vocab]` are the logits of all rows of the step. The processor changes the
    rows at the indices `index` `[n]` in place. The history of row `index[i]` is the first
    `lengths[i]` tokens in line `lines[i]` of `tokens` int32 `[num_lines, max_seq_len]`.
    `token_tensor` is `tokens` on the device of the logits.
    """

    logits: Tensor
    index: Ints
    sequences: Sequence[ProcessedSequence]
    lines: Ints
    lengths: Ints
    tokens: Tokens
    token_tensor: Tensor


Errors = Mapping[int, BaseException]  # key i: the error of row `Rows.index[i]`


class RowSession(ABC):
    """The state of a `RowProcessor` in one manager."""

    @abstractmethod
    def load(self, line: int, bound: Any) -> None:
        """Prepare for the sequence, or the beam of a sequence, that starts in `line`.

        `bound` is the `BoundProcessor` of its request.
        """

    @abstractmethod
    def process(self, rows: Rows) -> Errors:
        """Change the logits.

        A returned error ends the request of its row. A raised error ends the requests of all rows.
        """


class RowProcessor(ABC):
    """Serves all rows of a step that have a `BoundProcessor` with this object as its owner."""

    @abstractmethod
    def open(self, num_lines: int, stream: Stream | None) -> RowSession:
        """Open a session for a manager of `num_lines` lines; called on the manager's loop thread.

        The logits are on the device of `stream`, or on the CPU if `stream` is None.
        """
