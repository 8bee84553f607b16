"""Sink tokens beside attention windows: positions, and whole managers against dense masks."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from checkpoints import CONFIGS, checkpoint, random_model
from hypothesis import given
from hypothesis import strategies as st

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
from gptmanager.executor.torch_executor import TorchExecutor
from gptmanager.kv_cache.attention_window import AttentionWindow
from gptmanager.testing import ContractChecker, RecordingCallbacks

NO_EVICT = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION
FUSED = ModelType.INFLIGHT_FUSED_BATCHING
BLOCK = 8

# Positions ---------------------------------------------------------------------------------------

WINDOWS = st.builds(
    AttentionWindow, st.integers(1, 40), st.integers(0, 30), st.sampled_from([1, 3, 8])
)


@given(window=WINDOWS, cuts=st.lists(st.integers(1, 90), min_size=1, max_size=5))
def test_whatever_a_query_sees_is_still_there(window: AttentionWindow, cuts: list[int]) -> None:
    held: dict[tuple[int, int], int] = {}  # (block, offset) -> position
    start = 0
    for cut in cuts:
        assert [start, *(end for _, end in window.pieces(start, start + cut))][-1] == start + cut
        for position, end in window.pieces(start, start + cut):
            assert position == start < end
            start = end
            places = []
            for at in range(end):
                number, offset = divmod(at, window.tokens_per_block)
                places.append((window.index(number), offset))
                if at >= position:
                    held[places[-1]] = at
            for query in range(position, end):
                for at in range(query + 1):
                    if at > query - window.size or at < window.sink:
                        assert held[places[at]] == at
    assert max(block for block, _ in held) < window.num_blocks


@given(window=WINDOWS, length=st.integers(1, 300))
def test_a_sequence_that_fits_is_stored_block_by_block_and_runs_in_one_piece(
    window: AttentionWindow, length: int
) -> None:
    assert [window.index(i) for i in range(window.num_blocks)] == [*range(window.num_blocks)]
    if length <= window.num_tokens:
        assert [*window.pieces(0, length)] == [(0, length)]


@given(window=WINDOWS, start=st.integers(0, 120), length=st.integers(1, 120))
def test_a_piece_ends_where_a_block_more_would_overwrite_what_its_first_query_sees(
    window: AttentionWindow, start: int, length: int
) -> None:
    size = window.tokens_per_block
    for position, end in window.pieces(start, start + length):
        if end < start + length:
            lost = (
                end - window.num_ring_blocks * size
            )  # the first position of the overwritten block
            assert window.index(lost // size) == window.index(end // size) and end % size == 0
            assert lost + size - 1 > position - window.size


# Whole managers ----------------------------------------------------------------------------------


def serve(source, requests, kv_cache, policy=NO_EVICT, model_type=FUSED, **options):
    """Run all requests through a manager held to its contract; returns the recording."""
    host = RecordingCallbacks(requests)
    checker = ContractChecker(host.get_inference_requests, host.send_response)
    options.setdefault("max_batch_size", 8)
    params = OptionalParams(
        kv_cache_config=KvCacheConfig(**{"tokens_per_block": BLOCK, **kv_cache}), **options
    )
    with GptManager(
        source,
        model_type,
        1,
        SchedulerConfig(policy),
        checker.get_inference_requests,
        checker.send_response,
        host.poll_stop_signal,
        host.return_batch_manager_stats,
        params,
    ) as manager:
        assert manager.wait_idle(60)
    checker.check(manager)
    assert not [response.error for response in host.responses if response.error]
    return host


def used_blocks(host):
    return max(json.loads(record)["Used KV cache blocks"] for record in host.statistics)


def new_model(family):
    sizes = "n_positions" if family == "gpt2" else "max_position_embeddings"
    return random_model({**CONFIGS[family], sizes: 640})


@pytest.fixture(scope="module")
def models():
    return {family: new_model(family) for family in ("llama", "gpt2", "mistral", "qwen2_windows")}


@pytest.fixture(scope="module")
def source(models):
    return checkpoint(models["llama"])


def dense_logits(model, tokens, size, sink):
    """transformers' logits `[T, vocab]` under the mask of the window."""
    position, at = torch.arange(len(tokens))[:, None], torch.arange(len(tokens))
    sliding = getattr(model.config, "sliding_window", None) or 10**6
    masks = {}
    for kind, width in ("full_attention", size), ("sliding_attention", min(size, sliding)):
        seen = (at <= position) & ((at > position - width) | (at < sink))
        masks[kind] = torch.zeros(seen.shape).masked_fill(~seen, -1e30)[None, None]
    mask = masks["full_attention"]
    if model.config.model_type == "mistral":
        mask = masks["sliding_attention"]
    if model.config.model_type == "qwen2":
        mask = masks
    with torch.no_grad():
        return model(torch.tensor([tokens]), attention_mask=mask, use_cache=False).logits[0]


def mixed_requests(lengths=(1, 7, 19, 20, 21, 40, 41, 100, 300, 521), new_tokens=45):
    """Every other one is sampled."""
    chance = np.random.default_rng(5)
    return [
        InferenceRequest.from_tokens(
            *(i, chance.integers(0, 96, length).tolist(), new_tokens),
            **({"temperature": 0.9, "random_seed": 40 + i, "runtime_top_k": 20} if i % 2 else {}),
        )
        for i, length in enumerate(lengths)
    ]


@pytest.fixture
def seen_logits(monkeypatch):
    """(request id, position of the token to choose) -> what the sampler was given for it."""
    seen = {}
    original = TorchExecutor.sample

    def spy(self, step):
        for row, logits in zip(step.schedule.sampling_rows, step.logits, strict=True):
            seen[row.request_id, row.position + row.num_tokens] = logits.clone()
        original(self, step)

    monkeypatch.setattr(TorchExecutor, "sample", spy)
    return seen


def check_logits(host, requests, model, seen, size, sink):
    """All logits are those of the dense network, and greedy tokens are the likeliest of those."""
    for request in requests:
        request_id, output = request.request_id, host.output(request.request_id)
        expected = dense_logits(model, output[:-1], size, sink)
        positions = [position for owner, position in seen if owner == request_id]
        assert max(positions) == len(output) - 1
        for position in positions:
            torch.testing.assert_close(
                seen[request_id, position], expected[position - 1], rtol=2e-4, atol=2e-4
            )
            if not request_id % 2:
                assert output[position] == int(expected[position - 1].argmax())


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "qwen2_windows"])
@pytest.mark.parametrize(
    ("size", "sink"), [(20, 0), (16, 4), (24, 8), (21, 13), (5, 0), (1, 0), (100, 3)]
)
@pytest.mark.every(3)
def test_logits_are_those_of_a_dense_mask(models, seen_logits, family, size, sink):
    requests = mixed_requests((1, size, size + 1, 41, 200), 30)
    kv_cache = {"max_attention_window": size, "sink_token_length": sink}
    host = serve(checkpoint(models[family]), requests, kv_cache)
    check_logits(host, requests, models[family], seen_logits, size, sink)


SCHEDULES = [
    {},
    {"enable_chunked_context": True, "max_num_tokens": 260},
    {"run_ahead": 1},
    {"max_num_tokens": 600, "max_batch_size": 3},
    {"model_type": ModelType.INFLIGHT_BATCHING},
    {"enable_trt_overlap": True, "max_batch_size": 3},
    {"policy": MAX_UTILIZATION, "max_tokens": 12 * BLOCK, "max_num_tokens": 300},
    {"policy": MAX_UTILIZATION, "max_tokens": 12 * BLOCK, "run_ahead": 1},
    {"policy": CapacitySchedulerPolicy.STATIC_BATCH, "max_batch_size": 3},
    {"enable_block_reuse": True, "max_batch_size": 2},
]


@pytest.fixture(scope="module")
def alone(source):
    kv_cache = {"max_attention_window": 20, "sink_token_length": 5}
    host = serve(source, mixed_requests(), kv_cache, max_batch_size=1, deterministic=True)
    return {request.request_id: host.output(request.request_id) for request in mixed_requests()}


@pytest.mark.parametrize("options", SCHEDULES, ids=str)
@pytest.mark.every(4)
def test_no_schedule_shows(models, source, alone, seen_logits, options):
    options, kv_cache = dict(options), {"max_attention_window": 20, "sink_token_length": 5}
    for name in ("max_tokens", "enable_block_reuse"):
        if name in options:
            kv_cache[name] = options.pop(name)
    host = serve(source, mixed_requests(), kv_cache, deterministic=True, **options)
    assert {i: host.output(i) for i in alone} == alone
    check_logits(host, mixed_requests(), models["llama"], seen_logits, 20, 5)
    assert used_blocks(host) <= options.get("max_batch_size", 8) * 5 * (
        2 if options.get("enable_trt_overlap") else 1
    )
    if "max_tokens" in kv_cache:
        pauses = [float(r.tensors["request_metrics"][3]) for r in host.responses if r.is_final]
        assert max(pauses) >= 1


@pytest.mark.parametrize(
    ("size", "sink", "blocks"), [(16, 0, 3), (17, 0, 4), (16, 1, 4), (16, 8, 4), (600, 9, 71)]
)
def test_a_sequence_holds_the_blocks_of_its_sink_its_window_and_one_more(
    source, size, sink, blocks
):
    kv_cache = {"max_attention_window": size, "sink_token_length": sink}
    request = InferenceRequest.from_tokens(1, [1 + i % 90 for i in range(500)], 64)
    host = serve(source, [request], kv_cache)
    assert used_blocks(host) == blocks
    short = InferenceRequest.from_tokens(1, [1] * 7, 9)
    assert used_blocks(serve(source, [short], kv_cache)) == 2


def test_logits_of_a_context_in_pieces_come_whole(models, source):
    requests = [
        InferenceRequest.from_tokens(
            0, [3 + i % 80 for i in range(300)], 4, return_context_logits=True
        )
    ]
    host = serve(
        source,
        requests,
        {"max_attention_window": 20, "sink_token_length": 5},
        gather_context_logits=True,
        enable_chunked_context=True,
        max_num_tokens=256,
    )
    logits = torch.as_tensor(host.responses[-1].tensors["context_logits"])[0]
    expected = dense_logits(models["llama"], host.output(0)[:300], 20, 5)
    torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4)


def test_a_window_of_everything_hides_nothing(source, alone):
    requests = mixed_requests()
    everything = serve(source, requests, {"max_attention_window": 10**6}, deterministic=True)
    none = serve(source, requests, {}, deterministic=True)
    outputs = {i: none.output(i) for i in alone}
    assert {i: everything.output(i) for i in alone} == outputs != alone


# What is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kv_cache", "options", "message"),
    [
        ({"max_attention_window": 0}, {}, "max_attention_window = 0 must be an integer from 1"),
        ({"max_attention_window": True}, {}, "max_attention_window = True must be an integer"),
        ({"max_attention_window": 8.5}, {}, "max_attention_window = 8.5 must be an integer"),
        ({"max_attention_window": 8, "sink_token_length": -1}, {}, "sink_token_length = -1 must"),
        (
            {"max_attention_window": 8, "sink_token_length": 8},
            {},
            "sink_token_length = 8 must be less than max_attention_window = 8",
        ),
        ({"sink_token_length": 1}, {}, "sink_token_length = 1 must be .*window = None"),
        ({"max_attention_window": 8}, {"model_type": ModelType.V1}, "max_attention_window is .*V1"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(source, kv_cache, options, message):
    with pytest.raises(ConfigError, match=message):
        serve(source, [], kv_cache, **options)
