"""`PromptScorer`: scores of prompt tokens, computed from the logits of the positions before them.

A score is a log probability (the log-softmax of the model's raw logits) or a raw logit. The
request's sampling parameters have no influence. A step passes a few rows of logits at a time, and
no logits are stored.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gptmanager.cuda.device.launch import Launcher
from gptmanager.cuda.device.uploads import Upload
from gptmanager.cuda.sampling import beam_step, sampling
from gptmanager.cuda.sampling.log_probs import LOG_PROB, LOGIT, log_probs
from gptmanager.decoding.sampling.best_tokens import best_ids
from gptmanager.decoding.sampling.sampling import Ints, Sampler
from gptmanager.request.output_options import OutputConfig
from gptmanager.request.sampling_params import SamplingParams

MOST_LOGITS = 1 << 25  # the most logits computed for scores at a time: 128 MiB in float32

# For n tokens of a prompt: their scores [n], the scores of the k best tokens at the position of
# each [n, k], and the ids of these best tokens [n, k].
Scores = tuple[Tensor, Tensor, Tensor]

_PLAIN = SamplingParams(greedy=True, temperature=1.0)
_CONFIGS = tuple(OutputConfig(log_probs=True, normalized=kind) for kind in (False, True))


class PromptScorer:
    """Scores prompt tokens on the CPU. `vocab_size`: the number of logits per token."""

    def __init__(self, vocab_size: int) -> None:
        self._sampler = Sampler(len(_CONFIGS), vocab_size)
        for line, config in enumerate(_CONFIGS):
            self._sampler.load(line, _PLAIN, 0, config)

    def score(self, logits: Tensor, targets: Ints, count: int, *, normalized: bool) -> Scores:
        """Score the tokens `targets` `[n]` and the `count` best tokens of each row of `logits`.

        `logits` is `[n, vocab]`. Return `Scores` on the CPU: float32, float32 and int32 tensors. If
        `normalized`, the scores are log probabilities; otherwise they are logits. All scores of a
        row are NaN if one logit of the row is NaN or +inf, or if all its logits are -inf.
        """
        num_rows = len(targets)
        lines = np.full(num_rows, int(normalized), dtype=np.int64)
        best_log_probs = np.empty(num_rows, dtype=np.float32)
        best = self._sampler.sample(logits, lines, np.zeros_like(lines), best_log_probs)
        top_ids = best_ids(logits, count) if count else np.zeros((num_rows, 0), dtype=np.int64)
        ids = np.concatenate((targets[:, None], top_ids), axis=1)
        found = self._sampler.log_probs_of(ids, logits, lines, best, best_log_probs)
        return (
            torch.from_numpy(found[:, 0]),
            torch.from_numpy(found[:, 1:]),
            torch.from_numpy(top_ids.astype(np.int32)),
        )


class DevicePromptScorer:
    """Scores prompt tokens on a device, without waiting for the result."""

    def __init__(
        self, launcher: Launcher, device: torch.device, vocab_size: int, upload: Upload
    ) -> None:
        self._launcher = launcher
        self._upload = upload
        records = np.array([sampling.pack(_PLAIN, vocab_size)] * 2, dtype=sampling.PARAMS)
        table = torch.from_numpy(records.view(np.uint8).reshape(2, -1))
        self._params = table.to(device, copy=True)
        self._wanted = torch.tensor([LOGIT, LOG_PROB], dtype=torch.uint8).to(device, copy=True)

    def score(
        self, logits: Tensor, targets: Ints, count: int, *, normalized: bool
    ) -> tuple[Tensor, Tensor]:
        """Score like `PromptScorer.score`, on the device.

        Return the scores `[n, 1 + count]`, first of `targets` and then of the best tokens, and the
        ids `[n, count]` of the best tokens.
        """
        num_rows, device = len(targets), logits.device
        line = np.full(num_rows, int(normalized), dtype=np.int32)
        counts = np.full(num_rows, count, dtype=np.int32)
        tokens, lines, wanted = self._upload((targets.astype(np.int32), line, counts))
        ids = torch.zeros((num_rows, count), dtype=torch.int32, device=device)
        scored = tokens[:, None].contiguous()
        if count:
            unused = torch.empty((num_rows, count), device=device)
            beam_step.best_of_rows(self._launcher, ids, unused, logits, self._params, lines, wanted)
            scored = torch.cat((scored, ids), dim=1)
        scores = torch.empty(scored.shape, device=device)
        log_probs(self._launcher, scores, logits, scored, self._params, self._wanted, lines)
        if count:  # `best_of_rows` has ranked by log probabilities of lower precision
            best, order = scores[:, 1:].sort(dim=1, descending=True, stable=True)
            scores[:, 1:], ids = best, ids.gather(1, order)
        is_odd = ~logits.amax(dim=1, keepdim=True).isfinite()
        return scores.masked_fill_(is_odd, torch.nan), ids
