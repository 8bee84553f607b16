"""A model without weights, and callbacks that record their calls.

Everything here uses only the public contract, so a host can test its callbacks in milliseconds,
without a checkpoint and without a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gptmanager.arguments import at_least, function
from gptmanager.lifecycle.condition import Condition
from gptmanager.manager.gpt_manager import GptManager
from gptmanager.memory.kv_pool import KvPool
from gptmanager.models.batch import Batch
from gptmanager.request.inference_request import InferenceRequest, NamedTensor
from gptmanager.testing.scripted_executor import NextToken


@dataclass(frozen=True, slots=True)
class ScriptedSpec:
    """The fields of a model's spec that a manager reads.

    With the default of 0 layers, the KV cache takes no memory.
    """

    vocab_size: int
    max_position_embeddings: int
    num_layers: int = 0
    num_kv_heads: int = 1
    head_dim: int = 1


class ScriptedModel:
    """A `Model` without weights; `next_token` maps a sequence's tokens so far to the next token.

    >>> model = ScriptedModel(lambda history: history[-1] + 1)
    """

    nbytes = 0

    def __init__(
        self, next_token: NextToken, *, vocab_size: int = 1000, max_position_embeddings: int = 2048
    ) -> None:
        at_least(1, "ScriptedModel.vocab_size", vocab_size)
        at_least(1, "ScriptedModel.max_position_embeddings", max_position_embeddings)
        self.next_token = function("ScriptedModel.next_token", next_token)
        self.spec = ScriptedSpec(vocab_size, max_position_embeddings)
        self.num_forwards = 0
        self.num_tokens = 0  # input tokens of all forwards

    def forward(self, batch: Batch, kv_pool: KvPool) -> Tensor:
        """Return logits `[rows, vocab]` that choose the tokens of the script."""
        self.num_forwards += 1
        self.num_tokens += len(batch.token_ids)
        rows = batch.sample_rows.tolist()
        logits = torch.full((len(rows), self.spec.vocab_size), -1e4)
        lengths = (batch.positions[batch.sample_index] + 1).tolist()
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            history = batch.token_table[int(batch.slots[row]), :length].tolist()
            token = self.next_token(history)
            if not 0 <= token < self.spec.vocab_size:
                raise ValueError(
                    f"next_token({history}) = {token}: must be from 0 to {self.spec.vocab_size - 1}"
                )
            logits[index, token] = 0.0
        return logits


@dataclass(frozen=True, slots=True)
class Response:
    """One call of SendResponse."""

    request_id: int
    tensors: dict[str, Tensor]
    is_final: bool
    error: str


class RecordingCallbacks:
    """The four callbacks of a host, which record the arguments of their calls.

    `submit` and `stop` may be called from any thread. If `manager` is set, `submit` wakes it.
    """

    def __init__(self, requests: Iterable[InferenceRequest] = ()) -> None:
        self.manager: GptManager | None = None
        self.responses: list[Response] = []
        self.statistics: list[str] = []
        self.rooms: list[int] = []  # max_num_requests of each GetInferenceRequests call
        self._lock = threading.RLock()
        self._has_ended = Condition()  # notified at each final response
        self._waiting = list(requests)
        self._stops: set[int] = set()

    def submit(self, *requests: InferenceRequest) -> None:
        """Queue requests for GetInferenceRequests."""
        with self._lock:
            self._waiting.extend(requests)
        if self.manager is not None:
            self.manager.notify()

    def stop(self, *request_ids: int) -> None:
        """Let PollStopSignal return these ids until the requests' final responses."""
        with self._lock:
            self._stops.update(request_ids)

    def get_inference_requests(self, max_num_requests: int) -> list[InferenceRequest]:
        """Return submitted requests in order, at most `max_num_requests` if it is not negative."""
        with self._lock:
            self.rooms.append(max_num_requests)
            count = len(self._waiting) if max_num_requests < 0 else max_num_requests
            taken, self._waiting = self._waiting[:count], self._waiting[count:]
            return taken

    def send_response(
        self, request_id: int, tensors: Sequence[NamedTensor], is_final: bool, error: str
    ) -> None:
        """Record a response."""
        with self._lock:
            self.responses.append(Response(request_id, dict(tensors), is_final, error))
            if is_final:
                self._stops.discard(request_id)
        if is_final:
            self._has_ended.notify_all()

    def poll_stop_signal(self) -> set[int]:
        """Return the ids of all requests that were stopped."""
        with self._lock:
            return set(self._stops)

    def return_batch_manager_stats(self, record: str) -> None:
        """Record a statistics record."""
        self.statistics.append(record)

    def keywords(self) -> dict[str, Any]:
        """Return the four callbacks as keyword arguments of GptManager."""
        return {
            "get_inference_requests_cb": self.get_inference_requests,
            "send_response_cb": self.send_response,
            "poll_stop_signal_cb": self.poll_stop_signal,
            "return_batch_manager_stats_cb": self.return_batch_manager_stats,
        }

    def of(self, request_id: int) -> list[Response]:
        """Return the responses to a request, in order of arrival."""
        with self._lock:
            return [r for r in self.responses if r.request_id == request_id]

    def final(self, request_id: int, timeout: float = 30.0) -> Response:
        """Wait for the final response to a request, and return it.

        Raise TimeoutError if it does not arrive within `timeout` seconds.
        """
        finals = self._has_ended.wait_for(
            lambda: [r for r in self.of(request_id) if r.is_final], timeout
        )
        if not finals:
            raise TimeoutError(f"no final response to request {request_id} within {timeout} s")
        return finals[0]

    def output(self, request_id: int) -> list[int]:
        """Return the tokens of `output_ids` in all responses to a request, without padding.

        If there are several beams, return the tokens of the best beam.
        """
        tokens: list[int] = []
        for response in self.of(request_id):
            if not response.error:
                count = int(response.tensors["sequence_length"][0, 0])
                tokens += response.tensors["output_ids"][0, 0, :count].tolist()
        return tokens
