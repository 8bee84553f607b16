"""Whole managers whose requests have adapters: the tokens are those of merged models.

Requests in random mixes under random configurations. What must have happened on the way is counted.
"""

from __future__ import annotations

from collections import Counter

import pytest
from adapter_runs import Run
from fuzz import FUZZ
from tuned_models import cache_of, tuned

from gptmanager import GptManager, InferenceRequest, ModelType, OptionalParams
from gptmanager.testing import RecordingCallbacks

SEEDS = (6, 8, 12, 15, 16)  # in these all of MUST_HAPPEN happens
NUM_MORE = 10 * (FUZZ - 1)
NUM_REQUESTS = 16
MUST_HAPPEN = (  # whether requests are paused depends on when adapters are there
    *("host_evictions", "device_evictions", "hits", "misses", "reused", "drafted"),
    *("swapped", "beams", "waits"),
)


@pytest.mark.timeout(300 * FUZZ)
def test_random_mixes_under_random_configurations():
    counts = Counter()
    for seed in (*SEEDS, *range(18, 18 + NUM_MORE)):
        run = Run(seed, NUM_REQUESTS)
        run.check_tokens(run.run())
        counts.update(run.counts)
    assert not [name for name in MUST_HAPPEN if not counts[name]], counts


def test_the_only_adapter_is_used():
    models, task, prompt = tuned("llama"), 7, [5, 6, 7, 8]
    asked = {"input_ids": prompt, "request_output_len": 8}
    host = RecordingCallbacks([InferenceRequest(1, asked | models.lora(task))])
    params = OptionalParams(
        device="cpu", deterministic=True, peft_cache_manager_config=cache_of("llama", 90, 90)
    )
    kind = ModelType.INFLIGHT_FUSED_BATCHING
    with GptManager(models.source, kind, optional_params=params, **host.keywords()) as manager:
        assert manager.wait_idle(60)
    generated = host.output(1)[len(prompt) :]
    assert len(generated) == 8
    assert models.is_greedy(task, prompt, generated)
    assert not models.is_greedy(None, prompt, generated)
