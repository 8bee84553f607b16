"""Whole managers over real networks: parity with transformers, and schedules that never show."""

from __future__ import annotations

import json
from importlib.resources import files

import jsonschema
import numpy as np
import pytest
import torch
from checkpoints import CONFIGS, checkpoint, is_greedy, random_model

from gptmanager import (
    CapacitySchedulerPolicy,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.executor.torch_executor import TorchExecutor
from gptmanager.models import CheckpointModel
from gptmanager.testing import ContractChecker, RecordingCallbacks

FUSED = ModelType.INFLIGHT_FUSED_BATCHING
NO_EVICT = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION
SCHEMA = json.loads(files("gptmanager").joinpath("statistics.schema.json").read_text())
STATIC_BATCH = CapacitySchedulerPolicy.STATIC_BATCH


def serve(
    source,
    requests,
    policy=NO_EVICT,
    max_tokens=2048,
    model_type=FUSED,
    max_beam_width=1,
    **options,
):
    """Run all requests through a manager held to its contract; returns the recording."""
    host = RecordingCallbacks(requests)
    checker = ContractChecker(host.get_inference_requests, host.send_response)
    options.setdefault("max_batch_size", 8)
    options["kv_cache_config"] = KvCacheConfig(max_tokens=max_tokens, tokens_per_block=8)
    with GptManager(
        source,
        model_type,
        max_beam_width,
        SchedulerConfig(policy),
        checker.get_inference_requests,
        checker.send_response,
        host.poll_stop_signal,
        host.return_batch_manager_stats,
        OptionalParams(**options),
    ) as manager:
        assert manager.wait_idle(60)
    checker.check(manager)
    assert not [response.error for response in host.responses if response.error]
    return host


@pytest.fixture(scope="module")
def llama():
    return random_model(CONFIGS["llama"])


@pytest.fixture(scope="module")
def source(llama):
    return checkpoint(llama)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gpt2"])
@pytest.mark.every(3)
def test_greedy_tokens_are_those_of_transformers(family):
    model = random_model(CONFIGS[family])
    chance = np.random.default_rng(3)
    prompts = [chance.integers(0, 96, n).tolist() for n in (1, 5, 40, 17, 8, 63)]
    requests = [InferenceRequest.from_tokens(i, p, 12 + 9 * i) for i, p in enumerate(prompts)]
    host = serve(checkpoint(model), requests, max_batch_size=4)
    for i, prompt in enumerate(prompts):
        output = host.output(i)
        assert output[: len(prompt)] == prompt and len(output) == len(prompt) + 12 + 9 * i
        assert is_greedy(model, prompt, output[len(prompt) :])


def mixed_requests():
    """Greedy and sampled, streaming or not, ended by length, end_id or stop words."""
    chance = np.random.default_rng(11)
    requests = []
    for i in range(14):
        options = {}
        if i % 2:
            options = {"temperature": 0.9, "random_seed": 100 + i}
        if i % 4 == 1:
            options["runtime_top_k"] = 20
        if i % 4 == 3:
            options["runtime_top_p"] = 0.8
        if i % 5 == 0:
            options["end_id"] = 7
            options["min_length"] = 3
        if i % 3 == 0:
            options["stop_words_list"] = [[5], [9, 11]]
        prompt = chance.integers(0, 96, int(chance.integers(1, 40))).tolist()
        requests.append(
            InferenceRequest.from_tokens(
                *(i, prompt, int(chance.integers(1, 30))),
                is_streaming=i % 2 == 0,
                priority=0.5 + (i % 3) / 10,
                **options,
            )
        )
    return requests


@pytest.fixture(scope="module")
def alone(source):
    """What each of the mixed requests gives in a manager of its own kind, one at a time."""
    host = serve(source, mixed_requests(), max_batch_size=1, deterministic=True)
    return {request.request_id: host.output(request.request_id) for request in mixed_requests()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_tokens": 40},
        {"enable_chunked_context": True, "max_num_tokens": 16},
        {"run_ahead": 1},
        {"run_ahead": 1, "enable_chunked_context": True, "max_num_tokens": 24},
        {"max_tokens": 144},
        {"policy": MAX_UTILIZATION, "max_tokens": 120},
        {"policy": MAX_UTILIZATION, "max_tokens": 160, "run_ahead": 1},
        {"policy": STATIC_BATCH, "max_batch_size": 3},
        {"enable_trt_overlap": True, "max_batch_size": 3},
        {
            "enable_trt_overlap": True,
            "max_batch_size": 2,
            "policy": MAX_UTILIZATION,
            "max_tokens": 120,
        },
        {
            "enable_trt_overlap": True,
            "max_batch_size": 4,
            "enable_chunked_context": True,
            "max_num_tokens": 16,
        },
        {"model_type": ModelType.INFLIGHT_BATCHING},
        {
            "model_type": ModelType.INFLIGHT_BATCHING,
            "enable_chunked_context": True,
            "max_num_tokens": 16,
        },
        {"model_type": ModelType.V1, "max_batch_size": 4},
        {"model_type": ModelType.V1, "max_batch_size": 4, "run_ahead": 1},
    ],
    ids=str,
)
@pytest.mark.every(7)
def test_no_schedule_shows_in_the_tokens_bit_by_bit(source, alone, options):
    host = serve(source, mixed_requests(), deterministic=True, **options)
    assert {i: host.output(i) for i in alone} == alone


def test_a_tight_pool_makes_max_utilization_pause_and_resume(source, alone):
    host = serve(
        source, mixed_requests(), MAX_UTILIZATION, 120, deterministic=True, max_batch_size=8
    )
    paused = [float(r.tensors["request_metrics"][3]) for r in host.responses if r.is_final]
    assert max(paused) >= 1
    assert {i: host.output(i) for i in alone} == alone


def test_v1_runs_one_batch_after_the_other_and_counts_its_empty_slots(source):
    lengths = [3, 9, 5, 2, 6]
    requests = [InferenceRequest.from_tokens(i, [1 + i] * 4, n) for i, n in enumerate(lengths)]
    host = serve(source, requests, model_type=ModelType.V1, max_batch_size=3)
    records = [json.loads(record) for record in host.statistics]
    of = {key: [record[key] for record in records] for key in records[0] if key != "Timestamp"}
    assert of["Context Requests"] == [3] + 8 * [0] + [2] + 5 * [0]
    assert of["Scheduled Requests"] == [3, 3, 3, 2, 2, 1, 1, 1, 1] + [2, 2, 1, 1, 1, 1]
    assert of["Empty Generation Slots"] == [0, 0, 0, 1, 1, 2, 2, 2, 2] + [0, 0, 1, 1, 1, 1]
    assert of["Total Generation Tokens"] == of["Scheduled Requests"]
    assert sum(of["Total Generation Tokens"]) == sum(lengths)
    assert sum(of["Empty Generation Slots"]) == (6 + 4) + 4
    assert set(of["Tokens per KV cache block"]) == {max_positions(source)}
    assert "MicroBatch ID" not in of and "Generation Requests" not in of
    validator = jsonschema.Draft202012Validator(SCHEMA)
    for record in records:
        validator.validate(record)


@pytest.mark.parametrize("width", [1, 3])
def test_v1_rows_hold_what_transformers_caches(llama, width, monkeypatch):
    """`[max_batch_size * max_beam_width, 2, kv heads, max_seq_len, head dim]`, a row a sequence."""
    seen, forward = [], CheckpointModel.forward

    def watched(self, batch, kv_pool):
        logits = forward(self, batch, kv_pool)
        for line, length in zip(batch.slots.tolist(), batch.kv_lengths.tolist(), strict=True):
            tokens = batch.token_table[line, :length].clone()
            (row,) = batch.block_tables[line].tolist()
            layers = [kv_pool.contiguous(layer) for layer in range(self.spec.num_layers)]
            assert layers[0].data_ptr() == kv_pool.keys.data_ptr()
            shape = (
                3 * width,
                2,
                self.spec.num_kv_heads,
                max_positions(source),
                self.spec.head_dim,
            )
            assert {tuple(layer.shape) for layer in layers} == {shape}
            assert all(layer.is_contiguous() for layer in layers)
            seen.append(
                (line, row, tokens, [layer[row, :, :, :length].clone() for layer in layers])
            )
        return logits

    monkeypatch.setattr(CheckpointModel, "forward", watched)
    source = checkpoint(llama)
    requests = [
        InferenceRequest.from_tokens(i, [5 + i] * (4 + i), 6, beam_width=width) for i in range(4)
    ]
    options = {"max_batch_size": 3, "max_beam_width": width, "max_tokens": None}
    host = serve(source, requests, model_type=ModelType.V1, **options)
    assert len(host.responses) == 4
    for _, _, tokens, rows in seen:
        with torch.no_grad():
            cache = llama(tokens[None].long(), use_cache=True).past_key_values
        for layer, row in zip(cache.layers, rows, strict=True):
            torch.testing.assert_close(row, torch.stack((layer.keys[0], layer.values[0])))
    assert {row for _, row, *_ in seen} == set(range(3 * width))


def max_positions(source):
    return source[0]["max_position_embeddings"]


@pytest.mark.parametrize("model_type", [FUSED, ModelType.INFLIGHT_BATCHING])
def test_inflight_batching_runs_contexts_and_generation_in_two_passes(
    llama, model_type, monkeypatch
):
    source = checkpoint(llama)
    forwards = []
    forward = CheckpointModel.forward

    def counted(self, batch, kv_pool):
        rows = len(batch.kv_lengths)
        forwards.append((batch.num_context_rows, rows - batch.num_context_rows))
        return forward(self, batch, kv_pool)

    monkeypatch.setattr(CheckpointModel, "forward", counted)
    requests = [InferenceRequest.from_tokens(i, [1 + i] * 4, 3) for i in range(4)]
    serve(source, requests, model_type=model_type, max_num_tokens=10)
    two_passes = [(2, 0), (2, 0), (0, 2), (0, 4), (0, 2)]
    assert forwards == ([(2, 0), (2, 2), (0, 4), (0, 2)] if model_type is FUSED else two_passes)


def test_overlap_keeps_two_micro_batches_of_different_requests_in_flight(source):
    requests = [InferenceRequest.from_tokens(i, [1 + i] * 4, 4) for i in range(4)]
    host = serve(source, requests, max_batch_size=2, enable_trt_overlap=True)
    records = [json.loads(record) for record in host.statistics]
    assert [record["MicroBatch ID"] for record in records] == [0, 1] * 4
    assert [record["Scheduled Requests"] for record in records] == [2] * 8
    assert {record["Max Request Count"] for record in records} == {4}


def test_logits_of_a_row_are_bitwise_those_it_has_alone(source, monkeypatch):
    """Stronger than tokens: what the sampler sees."""
    seen = {}
    original = TorchExecutor.sample

    def spy(self, step):
        for row, logits in zip(step.schedule.sampling_rows, step.logits, strict=True):
            seen.setdefault((row.request_id, row.position + row.num_tokens), []).append(
                logits.clone()
            )
        original(self, step)

    monkeypatch.setattr(TorchExecutor, "sample", spy)
    for options in (
        {"max_batch_size": 1},
        {},
        {"enable_chunked_context": True, "max_num_tokens": 16},
    ):
        serve(source, mixed_requests(), deterministic=True, **options)
    assert len(seen) > 100
    for first, *others in seen.values():
        assert len(others) == 2
        assert all(torch.equal(first, other) for other in others)


def test_a_seed_repeats_and_its_absence_gives_equal_prompts_different_texts(source):
    def requests(**options):
        return [
            InferenceRequest.from_tokens(i, [1, 2, 3], 12, temperature=1.0, **options)
            for i in range(4)
        ]

    seeded = serve(source, requests(random_seed=5))
    assert len({tuple(seeded.output(i)) for i in range(4)}) == 1
    unseeded = serve(source, requests())
    assert len({tuple(unseeded.output(i)) for i in range(4)}) == 4
    again = serve(source, requests())
    assert [again.output(i) for i in range(4)] == [unseeded.output(i) for i in range(4)]
    other = serve(source, requests(), seed=1)
    assert [other.output(i) for i in range(4)] != [unseeded.output(i) for i in range(4)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_serve_too(source, dtype):
    requests = [InferenceRequest.from_tokens(i, [1 + i, 2, 3], 10) for i in range(3)]
    host = serve(source, requests, dtype=dtype)
    assert all(len(host.output(i)) == 13 for i in range(3))


def test_no_token_of_a_sampled_request_depends_on_its_neighbours(source):
    """Sampling itself, without deterministic=True: the same request in two companies."""
    wanted = InferenceRequest.from_tokens(1, [4, 5, 6], 20, runtime_top_p=0.9, random_seed=3)
    alone_host = serve(source, [wanted])
    others = [InferenceRequest.from_tokens(i, [i, 1], 25, temperature=1.3) for i in range(2, 8)]
    assert serve(source, [*others, wanted]).output(1) == alone_host.output(1)
