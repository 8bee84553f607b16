"""`GptManager.explain`: the reason of a wait and its numbers are those of the policy."""

from __future__ import annotations

import time
from concurrent.futures import Future

import pytest

from gptmanager import (
    CapacitySchedulerPolicy,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.scheduler import GuaranteedNoEvictScheduler, SimpleScheduler
from gptmanager.testing import RecordingCallbacks, ScriptedModel

NO_EVICT, MAX_UTILIZATION, STATIC_BATCH = (
    CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
    CapacitySchedulerPolicy.MAX_UTILIZATION,
    CapacitySchedulerPolicy.STATIC_BATCH,
)
FUSED = ModelType.INFLIGHT_FUSED_BATCHING


def explained(
    lengths, config, model_type=FUSED, *, tokens=None, max_batch_size=8, max_seq_len=64,
    reuse=False, prompts=None, **options,
):  # fmt: skip
    """Return what a manager says of requests of (prompt, output) tokens, after one has run."""
    host = RecordingCallbacks(
        [
            InferenceRequest.from_tokens(i, prompts[i] if prompts else [1] * a, b)
            for i, (a, b) in enumerate(lengths)
        ]
    )
    constructed, found = Future(), []

    def ask_and_end(record):  # in a callback, so that nobody runs on meanwhile
        if not found:
            manager = constructed.result(20)
            found.extend(manager.explain(i) for i in range(len(lengths)))
            manager.shutdown(drain=False)

    keywords = {**host.keywords(), "return_batch_manager_stats_cb": ask_and_end}
    with GptManager(
        ScriptedModel(lambda history: time.sleep(0.001) or 1, vocab_size=4),
        model_type,
        1,
        config,
        **keywords,
        optional_params=OptionalParams(
            kv_cache_config=KvCacheConfig(
                max_tokens=tokens, tokens_per_block=4, enable_block_reuse=reuse
            ),
            max_batch_size=max_batch_size,
            max_active_requests=16,
            max_seq_len=max_seq_len,
            **options,
        ),
    ) as manager:
        constructed.set_result(manager)
        assert manager.wait(20)
    return found


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("policy", [NO_EVICT, MAX_UTILIZATION])
def test_a_wait_for_a_request_without_blocks_names_that_request(policy, reuse):
    first, second, third = explained(
        [(20, 40), (48, 9), (2, 2)], SchedulerConfig(policy), tokens=64, reuse=reuse,
        prompts=[[1] * 20, [2] * 48, [3] * 2],
    )  # fmt: skip
    assert (first.reason, second.reason, third.reason) == ("running", "kv_blocks", "behind")
    assert third.behind == 1 and second.behind is None
    assert "request 2 waits behind request 1" in third.text
    lacking = second.needed_blocks + second.reserved_blocks - second.free_blocks
    assert lacking > 0 and f"short by {lacking}" in second.text
    if policy is NO_EVICT:
        assert second.needed_blocks == 15 and second.free_blocks - second.reserved_blocks == 16 - 15
    else:  # its prompt, and the blocks in which both go on for a while
        assert second.needed_blocks == 12 and 4 < second.reserved_blocks <= 9


def test_a_static_batch_that_runs_is_the_reason():
    lengths = [(4, 50), (4, 50), (4, 2)]
    for config, model_type in ((SchedulerConfig(STATIC_BATCH), FUSED), (None, ModelType.V1)):
        config = config or SchedulerConfig()
        *_, last = explained(lengths, config, model_type, max_batch_size=2)
        assert (
            last.reason == "static_batch"
            and "until the batch has ended: 2 running requests" in last.text
        )


def test_a_full_batch_is_the_reason_before_blocks_are():
    *_, last = explained(
        [(4, 50)] * 2 + [(40, 20)], SchedulerConfig(), tokens=112, max_batch_size=2
    )
    assert last.reason == "batch_full" and "2 running requests, at most 2 at once" in last.text


def test_the_wait_for_a_prefix_names_the_request_that_computes_it():
    """Behind a budget that makes the first wait for its second chunk."""
    first, second = explained(
        [(60, 3), (60, 3)], SchedulerConfig(), tokens=400, reuse=True, max_num_tokens=4,
        enable_chunked_context=True,
    )  # fmt: skip
    assert first.reason == "running"
    assert (second.reason, second.behind) == ("reuse_delay", 0)
    assert "waits for request 0, which computes the beginning of its prompt" in second.text


@pytest.mark.parametrize("reuse", [False, True])
def test_a_wait_names_the_token_budget_of_a_step(reuse):
    first, second = explained(
        [(60, 3), (40, 3)], SchedulerConfig(), tokens=400, max_num_tokens=4, reuse=reuse,
        enable_chunked_context=True, prompts=[[1] * 60, [2] * 40],
    )  # fmt: skip
    assert first.reason == "running" and second.reason == "token_budget"
    assert second.needed_tokens == 4 > second.free_tokens
    left = f"needs 4, {second.free_tokens} of max_num_tokens = 4 are left by 1 running request"
    assert left in second.text


def test_with_overlap_missing_blocks_are_the_reason():
    *_, last = explained(
        [(20, 40), (40, 20)], SchedulerConfig(), tokens=80, max_batch_size=1,
        enable_trt_overlap=True, reuse=True, prompts=[[1] * 20, [2] * 40],
    )  # fmt: skip
    assert last.reason == "kv_blocks" and "for 1 running request, short by" in last.text


class OneAtATime(GuaranteedNoEvictScheduler):
    def schedule_request(self, active_requests):
        return active_requests[:1], []


def test_no_reason_is_given_for_a_scheduler_of_the_host():
    class Own:
        def __init__(self, manager):
            self.schedule_request = OneAtATime(8, manager).schedule_request

    def create(**arguments):
        return SimpleScheduler(
            Own(arguments["kv_cache_manager"]), arguments["micro_batch_scheduler"]
        )

    config = SchedulerConfig(create_scheduler=create)
    _, second, third = explained([(20, 40), (20, 40), (2, 2)], config, tokens=64)
    assert (second.reason, third.reason) == ("not_chosen", "not_chosen")
    assert "by SimpleScheduler(Own, MicroBatchScheduler), which reports no" in second.text
