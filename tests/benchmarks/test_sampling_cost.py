"""What choosing tokens costs for 256 rows of 32,000 logits, beside torch's top-k and softmax.

The bound, for any setting: 1.5 times one `torch.topk(k=50)` + `softmax` of the same logits, in as
many threads; greedy rows pay for an argmax only. `make test` runs each setting once, `make bench`
times them, and `python tests/benchmarks/test_sampling_cost.py` prints the ratios as a table, of CPU
time in alternating rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from gptmanager.decoding.sampling.sampling import Sampler
from gptmanager.request.input_rows import token_bias
from gptmanager.request.output_options import OutputConfig
from gptmanager.request.sampling_params import SamplingParams

ROWS, VOCAB, HISTORY = 256, 32_000, 1024
GREEDY = SamplingParams()
WORDS = tuple((i, i + 1, i + 2) for i in range(20))
DENSE = token_bias(range(VOCAB), [0.5] * VOCAB)


def drawn(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, **more: Any
) -> SamplingParams:
    return SamplingParams(False, temperature, top_k, top_p, min_p, **more)


SETTINGS = {
    "greedy": GREEDY,
    "temperature 0.8": drawn(0.8),
    "top_k 50": drawn(1.0, 50),
    "top_k 1000": drawn(1.0, 1000),
    "top_k 10000": drawn(1.0, 10_000),
    "top_p 0.95": drawn(1.0, 0, 0.95),
    "top_p 0.5": drawn(1.0, 0, 0.5),
    "top_p 0.1": drawn(1.0, 0, 0.1),
    "top_p 0.01": drawn(1.0, 0, 0.01),
    "min_p 0.1": drawn(1.0, 0, 1.0, 0.1),
    "top_k 50, top_p 0.9, min_p 0.05": drawn(0.7, 50, 0.9, 0.05),
    "greedy, repetition": SamplingParams(repetition_penalty=1.2),
    "greedy, all penalties": SamplingParams(
        repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5
    ),
    "greedy, n-grams of 3": SamplingParams(no_repeat_ngram_size=3),
    "greedy, 20 bad words": SamplingParams(bad_words=WORDS),
    "greedy, 300 biases": SamplingParams(embedding_bias=token_bias(range(300), [0.5] * 300)),
    "greedy, a bias on every token": SamplingParams(embedding_bias=DENSE),
    "greedy, log probs": GREEDY,
    "top_k 50, log probs": drawn(1.0, 50),
    "all of it": drawn(
        *(0.7, 50, 0.9, 0.05),
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        no_repeat_ngram_size=3,
        bad_words=WORDS,
        embedding_bias=DENSE,
    ),
}
SCALES = {"flat": 0.5, "peaked": 4.0}


def prepared(name: str, scale: float) -> tuple[torch.Tensor, Callable[[], Any], Callable[[], Any]]:
    """Logits, the sampler's work on them, and what it is measured by."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(ROWS, VOCAB, generator=generator) * scale
    histories = torch.randint(VOCAB, (ROWS, HISTORY), generator=generator).int().numpy()
    sampler = Sampler(ROWS, VOCAB, histories)
    for slot in range(ROWS):
        sampler.load(slot, SETTINGS[name], HISTORY // 2, OutputConfig(log_probs="log" in name))
    slots, positions = np.arange(ROWS), np.full(ROWS, HISTORY)
    log_probs = np.zeros(ROWS, dtype=np.float32)
    return (
        logits,
        lambda: sampler.sample(logits, slots, positions, log_probs),
        lambda: (torch.topk(logits, 50), torch.softmax(logits, dim=-1)),
    )


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.every(8)
def test_sampling(benchmark: Any, name: str, scale: str) -> None:
    _, sample, measure = prepared(name, SCALES[scale])
    if benchmark.enabled:
        benchmark.extra_info["bound_ms"] = 1.5e3 * min(_seconds(measure) for _ in range(5))
    tokens = benchmark.pedantic(sample, rounds=10 if benchmark.enabled else 1)
    assert ((tokens >= 0) & (tokens < VOCAB)).all()


def _seconds(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    print(f"{'':34}" + "".join(f"{scale:>20}" for scale in SCALES))
    for name in SETTINGS:
        cells = []
        for scale in SCALES.values():
            _, sample, measure = prepared(name, scale)
            pairs = [(_seconds(sample), _seconds(measure)) for _ in range(7)]
            ours, theirs = (min(times) for times in zip(*pairs, strict=True))
            cells.append(f"{ours * 1e3:8.1f} ms {ours / theirs:6.2f} x")
        print(f"{name:34}" + "".join(f"{cell:>20}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
