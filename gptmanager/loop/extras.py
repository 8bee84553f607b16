"""`HeldExtras`: log probabilities and logits that requests asked for, until they are sent.

Lies beside the requests, which hold no tensors, and survives their pauses. Decides what has been
sent; knows nothing of when a request ends. Indices count generated tokens, pauses or not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gptmanager.decoding.beam_search import BeamNode
from gptmanager.loop.active_request import ActiveRequest
from gptmanager.step import Extras, Row


class RequestExtras:
    """One request's. What is taken for sending is no longer held."""

    __slots__ = ("_context", "_context_end", "_generation", "_log_probs", "_vocab_size")

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._context: Tensor | None = None  # [prompt, vocab]
        self._context_end = 0  # positions of it that are computed
        self._generation: dict[int, Tensor] = {}  # by index, [beam, vocab]
        self._log_probs: list[float] = []

    def add_context(self, prompt_len: int, position: int, logits: Tensor) -> None:
        """Logits `[n, vocab]` of the prompt from `position` on; a restart brings them again."""
        if self._context is None:
            self._context = torch.empty(prompt_len, self._vocab_size)
        end = position + len(logits)
        self._context[position:end] = logits
        self._context_end = end

    def add_generation(self, index: int, logits: Sequence[Tensor]) -> None:
        """Those `[beam, vocab]` from which each token from `index` on is chosen."""
        self._generation.update(enumerate(logits, index))

    def beam_generation(self, nodes: Sequence[BeamNode]) -> Tensor:
        """`[n, vocab]`: what each node's token was chosen from; a replay has none of it."""
        known = self._generation
        rows = [known[n.length - 1][n.beam] for n in nodes if n.length - 1 in known]
        return torch.stack(rows) if rows else torch.empty(0, self._vocab_size)

    def add_log_probs(self, index: int, log_probs: list[float]) -> None:
        self._log_probs[index:] = log_probs

    def take_context(self) -> Tensor:
        """`[1, n, vocab]`: of the whole prompt, or of what was computed of it; once."""
        context, end = self._context, self._context_end
        self._context, self._context_end = None, 0
        if context is None:
            return torch.empty(1, 0, self._vocab_size)
        return context[None, :end]

    def take_generation(self, start: int, end: int) -> Tensor:
        """`[1, 1, n, vocab]` of the generated tokens `start <= index < end`."""
        found = [self._generation.pop(index, None) for index in range(start, end)]
        rows = [row for row in found if row is not None]
        if not rows:
            return torch.empty(1, 1, 0, self._vocab_size)
        return torch.cat(rows)[None, None]

    def log_probs(self, start: int, end: int) -> Tensor:
        """`[1, 1, n]` of the generated tokens `start <= index < end`."""
        return torch.tensor([[self._log_probs[start:end]]], dtype=torch.float32)

    def cum_log_probs(self, end: int) -> Tensor:
        """`[1, 1]`: the sum over all generated tokens before `end`."""
        return torch.tensor([[math.fsum(self._log_probs[:end])]], dtype=torch.float32)


class HeldExtras(dict[int, RequestExtras]):
    """Those of all requests that ask for any, by their ids."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def __missing__(self, request_id: int) -> RequestExtras:
        found = self[request_id] = RequestExtras(self._vocab_size)
        return found

    def take(self, by_id: Mapping[int, ActiveRequest], rows: Sequence[Row], extras: Extras) -> None:
        """Keep what a step gave; to be called before the step's tokens are confirmed.

        What belongs to a request that has ended or restarted since the launch is dropped, as its
        tokens are.
        """
        for request_id, epoch, position, logits in extras.context_logits:
            if (request := _find(by_id, request_id, epoch)) is not None:
                self[request_id].add_context(request.orig_prompt_len, position, logits)
        requests = [_find(by_id, row.request_id, row.epoch) for row in rows]
        for index, logits in extras.generation_logits:
            if (request := requests[index]) is not None:
                each = torch.split(logits, 1) if request.search is None else [logits]
                self[request.request_id].add_generation(request.num_output, each)
        if extras.log_probs is None:
            return
        for request, log_probs in zip(requests, extras.log_probs.tolist(), strict=True):
            if request is not None and request.output.config.log_probs:
                self[request.request_id].add_log_probs(request.num_output, log_probs)


def _find(by_id: Mapping[int, ActiveRequest], request_id: int, epoch: int) -> ActiveRequest | None:
    request = by_id.get(request_id)
    return request if request is not None and request.epoch == epoch else None
