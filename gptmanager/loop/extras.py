"""`HeldExtras`: the log probabilities and logits that requests ask for, until they are sent.

These extras are kept outside of the requests, and survive pauses. The module tracks which extras
have been sent, but does not notice the end of a request. An index counts generated tokens from the
start of the output. Pauses do not change the index.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gptmanager.decoding.search.beam_search import BeamNode
from gptmanager.loop.active_request import ActiveRequest
from gptmanager.step import Extras, Progress, PromptLogProbs, Row


class LogProbsByRank(NamedTuple):
    """The best k tokens at n positions.

    `log_probs` are float32 `[n, k]`, `ids` int32 `[n, k]`.
    """

    log_probs: Tensor
    ids: Tensor


class _PromptScores(NamedTuple):
    """Scores of the n prompt tokens after the first.

    `log_probs` `[n]` are of the tokens themselves, `top_log_probs` and `top_ids` `[n, k]` of the
    best k tokens at each position.
    """

    log_probs: Tensor
    top_log_probs: Tensor
    top_ids: Tensor


class RequestExtras:
    """The extras of one request. The `take_` methods remove what they return."""

    __slots__ = (
        *("_context", "_context_end", "_generation", "_log_probs", "_vocab_size"),
        *("_prompt", "_prompt_end", "_top", "prompt_is_sent"),
    )

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._context: Tensor | None = None  # [prompt, vocab]
        self._context_end = 0  # number of computed positions
        self._generation: dict[int, Tensor] = {}  # by index, [beam, vocab]
        self._log_probs: list[float] = []
        self._top: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by index, each [beam, k]
        self._prompt: _PromptScores | None = None
        self._prompt_end = 0  # number of scored tokens
        self.prompt_is_sent = False

    def add_context(self, prompt_len: int, position: int, logits: Tensor) -> None:
        """Store logits `[n, vocab]` of the prompt from `position` on.

        A restarted request stores its logits again.
        """
        if self._context is None:
            self._context = torch.empty(prompt_len, self._vocab_size)
        end = position + len(logits)
        self._context[position:end] = logits
        self._context_end = end

    def add_prompt(self, prompt_len: int, found: PromptLogProbs) -> None:
        """Store log probabilities of a part of the prompt.

        A restarted request stores its log probabilities again.
        """
        if self._prompt is None:
            shape = prompt_len - 1, found.top_ids.shape[1]
            self._prompt = _PromptScores(
                torch.empty(shape[0]), torch.empty(shape), torch.empty(shape, dtype=torch.int32)
            )
        self._prompt_end = found.position + len(found.log_probs)
        own = slice(found.position, self._prompt_end)
        for whole, part in zip(self._prompt, found[3:], strict=True):
            whole[own] = part

    def add_top(self, index: int, each: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Store top log probabilities and ids for the generated tokens from `index` on.

        `each` has two arrays `[beam, k]` for each of these tokens.
        """
        self._top.update(enumerate(each, index))

    def add_generation(self, index: int, logits: Sequence[Tensor]) -> None:
        """Store the logits of the generated tokens from `index` on, `[beam, vocab]` per token."""
        self._generation.update(enumerate(logits, index))

    def beam_generation(self, nodes: Sequence[BeamNode]) -> Tensor:
        """Return the logits `[n, vocab]` from which the tokens of `nodes` were chosen.

        The result is empty in a replay, which does not compute logits.
        """
        known = self._generation
        rows = [known[n.length - 1][n.beam] for n in nodes if n.length - 1 in known]
        return torch.stack(rows) if rows else torch.empty(0, self._vocab_size)

    def add_log_probs(self, index: int, log_probs: list[float]) -> None:
        """Store the log probabilities of the generated tokens from `index` on."""
        self._log_probs[index:] = log_probs

    def take_context(self) -> Tensor:
        """Remove and return the logits `[1, n, vocab]` of the prompt, or of its computed part."""
        context, end = self._context, self._context_end
        self._context, self._context_end = None, 0
        if context is None:
            return torch.empty(1, 0, self._vocab_size)
        return context[None, :end]

    def take_prompt(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Remove and return the scores of the prompt's computed tokens after the first token.

        The scores are the log probabilities `[1, n]` of the tokens, and the log probabilities and
        ids `[1, n, count]` of the best `count` tokens. A second call returns empty tensors.
        """
        found, end = self._prompt, self._prompt_end
        self._prompt, self._prompt_end, self.prompt_is_sent = None, 0, True
        if found is None:
            ids = torch.empty(1, 0, count, dtype=torch.int32)
            return torch.empty(1, 0), torch.empty(1, 0, count), ids
        return (
            found.log_probs[None, :end],
            found.top_log_probs[None, :end],
            found.top_ids[None, :end],
        )

    def take_top(self, start: int, end: int, count: int) -> LogProbsByRank:
        """Remove and return the top log probabilities of generated tokens `start <= index < end`.

        Only for a request without beams.
        """
        return _stacked([self._top.pop(i) for i in range(start, end) if i in self._top], count)

    def beam_top(self, nodes: Sequence[BeamNode], count: int) -> LogProbsByRank:
        """Return the top log probabilities at the token of each node.

        The result is empty in a replay, which does not compute them.
        """
        known = self._top
        found = [
            tuple(array[node.beam, None] for array in known[node.length - 1])
            for node in nodes
            if node.length - 1 in known
        ]
        return _stacked(found, count)

    def take_generation(self, start: int, end: int) -> Tensor:
        """Remove and return logits `[1, 1, n, vocab]` of generated tokens start <= index < end."""
        found = [self._generation.pop(index, None) for index in range(start, end)]
        rows = [row for row in found if row is not None]
        if not rows:
            return torch.empty(1, 1, 0, self._vocab_size)
        return torch.cat(rows)[None, None]

    def log_probs(self, start: int, end: int) -> Tensor:
        """Return the log probabilities `[1, 1, n]` of generated tokens `start <= index < end`."""
        return torch.tensor([[self._log_probs[start:end]]], dtype=torch.float32)

    def cum_log_probs(self, end: int) -> Tensor:
        """Return the sum `[1, 1]` of the log probabilities of all generated tokens before `end`."""
        return torch.tensor([[math.fsum(self._log_probs[:end])]], dtype=torch.float32)


class HeldExtras(dict[int, RequestExtras]):
    """The `RequestExtras` of each request that asks for extras, by request id."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def __missing__(self, request_id: int) -> RequestExtras:
        found = self[request_id] = RequestExtras(self._vocab_size)
        return found

    def resume(self, progress: Progress) -> None:
        """Keep the log probabilities that an earlier process has computed for a request.

        If that process has generated a token, the prompt's log probabilities are not sent again.
        """
        extras = self[progress.request_id]
        extras.add_log_probs(0, list(progress.log_probs))
        extras.prompt_is_sent = bool(progress.tokens)

    def take(self, by_id: Mapping[int, ActiveRequest], rows: Sequence[Row], extras: Extras) -> None:
        """Keep the extras of a step. Call this before the step's tokens are confirmed.

        Extras of a request that has ended or restarted since the launch are dropped.
        """
        for request_id, epoch, position, logits in extras.context_logits:
            if (request := _find(by_id, request_id, epoch)) is not None:
                self[request_id].add_context(request.orig_prompt_len, position, logits)
        for found in extras.prompt_log_probs:
            if (request := _find(by_id, found.request_id, found.epoch)) is not None:
                self[found.request_id].add_prompt(request.orig_prompt_len, found)
        requests = [_find(by_id, row.request_id, row.epoch) for row in rows]
        for index, log_probs, ids in extras.top_log_probs:
            if (request := requests[index]) is not None:
                if request.search is None:  # one sequence, n tokens
                    each = list(zip(log_probs[:, None], ids[:, None], strict=True))
                else:
                    each = [(log_probs, ids)]
                self[request.request_id].add_top(request.num_output, each)
        for index, logits in extras.generation_logits:
            if (request := requests[index]) is not None:
                own = torch.split(logits, 1) if request.search is None else [logits]
                self[request.request_id].add_generation(request.num_output, own)
        if extras.log_probs is None:
            return
        for request, own in zip(requests, extras.log_probs.tolist(), strict=True):
            if request is not None and request.output.config.log_probs:
                self[request.request_id].add_log_probs(request.num_output, own)


def _find(by_id: Mapping[int, ActiveRequest], request_id: int, epoch: int) -> ActiveRequest | None:
    request = by_id.get(request_id)
    return request if request is not None and request.epoch == epoch else None


def _stacked(found: Sequence[tuple[np.ndarray, ...]], count: int) -> LogProbsByRank:
    """Concatenate the log probabilities and ids `[1, count]` of each of n tokens."""
    if not found:
        return LogProbsByRank(torch.empty(0, count), torch.empty(0, count, dtype=torch.int32))
    log_probs, ids = (torch.from_numpy(np.concatenate(own)) for own in zip(*found, strict=True))
    return LogProbsByRank(log_probs, ids)
