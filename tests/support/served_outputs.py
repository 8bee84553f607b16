"""Responses of a manager, joined for each request."""

from __future__ import annotations

import torch

from gptmanager import (
    CapacitySchedulerPolicy,
    GptManager,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.testing import ContractChecker, RecordingCallbacks

NO_EVICT = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION
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
