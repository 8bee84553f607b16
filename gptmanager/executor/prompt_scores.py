"""`PromptScorer`: how likely the tokens of prompts were, from the logits before them.

Raw: the log-softmax of the model's logits, whatever the request samples by. A step hands over a few
rows of logits at a time and keeps none of them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gptmanager.decoding.best_tokens import best_ids
from gptmanager.decoding.sampling import Ints, Sampler
from gptmanager.request.output_options import OutputConfig
from gptmanager.request.sampling_params import SamplingParams

MOST_LOGITS = 1 << 25  # that are computed for scores at a time: 128 MB in single precision

Scores = tuple[Tensor, Tensor, Tensor]  # of the tokens [n]; of the k best, and these: [n, k]

_PLAIN = SamplingParams(greedy=True, temperature=1.0)
_CONFIGS = tuple(OutputConfig(log_probs=True, normalized=kind) for kind in (False, True))


class PromptScorer:
    """Scores on the CPU. `vocab_size`: of the logits."""

    def __init__(self, vocab_size: int) -> None:
        self._sampler = Sampler(len(_CONFIGS), vocab_size)
        for line, config in enumerate(_CONFIGS):
            self._sampler.load(line, _PLAIN, 0, config)

    def score(self, logits: Tensor, targets: Ints, count: int, *, normalized: bool) -> Scores:
        """Of the tokens `targets` `[n]`, and of the `count` best, by `logits` `[n, vocab]`.

        float32, float32 and int32, on the CPU; `normalized` False: logits. NaN for a row that holds
        NaN or +inf, or nothing above -inf.
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
