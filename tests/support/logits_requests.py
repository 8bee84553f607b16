"""A manager whose model's logits are known, and requests to it."""

from __future__ import annotations

from gptmanager import (
    CapacitySchedulerPolicy,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.testing import ContractChecker, RecordingCallbacks, ScriptedModel

VOCAB_SIZE = 50
END_ID = 49
NO_EVICT = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT


def next_token(history):
    """Never END_ID."""
    return (history[-1] * 31 + history[len(history) // 2] * 7 + len(history)) % END_ID


def expected(prompt, count, choose):
    history = list(prompt)
    for _ in range(count):
        history.append(choose(history))
    return history[len(prompt) :]


def request(request_id, prompt_len=3, max_new_tokens=6, **more):
    prompt = [(request_id * 13 + i * 5) % END_ID for i in range(prompt_len)]
    return InferenceRequest.from_tokens(request_id, prompt, max_new_tokens, **more)


def output(host, asked):
    tokens = host.output(asked.request_id)
    return tokens if asked.is_streaming else tokens[len(asked.input_ids) :]


def serve(requests, policy=NO_EVICT, max_tokens=400, reuse=False, max_beam_width=1, **options):
    """Run all requests to their end; returns what the host was told."""
    host = RecordingCallbacks(requests)
    checker = ContractChecker(host.get_inference_requests, host.send_response)
    options = {"max_batch_size": 6, "max_num_tokens": 40, "max_seq_len": 64, **options}
    with GptManager(
        ScriptedModel(next_token, vocab_size=VOCAB_SIZE),
        ModelType.INFLIGHT_FUSED_BATCHING,
        max_beam_width,
        SchedulerConfig(policy),
        checker.get_inference_requests,
        checker.send_response,
        host.poll_stop_signal,
        optional_params=OptionalParams(
            kv_cache_config=KvCacheConfig(
                max_tokens=max_tokens, tokens_per_block=4, enable_block_reuse=reuse
            ),
            **options,
        ),
    ) as manager:
        assert manager.wait_idle(20)
        host.health = manager.health()
    checker.check(manager)
    assert manager.exception is None
    return host
