"""Responses of a manager, joined for each request."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from checkpoints import CONFIGS, checkpoint, random_model

from gptmanager import (
    CapacitySchedulerPolicy,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.testing import ContractChecker, RecordingCallbacks

NO_EVICT = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION
ALL = {
    "return_log_probs": True,
    "return_context_logits": True,
    "return_generation_logits": True,
}
AXES = {
    **{"output_ids": 2, "context_logits": 1, "generation_logits": 2, "output_log_probs": 2},
    **{"top_log_probs": 2, "top_log_prob_ids": 2},
}


def serve(source, requests, *, kv=None, policy=NO_EVICT, max_beam_width=1, **options):
    """Run all requests through a manager held to its contract; returns the recording."""
    host = RecordingCallbacks(requests)
    checker = ContractChecker(host.get_inference_requests, host.send_response)
    kv = {"max_tokens": 2048, "tokens_per_block": 8, **(kv or {})}
    options = {"max_batch_size": 8, "kv_cache_config": KvCacheConfig(**kv), **options}
    with GptManager(
        source,
        ModelType.INFLIGHT_FUSED_BATCHING,
        max_beam_width,
        SchedulerConfig(policy),
        checker.get_inference_requests,
        checker.send_response,
        host.poll_stop_signal,
        optional_params=OptionalParams(**options),
    ) as manager:
        assert manager.wait_idle(60)
        assert not manager._worker.loop.table.extras
    checker.check(manager)
    assert not [response.error for response in host.responses if response.error]
    return host


def joined(host, request_id):
    """All responses as one: what is counted by tokens is concatenated, else the last counts."""
    parts = {}
    for response in host.of(request_id):
        for name, tensor in response.tensors.items():
            parts.setdefault(name, []).append(tensor)
    return {
        name: torch.cat(found, dim=AXES[name]) if name in AXES else found[-1]
        for name, found in parts.items()
    }


@pytest.fixture(scope="module")
def llama():
    return random_model(CONFIGS["llama"]).double()


@pytest.fixture(scope="module")
def source(llama):
    config, weights = checkpoint(llama)
    return config | {"dtype": "float32", "torch_dtype": "float32"}, weights


def requests(**more):
    """Greedy and sampled ones, with penalties, ended by length, end_id or stop words."""
    chance = np.random.default_rng(5)
    result = []
    for i in range(9):
        options = dict(ALL) | more
        if i % 3:
            options |= {"temperature": 0.7 + 0.2 * i, "random_seed": i}
        if i % 3 == 2:
            options |= {"runtime_top_k": 9, "runtime_top_p": 0.9, "repetition_penalty": 1.4}
        if i % 4 == 1:
            options |= {"stop_words_list": [[t] for t in range(0, 96, 9)] + [[7, 8]]}
        if i % 4 == 3:
            options |= {
                "end_id": [5, 9],
                "presence_penalty": 0.5,
                "embedding_bias": [1.0] + [0.0] * 95,
            }
        prompt = chance.integers(0, 96, int(chance.integers(1, 40))).tolist()
        if i in (4, 7):
            prompt = prompt_of(result[1])[:24] + prompt
        result.append(InferenceRequest.from_tokens(i, prompt, 38 - 3 * i, **options))
    return result


def prompt_of(request):
    return request.input_ids.tolist()
