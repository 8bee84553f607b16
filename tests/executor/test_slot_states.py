"""Models with a state for each slot: it is cleared, counted, copied, and computed again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cuda_headers import require_cuda_headers
from stateful_runs import Digesting, continued, run_many

from gptmanager import (
    CapacitySchedulerPolicy,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    ParallelConfig,
    PromptLookup,
    SchedulerConfig,
)
from gptmanager.errors import ConfigError
from gptmanager.loop.responses import REQUEST_METRICS
from gptmanager.memory.slot_states import StateShape, state_bytes
from gptmanager.recorder.recording_file import read_recording
from gptmanager.replay import replay
from gptmanager.scheduler import GuaranteedNoEvictScheduler, SimpleScheduler
from gptmanager.simulator.comparison import variant
from gptmanager.testing import RecordingCallbacks, ScriptedModel

FUSED = ModelType.INFLIGHT_FUSED_BATCHING
NO_EVICT = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
REUSE = {"enable_block_reuse": True, "max_tokens": 80, "state_snapshots": 9}


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (200, {}),
        (200, {"enable_trt_overlap": True}),
        (20, {"device": "emulator"}),
        (100, {"cache": REUSE}),
        (100, {"cache": REUSE, "enable_trt_overlap": True}),
        (100, {"cache": REUSE, "run_ahead": 1, "enable_chunked_context": True, "policy": NO_EVICT}),
        (60, {"cache": REUSE, "device": "emulator"}),
    ],
    ids=["plain", "overlap", "device", "reuse", "reuse overlap", "reuse ahead", "reuse device"],
)
@pytest.mark.every(2)
def test_each_of_200_requests_is_as_alone(count: int, options: dict[str, Any]) -> None:
    if "device" in options:
        require_cuda_headers()
    model = Digesting()
    model.spec = replace(model.spec, num_layers=1)  # kernels of devices copy blocks of a layer
    host = run_many(model, lambda own, size: [continued(it, size) for it in own], count, **options)
    if "policy" not in options:
        assert host.total("Paused Requests") > 0  # and their states were computed again, or found
    reuse = json.loads(host.statistics[-1])["gptmanager"]["block_reuse"]
    assert (reuse["reused_tokens"] > count) == ("cache" in options)
    snapshots = options.get("cache", {}).get("state_snapshots", 0)
    assert reuse["used_snapshots"] <= reuse["snapshots"] == snapshots
    assert (reuse["used_snapshots"] > 0) == (snapshots > 0)


def run(model: Any, requests: Any, kind: ModelType = FUSED, **options: Any) -> RecordingCallbacks:
    host = RecordingCallbacks(requests)
    params = OptionalParams(exclude_input_in_output=True, **options)
    with GptManager(model, kind, optional_params=params, **host.keywords()) as manager:
        manager.wait_idle()
    return host


@pytest.mark.parametrize("kind", [ModelType.V1, ModelType.INFLIGHT_BATCHING])
def test_other_batching_schemes_keep_states_apart(kind: ModelType) -> None:
    requests = [InferenceRequest.from_tokens(i, [i, 5, i], 4 + i) for i in range(8)]
    cache = KvCacheConfig(enable_block_reuse=None)
    host = run(Digesting(), requests, kind, max_batch_size=3, kv_cache_config=cache)
    assert [host.output(i) for i in range(8)] == [continued([i, 5, i], 4 + i) for i in range(8)]


def test_states_are_counted() -> None:
    request, used = [InferenceRequest.from_tokens(1, [1], 2)], []
    for size in (5, 6):
        host = run(Digesting(), request, max_batch_size=size, run_ahead=0, max_seq_len=50)
        used.append(json.loads(host.statistics[-1])["Runtime CPU Memory Usage"])
    # and the tables: of tokens, and of one block
    states = (2 + 2) * 8 + 15 * 4
    assert used[1] - used[0] == states + 4 * (50 + 1)
    assert state_bytes(Digesting().spec.states) == states


def test_states_that_do_not_fit_are_refused() -> None:
    model = Digesting()
    model.spec = replace(model.spec, states=(StateShape((1 << 40,)),))
    with pytest.raises(
        ConfigError, match=r"max_batch_size = 256: the states of 256 sequences need"
    ):
        run(model, [])


def test_a_step_that_is_short_of_memory_does_not_run_twice() -> None:
    model = Digesting()
    model.fails_at = {3}
    requests = [InferenceRequest.from_tokens(i, [i, 5], 6) for i in range(5)]
    host = run(model, requests, max_batch_size=2)
    errors = [host.final(i).error for i in range(5)]
    assert [bool(error) for error in errors] == [True, True, False, False, False]
    assert "out of memory" in errors[0]
    assert all(host.output(i) == continued([i, 5], 6) for i in (2, 3, 4))


@pytest.mark.parametrize(
    ("options", "width", "reason"),
    [
        (
            {"kv_cache_config": KvCacheConfig(enable_block_reuse=None, host_cache_size=1 << 20)},
            1,
            "the host tier has no snapshots of it",
        ),
        ({"speculative_decoding_config": PromptLookup()}, 1, "it cannot go back to the token"),
        ({"parallel_config": ParallelConfig()}, 1, "ranks do not split it"),
        ({}, 2, "it cannot be shared by sequences"),
    ],
    ids=["host tier", "lookup", "ranks", "beams"],
)
def test_what_a_state_rules_out_is_refused_by_name(
    options: dict[str, Any], width: int, reason: str
) -> None:
    name = next(iter(options), "max_beam_width")
    if name == "kv_cache_config":
        name = "host_cache_size"
    host = RecordingCallbacks()
    with pytest.raises(
        ConfigError, match=f"{name} = .* refused: the model keeps a state.*{reason}"
    ):
        GptManager(
            *(Digesting(), FUSED, width),
            optional_params=OptionalParams(**options),
            **host.keywords(),
        )


def test_drafts_of_a_request_are_refused_by_name() -> None:
    request = InferenceRequest.from_tokens(1, [1, 2], 4, draft_input_ids=[3])
    text = "draft_input_ids is refused: the model keeps a state, which cannot go back"
    assert text in run(Digesting(), [request]).final(1).error


def cached_tokens(host: RecordingCallbacks, request_id: int) -> int:
    metrics = host.final(request_id).tensors["request_metrics"]
    return int(metrics[REQUEST_METRICS.index("cached_tokens")])


def chat(
    cache: KvCacheConfig,
    turns: Any,
    policy: Any = NO_EVICT,
    kind: ModelType = FUSED,
    create_scheduler: Any = None,
    **more: Any,
) -> list[int]:
    """Ask turn after turn of a conversation; return the cached tokens of each."""
    host, text, found = RecordingCallbacks(), [], []
    params = OptionalParams(kv_cache_config=cache, **more)
    config = SchedulerConfig(policy, create_scheduler=create_scheduler)
    own = {"scheduler_config": config, "optional_params": params}
    with GptManager(Digesting(), kind, **own, **host.keywords()) as manager:
        host.manager = manager
        for number, (turn, length) in enumerate(turns):
            text += turn
            host.submit(InferenceRequest.from_tokens(number, text, length))
            host.final(number, 30)
            answer = host.output(number)[len(text) :]
            assert answer == continued(text, length)
            text += answer
            found.append(cached_tokens(host, number))
        assert manager.audit().ok
    return found


TURNS = [([7] * 20, 5), ([8] * 9, 20), ([9] * 3, 2), ([3] * 20, 4)]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("snapshots", [None, 1, 2])
def test_a_conversation_computes_only_what_is_new(chunked: bool, snapshots: int | None) -> None:
    cache = KvCacheConfig(enable_block_reuse=None, tokens_per_block=8, state_snapshots=snapshots)
    # 20 + 5, 34 + 20 and 57 + 2 tokens: all full blocks of these
    assert chat(cache, TURNS, enable_chunked_context=chunked) == [0, 24, 48, 56]


def test_a_static_batch_finds_answers() -> None:
    cache = KvCacheConfig(enable_block_reuse=True, tokens_per_block=8)
    found = chat(cache, TURNS, CapacitySchedulerPolicy.STATIC_BATCH)
    assert found == [0, 24, 48, 48]  # the third prompt ends between two boundaries


def own_scheduler(
    max_num_requests: int, kv_cache_manager: Any, micro_batch_scheduler: Any, **_: Any
) -> Any:
    capacity = GuaranteedNoEvictScheduler(max_num_requests, kv_cache_manager)
    return SimpleScheduler(capacity, micro_batch_scheduler)


@pytest.mark.parametrize(("chunked", "last"), [(False, 48), (True, 56)])
def test_contexts_of_an_own_scheduler_are_cut_only_if_it_chunks(chunked: bool, last: int) -> None:
    cache = KvCacheConfig(enable_block_reuse=True, tokens_per_block=8)
    own = {"create_scheduler": own_scheduler, "enable_chunked_context": chunked}
    assert chat(cache, TURNS, **own) == [0, 24, 48, last]


@pytest.mark.parametrize("kind", [ModelType.V1, FUSED])
def test_reuse_can_be_off(kind: ModelType) -> None:
    off = None if kind is ModelType.V1 else 0
    cache = KvCacheConfig(enable_block_reuse=None, tokens_per_block=8, state_snapshots=off)
    assert chat(cache, TURNS[:2], kind=kind) == [0, 0]


@pytest.mark.parametrize(
    ("model", "cache", "text"),
    [
        (Digesting(), {"enable_block_reuse": True, "state_snapshots": 0}, "of at least 1"),
        (Digesting(), {"state_snapshots": 3}, "state_snapshots = 3 needs enable_block_reuse"),
        (
            Digesting(),
            {"enable_block_reuse": True, "state_snapshots": 1 << 21},
            "they need .* bytes, and .* are free",
        ),
        (
            ScriptedModel(lambda history: 1),
            {"enable_block_reuse": True, "state_snapshots": 3},
            "is refused: the model keeps no state",
        ),
    ],
    ids=["none", "off", "too many", "no state"],
)
def test_wrong_numbers_of_snapshots_are_refused(model: Any, cache: Any, text: str) -> None:
    if cache["state_snapshots"] > 100:
        model.spec = replace(model.spec, states=(StateShape((1 << 22,)),))
    with pytest.raises(ConfigError, match=f"KvCacheConfig.*{text}"):
        run(model, [], max_batch_size=2, kv_cache_config=KvCacheConfig(**cache))


def test_snapshots_are_refused_with_v1() -> None:
    cache = KvCacheConfig(enable_block_reuse=None, state_snapshots=3)
    with pytest.raises(ConfigError, match=r"state_snapshots is refused with ModelType.V1"):
        run(Digesting(), [], ModelType.V1, max_batch_size=2, kv_cache_config=cache)


def test_a_failed_step_leaves_no_snapshot() -> None:
    """The step that fails has changed the states already, and a snapshot was due after it."""
    model = Digesting()
    model.fails_at = {2}
    cache = KvCacheConfig(enable_block_reuse=True, tokens_per_block=8)
    prompts = [[4] * 20, [4] * 20, [4] * 30]
    requests = [InferenceRequest.from_tokens(i, it, 6) for i, it in enumerate(prompts)]
    host = run(model, requests, max_batch_size=1, kv_cache_config=cache)
    assert "out of memory" in host.final(0).error
    assert all(host.output(i) == continued(prompts[i], 6) for i in (1, 2))
    assert [cached_tokens(host, i) for i in (1, 2)] == [0, 16]


def test_cleared_blocks_lose_their_snapshots() -> None:
    host = RecordingCallbacks()
    cache = KvCacheConfig(enable_block_reuse=True, tokens_per_block=8)
    params = OptionalParams(kv_cache_config=cache, exclude_input_in_output=True)
    with GptManager(Digesting(), FUSED, optional_params=params, **host.keywords()) as manager:
        host.manager = manager
        for number in range(4):
            if number == 2:
                manager.clear_cached()
            host.submit(InferenceRequest.from_tokens(number, [5] * 20, 4))
            host.final(number, 30)
            assert host.output(number) == continued([5] * 20, 4)
    assert [cached_tokens(host, number) for number in range(4)] == [0, 16, 0, 16]


def test_a_recording_with_snapshots_replays(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    host = run_many(
        Digesting(),
        lambda own, size: [continued(it, size) for it in own],
        30,
        cache=REUSE,
        recording_path=path,
    )
    assert host.total("Paused Requests") > 0
    recording = read_recording(path)
    schedules = [it.schedule for it in recording.iterations if it.schedule is not None]
    assert any(it.state_loads for it in schedules) and any(it.state_saves for it in schedules)
    report = replay(recording)
    assert report.divergence is None and report.compared == len(recording.iterations)
    blueprint = recording.header.blueprint
    simulated = variant(blueprint, NO_EVICT).sizes
    assert simulated.has_states and simulated.num_snapshots == REUSE["state_snapshots"]
    own = replace(blueprint, custom_scheduler="Own")  # such a scheduler does not cut contexts
    policy = blueprint.scheduler.capacity_scheduler_policy
    assert variant(own, policy) == variant(blueprint, policy)
