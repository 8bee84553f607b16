"""Retention priorities: which cached blocks stay when the pool, or the host tier, is short."""

from __future__ import annotations

import numpy as np
import pytest

from gptmanager import (
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.kv_cache import KvCacheManager
from gptmanager.loop.responses import REQUEST_METRICS
from gptmanager.recorder.recording_file import read_recording
from gptmanager.replay import replay
from gptmanager.request.llm_request import LlmRequest
from gptmanager.simulator.load import RecordedLoad
from gptmanager.testing import RecordingCallbacks, ScriptedModel

SIZE = 4


def run(kv, start, num_blocks=1, priority=None):
    """A request that leaves so many whole blocks to be found, of tokens from `start` on."""
    tokens = list(range(start, start + num_blocks * SIZE))
    request = LlmRequest(start, tokens, 1, retention_priority=priority)
    copies = kv.add_sequence(request)
    request.move_to_next_context_chunk()
    kv.store_context(request)
    request.add_token(7)
    kv.remove(start)
    kv.check()
    return copies


def found(kv, start, num_blocks=1):
    """How many of these blocks can be found."""
    tokens = [*range(start, start + num_blocks * SIZE), 7]
    return kv.get_reusable_tokens(LlmRequest(9999, tokens, 1)) // SIZE


def take(kv, request_id, num_blocks=1):
    """Something that finds nothing takes blocks; the copies that this takes."""
    copies = kv.add_sequence(LlmRequest(request_id, [1] * SIZE * num_blocks, 1, cache_salt="none"))
    kv.check()
    return copies


def cache(num_blocks, **options):
    return KvCacheManager(num_blocks, SIZE, enable_block_reuse=True, **options)


@pytest.mark.parametrize(
    ("priorities", "order"),
    [
        ([None, None, None], [0, 1, 2]),  # the least recently freed first
        ([90, None, 0], [2, 1, 0]),
        ([50, 50, 40], [2, 0, 1]),
        ([36, 35, None, 34], [3, 1, 2, 0]),
    ],
)
def test_the_lowest_priority_goes_first_and_of_equals_the_least_recently_freed(priorities, order):
    kv = cache(len(priorities))
    for place, priority in enumerate(priorities):
        run(kv, 100 * place, priority=priority)
    for count, gone in enumerate(order):
        assert found(kv, 100 * gone) == 1
        take(kv, 1000 + count)
        assert found(kv, 100 * gone) == 0


def test_what_holds_nothing_goes_before_the_lowest_priority():
    kv = cache(2)
    run(kv, 0, priority=0)
    take(kv, 1000)
    assert found(kv, 0) == 1


def test_ends_go_before_their_beginnings_whatever_their_priorities():
    kv = cache(3)
    run(kv, 0, num_blocks=1, priority=0)
    run(kv, 0, num_blocks=2, priority=100)  # the first block again, and one behind it
    run(kv, 0, num_blocks=1, priority=0)
    run(kv, 500, priority=50)
    take(kv, 1000)
    assert (found(kv, 0, 2), found(kv, 500)) == (2, 0)
    take(kv, 1001)
    assert found(kv, 0, 2) == 1
    take(kv, 1002)
    assert found(kv, 0, 2) == 0


def test_a_request_without_a_priority_leaves_it_and_one_with_it_changes_it():
    for again, survivor in [(None, 0), (10, 100), (36, 0)]:
        kv = cache(2)
        run(kv, 0, priority=90)
        run(kv, 100)
        run(kv, 0, priority=again)
        take(kv, 1000)
        assert [start for start in (0, 100) if found(kv, start)] == [survivor]


def test_a_priority_ends_with_what_had_it():
    kv = cache(2)
    run(kv, 0, priority=90)
    run(kv, 100)
    take(kv, 1000, num_blocks=2)
    kv.remove(1000)
    run(kv, 100)
    run(kv, 0)
    take(kv, 1001)
    assert (found(kv, 0), found(kv, 100)) == (1, 0)
    kv.clear_cached()
    kv.check()


@pytest.mark.parametrize("priority", [-1, 101])
def test_a_priority_out_of_range_is_refused(priority):
    with pytest.raises(ValueError, match=f"retention_priority = {priority} must be from 0 to 100"):
        LlmRequest(1, 5, 1, retention_priority=priority)


# The host tier ------------------------------------------------------------------------------


@pytest.mark.parametrize(("least", "moved"), [(None, 3), (0, 3), (35, 2), (36, 1), (91, 0)])
def test_what_is_below_the_least_priority_is_lost(least, moved):
    kv = cache(3, num_host_blocks=3, secondary_offload_min_priority=least)
    for start, priority in [(0, 34), (100, None), (200, 90)]:
        run(kv, start, priority=priority)
    copies = take(kv, 1000, num_blocks=3)
    assert len(copies) == moved == kv.host_counts.offloaded_blocks
    assert [found(kv, start) for start in (0, 100, 200)] == [0] * (3 - moved) + [1] * moved


def test_nothing_moves_to_the_place_of_something_of_a_higher_priority():
    kv = cache(1, num_host_blocks=1)
    run(kv, 0, priority=50)
    assert len(run(kv, 100, priority=40)) == 1  # 0 moves to the host
    assert run(kv, 200, priority=50) == ()  # 100 is lost
    assert [found(kv, start) for start in (0, 100, 200)] == [1, 0, 1]
    assert len(run(kv, 300)) == 1  # an equal one takes the place
    assert [found(kv, start) for start in (0, 200, 300)] == [0, 1, 1]


def test_the_lowest_priority_on_the_host_goes_first():
    kv = cache(1, num_host_blocks=2)
    run(kv, 0, priority=50)
    run(kv, 100, priority=40)
    run(kv, 200, priority=60)
    assert kv.audit().host_used == 2
    run(kv, 300, priority=70)  # 200 moves to the place of 100, which came later than 0
    assert [found(kv, start) for start in (0, 100, 200, 300)] == [1, 0, 1, 1]


# A host's name for it ------------------------------------------------------------------------


def cached_tokens(priority, **options):
    """What a second turn finds when others have come between, in a pool that is too small."""
    prompt, chance = list(range(40)), np.random.default_rng(3)
    turns = [InferenceRequest.from_tokens(0, prompt, 1, retention_priority=priority)]
    turns += [
        InferenceRequest.from_tokens(i, chance.integers(0, 50, 40).tolist(), 1) for i in (1, 2, 3)
    ]
    turns += [InferenceRequest.from_tokens(4, prompt, 1)]
    host = RecordingCallbacks()
    with GptManager(
        ScriptedModel(lambda history: 7, vocab_size=50),
        ModelType.INFLIGHT_FUSED_BATCHING,
        1,
        SchedulerConfig(),
        optional_params=OptionalParams(
            max_seq_len=64,
            kv_cache_config=KvCacheConfig(
                max_tokens=128, tokens_per_block=8, enable_block_reuse=True
            ),
            **options,
        ),
        **host.keywords(),
    ) as manager:
        host.manager = manager
        for turn in turns:
            host.submit(turn)
            assert manager.wait_idle(30)
    metrics = host.final(4).tensors["request_metrics"]
    return int(metrics[REQUEST_METRICS.index("cached_tokens")])


def test_a_host_keeps_what_it_will_need_again():
    assert [cached_tokens(priority) for priority in (None, 35, 36, 100)] == [8, 8, 39, 39]


def test_a_recording_its_replay_and_its_simulation_know_it(tmp_path):
    assert cached_tokens(80, recording_path=tmp_path / "run.jsonl") == 39
    recording = read_recording(tmp_path / "run.jsonl")
    assert replay(recording).divergence is None
    assert RecordedLoad(recording).request(0).retention_priority == 80
    for iteration in recording.iterations:
        for request in iteration.intake.requests:
            request.retention_priority = None
    assert replay(recording).divergence is not None
