"""What leaves the device and returns: in order, never in both places, and never in the tokens."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from checkpoints import CONFIGS, checkpoint, random_model
from loop_driver import LoopDriver, expected_output
from shorthand import request

from gptmanager import (
    CapacitySchedulerPolicy,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.errors import ConfigError
from gptmanager.kv_cache import BlockCopy, KvCacheManager
from gptmanager.memory.kv_pool import KvPool, PageShape
from gptmanager.request.llm_request import LlmRequest
from gptmanager.testing import ContractChecker, RecordingCallbacks


def run_context(kv, request_id, tokens):
    """Start, compute and end a request; what had to be copied."""
    llm_request = LlmRequest(request_id, tokens, 1)
    copies = kv.add_sequence(llm_request)
    cached = kv.num_cached_tokens(request_id)
    kv.store_context(llm_request)
    llm_request.move_to_next_context_chunk()
    blocks = kv.block_ids(request_id)[0]
    kv.remove(request_id)
    kv.check()
    return copies, cached, blocks


def test_what_is_evicted_goes_to_the_host_and_returns_for_the_same_beginning():
    kv = KvCacheManager(3, 2, enable_block_reuse=True, num_host_blocks=4)
    assert run_context(kv, 1, [1, 2, 3, 4, 5]) == ((), 0, [0, 1, 2])
    copies, cached, blocks = run_context(kv, 2, [6, 7, 8, 9, 10])
    # the empty block goes first, then the end of the other text, then its beginning
    assert cached == 0 and blocks == [2, 1, 0]
    assert copies == (BlockCopy(1, 3, 2), BlockCopy(0, 4, 2))
    assert kv.reuse_counts.offloaded_blocks == kv.reuse_counts.cached_host_blocks == 2
    copies, cached, blocks = run_context(kv, 3, [1, 2, 3, 4, 11])
    assert cached == 4
    assert (4, blocks[0], 2) in copies and (3, blocks[1], 2) in copies
    assert kv.reuse_counts.onboarded_blocks == 2


def test_the_least_recently_stored_makes_room():
    kv = KvCacheManager(2, 2, enable_block_reuse=True, num_host_blocks=2)
    for start in (10, 20, 30, 40):
        run_context(kv, start, [start, start + 1, start + 2, start + 3])
    assert kv.reuse_counts.cached_host_blocks == 2
    assert run_context(kv, 5, [30, 31, 32, 33])[1] == 3  # the last token is always computed
    assert run_context(kv, 6, [10, 11, 12, 13])[1] == 0


def test_clearing_forgets_the_host_tier_too():
    kv = KvCacheManager(2, 2, enable_block_reuse=True, num_host_blocks=2)
    run_context(kv, 1, [1, 2, 3, 4])
    run_context(kv, 2, [5, 6, 7, 8])
    kv.clear_cached()
    assert kv.reuse_counts.cached_host_blocks == 0
    assert run_context(kv, 3, [1, 2, 3, 4])[1] == 0


def test_a_host_tier_needs_block_reuse():
    with pytest.raises(ConfigError, match="num_host_blocks = 3 needs enable_block_reuse"):
        KvCacheManager(4, 2, num_host_blocks=3)


def test_the_pool_copies_to_the_host_and_back():
    pool = KvPool([PageShape(2, 8)] * 2, 3, 4, num_host_blocks=2)
    pool.keys.copy_(torch.randn(pool.keys.shape))
    pool.values.copy_(torch.randn(pool.values.shape))
    keys, values = pool.keys[:, 1].clone(), pool.values[:, 1].clone()
    pool.copy([BlockCopy(1, 4, 4), BlockCopy(0, 1, 4), BlockCopy(4, 2, 4)])
    assert torch.equal(pool.keys[:, 2], keys) and torch.equal(pool.values[:, 2], values)
    assert torch.equal(pool.keys[:, 1], pool.keys[:, 0])
    assert pool.host_nbytes == 2 * 2 * 2 * 2 * 4 * 8 * 4
    assert KvPool([PageShape(2, 8)], 3, 4).host_nbytes == 0


@pytest.mark.parametrize(
    "mode", [{}, {"run_ahead": 1}, {"overlap": True}, {"num_stages": 3}], ids=str
)
def test_shared_beginnings_survive_a_pool_that_is_too_small_for_them(mode):
    """The scripted executor refuses blocks that do not hold what they should."""
    driver = LoopDriver(num_blocks=9, reuse=True, num_host_blocks=30, max_batch_size=2, **mode)
    prompts = {i: [i % 4] * 9 + [i] for i in range(24)}
    driver.submit(*(request(i, prompt, 5) for i, prompt in prompts.items()))
    driver.run()
    for i, prompt in prompts.items():
        assert driver.output(i) == prompt + expected_output(prompt, 5)
    counts = driver.kv_cache.reuse_counts
    assert counts.offloaded_blocks > 10 and counts.onboarded_blocks > 10


@pytest.mark.parametrize(
    ("policy", "max_tokens"),
    [
        (CapacitySchedulerPolicy.GUARANTEED_NO_EVICT, 128),
        (CapacitySchedulerPolicy.MAX_UTILIZATION, 104),
    ],
)
def test_a_host_tier_does_not_show_in_the_tokens(policy, max_tokens):
    source = checkpoint(random_model(CONFIGS["llama"]))
    chance = np.random.default_rng(5)
    texts = chance.integers(0, 96, (3, 40)).tolist()
    requests = [(i, texts[i % 3] + [i], int(chance.integers(4, 24))) for i in range(15)]
    outputs, counts = [], []
    for size in (0, 1 << 20):
        host = RecordingCallbacks([InferenceRequest.from_tokens(*item) for item in requests])
        checker = ContractChecker(host.get_inference_requests, host.send_response)
        with GptManager(
            source,
            ModelType.INFLIGHT_FUSED_BATCHING,
            1,
            SchedulerConfig(policy),
            checker.get_inference_requests,
            checker.send_response,
            return_batch_manager_stats_cb=host.return_batch_manager_stats,
            optional_params=OptionalParams(
                kv_cache_config=KvCacheConfig(
                    max_tokens=max_tokens,
                    tokens_per_block=8,
                    enable_block_reuse=True,
                    host_cache_size=size,
                ),
                max_batch_size=4,
                deterministic=True,
            ),
        ) as manager:
            assert manager.wait_idle(60)
            assert manager.audit().ok
        checker.check(manager)
        outputs.append([host.output(i) for i in range(15)])
        counts.append(json.loads(host.statistics[-1])["gptmanager"]["block_reuse"])
    assert outputs[0] == outputs[1]
    assert counts[0]["host_blocks"] == counts[0]["offloaded_blocks"] == 0
    assert counts[1]["onboarded_blocks"] > 5 and counts[1]["host_blocks"] > 20
    assert counts[1]["reused_tokens"] > counts[0]["reused_tokens"]


@pytest.mark.parametrize(
    ("rule", "rate", "expected"),
    [
        ("auto", 20e3, 64),
        ("auto", 1e9, 0),
        ("always", 1e9, 64),
    ],
)
def test_a_block_moves_if_that_is_sooner_than_to_compute_it_again(rule, rate, expected, caplog):
    spec = random_model(CONFIGS["llama"]).config
    block_bytes = KvPool.bytes_per_block([PageShape(2, 8)] * 3, 8)
    kv_cache = KvCacheConfig(
        max_tokens=256,
        tokens_per_block=8,
        enable_block_reuse=True,
        host_cache_size=64 * block_bytes,
        host_swap=rule,
        recompute_tokens_per_s=rate,
    )
    assert spec.num_hidden_layers == 3 and spec.num_key_value_heads == 2
    with GptManager(
        checkpoint(random_model(CONFIGS["llama"])),
        ModelType.INFLIGHT_FUSED_BATCHING,
        optional_params=OptionalParams(kv_cache_config=kv_cache),
        return_batch_manager_stats_cb=(host := RecordingCallbacks()).return_batch_manager_stats,
        get_inference_requests_cb=host.get_inference_requests,
        send_response_cb=host.send_response,
    ) as manager:
        host.submit(InferenceRequest.from_tokens(1, [1, 2], 2))
        manager.notify()
        host.final(1, timeout=20)
        assert manager.wait_idle(20)
    counts = json.loads(host.statistics[-1])["gptmanager"]["block_reuse"]
    assert counts["host_blocks"] == expected
    assert ("host_cache_size is not used" in caplog.text) == (expected == 0)
