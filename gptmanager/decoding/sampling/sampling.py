"""`Sampler`: chooses one token per row of a step's logits, each row by its own parameters.

The order of operations is fixed: embedding bias, penalties, bad words, n-grams and min_length
(`adjustments`), then temperature, top-k, top-p and min-p (`choice`). This module keeps the
parameters in tables with one line for each beam of a sequence, and distributes rows to threads.
Logits post-processors have run before. The module knows nothing of requests, stop words and models.

A row's token depends bit for bit only on its own logits, parameters, history, seed and position,
because one thread computes the whole row, as one block does on a GPU.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import carray  # type: ignore[attr-defined]
from torch import Tensor

from gptmanager.cuda.sampling import adjustments, log_probs, sampling
from gptmanager.decoding.sampling.adjustments import adjust
from gptmanager.decoding.sampling.best_tokens import log_probs_from_known
from gptmanager.decoding.sampling.choice import (
    BLOCK,
    NOTHING,
    draw_token,
    find_best,
    find_kth,
    padded,
    weigh,
)
from gptmanager.kernels.simd.lanes import (
    claim,
    get,
    get_long,
    loop,
    pointer_to,
    put,
    put_int,
    task_at,
)
from gptmanager.kernels.simd.machine_code import compiled
from gptmanager.kernels.simd.threads import NEXT_PART, NEXT_THREAD, Team, task_fields
from gptmanager.request.output_options import NO_EXTRAS, OutputConfig
from gptmanager.request.sampling_params import SamplingParams

Ints = npt.NDArray[np.int64]

CHOICE, ADJUSTMENT = sampling.PARAMS, adjustments.PARAMS  # records that CUDA kernels read as well
NO_VALUE, LOGIT = log_probs.NOTHING, log_probs.LOGIT
_SMALL = 1 << 15  # for this many logits, waking a second thread costs about as much as it saves


class SampleTask(ctypes.Structure):
    """The addresses and sizes for one run. `seen` and `weights` have one part for each thread.

    If `tokens` is 0, rows are adjusted but no tokens are chosen.
    """

    _fields_ = task_fields(
        "logits lines positions choices adjustments wanted histories tokens log_probs seen"
        " weights num_lines vocab_size history_size weights_size"
    )


_TASK = np.dtype(SampleTask)


@loop
def _log_prob(p: Any, wanted: int, x: int, token: int, top: Any, total: float) -> Any:
    """Return the log probability, or the logit, of the chosen token, after the temperature.

    If the best logit overflows when divided by the temperature, the best token is chosen, and
    the log probability is 0.
    """
    scaled, highest = get(x, token) / p.temperature, top / p.temperature
    if wanted == LOGIT:
        return np.float64(scaled)
    if not np.isfinite(highest):
        return 0.0
    return np.float64(scaled) - np.float64(highest) - np.log(total)


@loop
def _choose(t: Any, p: Any, wanted: int, row: int, x: int, weights: int) -> None:
    size, sums = t.vocab_size, weights + 4 * padded(t.vocab_size)
    token, top = find_best(x, size)
    if token < 0:
        put_int(t.tokens, row, token)
        return
    # if the quotient is infinite, the weights are useless: the best token has all the mass
    greedy = p.greedy or not np.isfinite(top / p.temperature)
    total = 0.0
    if np.isfinite(top / p.temperature) and (wanted != NO_VALUE or not (greedy or p.top_k)):
        total = weigh(x, size, p.temperature, top, NOTHING, weights, sums)
    whole = total
    if not greedy:
        if p.top_k:
            kth = find_kth(x, size, p.top_k, top, weights)
            total = weigh(x, size, p.temperature, top, kth, weights, sums)
        position = get_long(t.positions, row)
        token = draw_token(p, position, total, weights, sums, size)
    put_int(t.tokens, row, token)
    if wanted != NO_VALUE:
        put(t.log_probs, row, np.float32(_log_prob(p, wanted, x, token, top, whole)))


def sample_rows(address: int) -> None:
    """Adjust the rows that this thread claims in place, and choose their tokens."""
    t = task_at(address, _TASK)
    choices = carray(pointer_to(t.choices), t.num_lines, CHOICE)
    adjusted = carray(pointer_to(t.adjustments), t.num_lines, ADJUSTMENT)
    wanted = carray(pointer_to(t.wanted), t.num_lines, np.uint8)
    thread = claim(address, NEXT_THREAD)
    seen = t.seen + 4 * thread * t.vocab_size
    weights = t.weights + 4 * thread * t.weights_size
    row = claim(address, NEXT_PART)
    while row < t.num_parts:
        line = get_long(t.lines, row)
        x = t.logits + 4 * row * t.vocab_size
        if adjusted[line].adjusts:
            history = t.histories + 4 * line * t.history_size
            position = get_long(t.positions, row)
            length = min(position, t.history_size)
            adjust(x, t.vocab_size, adjusted[line], history, length, position, seen)
        if t.tokens:
            _choose(t, choices[line], wanted[line], row, x, weights)
        row = claim(address, NEXT_PART)


class Sampler:
    """Keeps the sampling parameters of each line, and chooses the tokens of any set of lines.

    As in transformers, top_k keeps all ties with the k-th best token, top_p keeps the fewest best
    tokens with a mass of at least p in single precision, min_p is relative to the best token's
    probability, and the best token is always kept. Equal logits rank by ascending id (in
    transformers, their order is undefined).

    Invalid logits affect their own row only. The token of a row is NOT_FINITE if any of its logits
    is NaN or +inf, and NO_TOKEN if all its logits are -inf.

    `histories` int32 `[num_lines, length]` has the tokens of each line. Penalties, bad words and
    n-grams read the tokens before the position for which a token is chosen.
    """

    def __init__(
        self, num_lines: int, vocab_size: int, histories: npt.NDArray[np.int32] | None = None
    ) -> None:
        self.vocab_size = vocab_size
        self._histories = np.zeros((num_lines, 0), np.int32) if histories is None else histories
        self._choices: npt.NDArray[np.void] = np.zeros(num_lines, dtype=CHOICE)
        self._adjustments: npt.NDArray[np.void] = np.zeros(num_lines, dtype=ADJUSTMENT)
        self._lists = [np.empty(0, dtype=np.int32)] * num_lines  # `_adjustments` points to them
        self._wanted = np.full(num_lines, NO_VALUE, dtype=np.uint8)
        tables = {
            "choices": self._choices,
            "adjustments": self._adjustments,
            "wanted": self._wanted,
            "histories": self._histories,
        }
        self._addresses = {name: table.ctypes.data for name, table in tables.items()}
        self._team = Team()
        self._body = compiled(sample_rows)
        self._weights_size = padded(vocab_size) + padded(vocab_size) // BLOCK
        self._seen = np.zeros((0, vocab_size), dtype=np.int32)
        self._weights = np.zeros((0, self._weights_size), dtype=np.float32)

    def load(
        self,
        line: int,
        params: SamplingParams,
        orig_prompt_len: int,
        output_config: OutputConfig = NO_EXTRAS,
    ) -> None:
        """Set the sampling parameters of the sequence that starts in `line`. They must be valid.

        `orig_prompt_len` is the number of prompt tokens that the host passed. For min_length and
        the penalties, all tokens after these are generated tokens.
        """
        lists = self._lists[line] = adjustments.pack_lists(params)
        self._choices[line] = sampling.pack(params, self.vocab_size)
        self._adjustments[line] = adjustments.pack(
            params, orig_prompt_len, self.vocab_size, lists.ctypes.data
        )
        self._wanted[line] = NO_VALUE
        if output_config.log_probs or output_config.num_top_log_probs:
            self._wanted[line] = log_probs.LOG_PROB if output_config.normalized else LOGIT

    def sample(
        self,
        logits: Tensor,
        lines: Ints,
        positions: Ints,
        log_probs: npt.NDArray[np.float32] | None = None,
    ) -> npt.NDArray[np.int32]:
        """Return the next token of each of S rows, int32 `[S]`.

        `logits` float32 `[S, vocab_size]` are on the CPU, and may be changed. `lines` int64 `[S]`
        are the rows' lines, and `positions` int64 `[S]` the absolute positions of the tokens to be
        chosen. `log_probs` float32 `[S]` receives the chosen tokens' log probabilities, or their
        logits after the temperature, in the rows of lines with an `output_config` that requests
        them. Raise ValueError for logits of another dtype, shape or device.
        """
        tokens = np.empty(len(lines), dtype=np.int32)
        if log_probs is None:
            log_probs = np.empty(len(lines), dtype=np.float32)
        self._run(logits, lines, positions, tokens, log_probs)
        return tokens

    def adjusts(self, lines: Ints) -> bool:
        """Return whether any of these lines has adjustments, which may read the line's history."""
        return bool(self._adjustments["adjusts"][lines].any())

    def log_probs(self, logits: Tensor, lines: Ints, positions: Ints) -> Tensor:
        """Return the scores that beam search ranks by, float32 `[S, vocab_size]`.

        `sample` describes the arguments. The scores are the log-softmax after adjustments and
        temperature. If a logit of a row is NaN or +inf, all scores of the row are NaN. If all
        logits of a row are -inf, all scores of the row are -inf.
        """
        return self.log_softmax(self.adjusted(logits, lines, positions), lines)

    def adjusted(self, logits: Tensor, lines: Ints, positions: Ints) -> Tensor:
        """Adjust logits like `sample`, in place, and return them."""
        return self._run(logits, lines, positions, None, None)

    def log_softmax(self, logits: Tensor, lines: Ints) -> Tensor:
        """Return the scores of `log_probs` for adjusted logits, which are changed."""
        best = logits.amax(dim=1)
        logits /= torch.from_numpy(self._choices["temperature"][lines])[:, None]
        logits.clamp_(max=torch.finfo(torch.float32).max)  # if the quotient is infinite
        scores = torch.log_softmax(logits, dim=1).nan_to_num_(nan=-torch.inf, neginf=-torch.inf)
        scores[~(best < torch.inf)] = torch.nan
        return scores

    def log_probs_of(
        self,
        ids: Ints,
        logits: Tensor,
        lines: Ints,
        tokens: npt.NDArray[np.int32],
        log_probs: npt.NDArray[np.float32],
    ) -> npt.NDArray[np.float32]:
        """Return the log probabilities or logits, float32 `[S, k]`, of the tokens `ids` `[S, k]`.

        `logits` are the logits that `sample` has adjusted in place. `tokens` and `log_probs` `[S]`
        are the results of `sample`. The result is NaN in rows without a token.
        """
        temperatures = self._choices["temperature"][lines][:, None]
        chosen = np.maximum(tokens, 0).astype(np.int64)[:, None]
        known = np.where(tokens < 0, np.float32(np.nan), log_probs)
        scores, own = (np.take_along_axis(logits.numpy(), wanted, 1) for wanted in (ids, chosen))
        with np.errstate(over="ignore"):
            found = log_probs_from_known(scores / temperatures, (own / temperatures)[:, 0], known)
        found[(scores == -np.inf) & ~np.isnan(found)] = -np.inf
        is_normalized = (self._wanted[lines] != LOGIT)[:, None]
        return np.minimum(found, 0, out=found, where=is_normalized)  # the known value was rounded

    def _run(
        self,
        logits: Tensor,
        lines: Ints,
        positions: Ints,
        tokens: npt.NDArray[np.int32] | None,
        log_probs: npt.NDArray[np.float32] | None,
    ) -> Tensor:
        """Adjust the logits and return them. Fill `tokens` and `log_probs` unless they are None."""
        given = (logits.dtype, tuple(logits.shape), logits.device.type)
        expected = (torch.float32, (len(lines), self.vocab_size), "cpu")
        if given != expected:
            raise ValueError(f"logits must be {expected}, got {given}")
        rows = len(lines)
        logits = logits.contiguous()
        if not rows:
            return logits
        lines = np.ascontiguousarray(lines, dtype=np.int64)
        positions = np.ascontiguousarray(positions, dtype=np.int64)
        num_threads = min(self._team.max_size, rows) if logits.numel() > _SMALL else 1
        if len(self._weights) < num_threads:
            self._weights = np.empty((num_threads, self._weights_size), dtype=np.float32)
            self._seen = np.zeros((num_threads, self.vocab_size), dtype=np.int32)
        task = SampleTask(
            num_parts=rows,
            logits=logits.data_ptr(),
            lines=lines.ctypes.data,
            positions=positions.ctypes.data,
            tokens=0 if tokens is None else tokens.ctypes.data,
            log_probs=0 if log_probs is None else log_probs.ctypes.data,
            seen=self._seen.ctypes.data,
            weights=self._weights.ctypes.data,
            num_lines=len(self._choices),
            vocab_size=self.vocab_size,
            history_size=self._histories.shape[1],
            weights_size=self._weights_size,
            **self._addresses,
        )
        self._team.run(self._body, task, num_threads)
        return logits
