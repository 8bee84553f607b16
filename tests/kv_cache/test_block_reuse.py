"""Block reuse in whole managers: it never shows in the tokens, and it is there."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gptmanager import (
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.loop.admission import _salt
from gptmanager.loop.responses import REQUEST_METRICS
from gptmanager.testing import ContractChecker, RecordingCallbacks

NO_EVICT = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION
STATIC_BATCH = CapacitySchedulerPolicy.STATIC_BATCH
EQUAL_PROGRESS = ContextChunkingPolicy.EQUAL_PROGRESS
SIZE = 8


class Served:
    """A manager over `source` with block reuse, held to its contract; waves of requests."""

    def __init__(
        self, source, *, policy=NO_EVICT, chunking=None, max_tokens=2048, reuse=True, **options
    ):
        self.host = RecordingCallbacks()
        self.checker = ContractChecker(self.host.get_inference_requests, self.host.send_response)
        cache = {name: options.pop(name) for name in list(options) if "partial" in name}
        options.setdefault("max_batch_size", 8)
        self.manager = GptManager(
            source,
            ModelType.INFLIGHT_FUSED_BATCHING,
            1,
            SchedulerConfig(policy, chunking),
            self.checker.get_inference_requests,
            self.checker.send_response,
            self.host.poll_stop_signal,
            self.host.return_batch_manager_stats,
            OptionalParams(
                kv_cache_config=KvCacheConfig(
                    max_tokens=max_tokens, tokens_per_block=SIZE, enable_block_reuse=reuse, **cache
                ),
                deterministic=True,
                **options,
            ),
        )
        self.host.manager = self.manager

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.manager.__exit__(*error)

    def run(self, *requests):
        """All at once, to their ends; everything is free then, whatever is cached."""
        self.host.submit(*requests)
        assert self.manager.wait_idle(60)
        self.checker.check(self.manager)
        assert not [r.error for r in self.host.responses if r.error]
        report = self.manager.audit()
        assert report.ok and report.free_blocks == report.total_blocks
        return {request.request_id: self.host.output(request.request_id) for request in requests}

    def metric(self, request_id, name):
        metrics = self.host.final(request_id).tensors["request_metrics"]
        return int(metrics[REQUEST_METRICS.index(name)])

    def cached(self, *request_ids):
        return [self.metric(request_id, "cached_tokens") for request_id in request_ids]

    @property
    def statistics(self):
        return [json.loads(record)["gptmanager"]["block_reuse"] for record in self.host.statistics]


def conversations():
    """Waves of requests: equal prompts, shared beginnings, and continued texts among them."""
    chance = np.random.default_rng(5)
    shared = chance.integers(0, 96, 45).tolist()

    def request(i, prompt, new, **options):
        if i % 2:
            options |= {"temperature": 0.9, "random_seed": 100 + i}
        streaming = i % 3 == 0
        return InferenceRequest.from_tokens(i, prompt, new, is_streaming=streaming, **options)

    first = [request(i, shared[: 45 - 3 * (i % 4)], 9 + i) for i in range(6)]
    second = [
        request(i, shared[: 20 + i] + chance.integers(0, 96, 7).tolist(), 12, end_id=7)
        for i in range(6, 12)
    ]
    third = [request(i, shared, 5, cache_salt="a" if i % 2 else None) for i in range(12, 16)]
    return [first, second, third, [request(i, shared[:17], 30) for i in range(16, 20)]]


@pytest.fixture(scope="module")
def alone(source):
    """What each request gives alone, without reuse."""
    with Served(source, reuse=False, max_batch_size=1) as served:
        outputs = {}
        for wave in conversations():
            outputs |= served.run(*wave)
        assert served.cached(*outputs) == [0] * len(outputs)
        return outputs


@pytest.mark.every(3)
@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_batch_size": 1},
        {"enable_chunked_context": True, "max_num_tokens": 16},
        {"enable_chunked_context": True, "max_num_tokens": 24, "chunking": EQUAL_PROGRESS},
        {"max_tokens": 96, "max_batch_size": 4},
        {"policy": MAX_UTILIZATION, "max_tokens": 96},
        {"policy": MAX_UTILIZATION, "max_tokens": 136, "max_num_tokens": 24},
        {"policy": STATIC_BATCH, "max_batch_size": 3},
        {"enable_partial_reuse": False},
        {"copy_on_partial_reuse": False, "max_tokens": 160},
    ],
    ids=str,
)
def test_reuse_never_shows_in_the_tokens_bit_by_bit(source, alone, options, run_ahead):
    with Served(source, run_ahead=run_ahead, **options) as served:
        outputs = {}
        for wave in conversations():
            outputs |= served.run(*wave)
        assert outputs == alone
        assert sum(served.cached(*outputs)) > 100
        if options.get("policy") is MAX_UTILIZATION:
            assert sum(served.metric(i, "pauses") for i in outputs) > 0


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_equal_prompts_that_come_together_are_computed_once(source, run_ahead):
    requests = [InferenceRequest.from_tokens(i, list(range(40)), 6) for i in range(5)]
    with Served(source, run_ahead=run_ahead) as served:
        outputs = served.run(*requests)
        assert len({tuple(output) for output in outputs.values()}) == 1
        # the others wait for the first context; 39 of 40 tokens are there then
        assert served.cached(*range(5)) == [0, 39, 39, 39, 39]
        records = [json.loads(record) for record in served.host.statistics]
        assert [record["Total Context Tokens"] for record in records[:2]] == [40, 4]
        assert [record["Waiting Requests"] for record in records[:2]] == [4, 0]


def test_a_conversation_goes_on_from_what_was_generated(source):
    with Served(source) as served:
        text = served.run(InferenceRequest.from_tokens(1, list(range(30)), 20))[1]
        served.run(InferenceRequest.from_tokens(2, [*text, 1, 2, 3], 5))
        assert served.cached(2) == [49]  # the 50th was never stored


def test_salts_separate_and_equal_salts_share(source):
    prompt = list(range(40))

    def request(i, salt):
        return InferenceRequest.from_tokens(i, prompt, 4, cache_salt=salt)

    with Served(source) as served:
        for i, salt in enumerate([None, "a", "b", "a", 1, "1", None]):
            served.run(request(i, salt))
        assert served.cached(*range(7)) == [0, 0, 0, 39, 0, 0, 39]


def test_a_long_integer_is_another_salt_than_each_text():
    for number in (2**64, -(2**63) - 1, 2**128 - 1):
        texts = [f"int {number:#x}", f"str int {number:#x}"]
        assert len({_salt(salt) for salt in (number, number + 1, *texts)}) == 4


def test_a_salt_that_is_neither_text_nor_number_is_refused(source):
    with Served(source) as served:
        served.host.submit(InferenceRequest.from_tokens(1, [1, 2], 2, cache_salt=[1]))
        error = served.host.final(1).error
        assert error.startswith("InvalidRequestError: cache_salt = [1] must be a str or an int")


class OddText(str):
    """Equal to nothing, and in no dictionary."""

    def __hash__(self):
        raise RuntimeError("no hash")

    def __eq__(self, other):
        raise RuntimeError("not comparable")


class OddNumber(int):
    __hash__ = OddText.__hash__
    __eq__ = OddText.__eq__


def test_a_salt_is_the_text_or_the_number_whatever_its_class_says(source):
    prompt = list(range(40))
    with Served(source) as served:
        for i, salt in enumerate([OddText("a"), "a", OddNumber(7), 7, True, 1]):
            served.run(InferenceRequest.from_tokens(i, prompt, 4, cache_salt=salt))
        assert served.cached(*range(6)) == [0, 39, 0, 39, 0, 39]


def test_partial_reuse_can_be_switched_off(source):
    prompt = list(range(30))
    for options, cached in [
        ({}, 29),
        ({"enable_partial_reuse": False}, 24),
        ({"copy_on_partial_reuse": False}, 29),
    ]:
        with Served(source, **options) as served:
            served.run(InferenceRequest.from_tokens(1, prompt, 2))
            served.run(InferenceRequest.from_tokens(2, prompt, 2))
            assert served.cached(2) == [cached]


def test_a_text_that_goes_on_finds_its_last_partial_block(source):
    with Served(source, enable_partial_reuse=False) as served:
        served.run(InferenceRequest.from_tokens(1, list(range(30)), 7))
        text = served.host.output(1)
        served.run(InferenceRequest.from_tokens(2, [*text, 5, 6], 2))
        assert served.cached(2) == [36]


def test_statistics_count_what_was_found(source):
    with Served(source) as served:
        served.run(InferenceRequest.from_tokens(1, list(range(30)), 4))
        served.run(InferenceRequest.from_tokens(2, list(range(30)), 4))
        names = ("reused_blocks", "missed_blocks", "reused_tokens", "cached_blocks")
        assert [served.statistics[0][name] for name in names] == [0, 4, 0, 3]
        assert [served.statistics[-1][name] for name in names] == [4, 4, 29, 5]
    with Served(source, reuse=False) as served:
        served.run(InferenceRequest.from_tokens(1, list(range(30)), 4))
        assert set(served.statistics[-1].values()) == {0}


def test_what_is_cached_costs_no_tokens_of_a_step(source):
    """Three contexts of 60 tokens, 56 of them cached, fit into one step of 64 tokens."""
    prompt = list(range(56))
    with Served(source, max_num_tokens=64) as served:
        served.run(InferenceRequest.from_tokens(0, prompt, 2))
        served.run(
            *(InferenceRequest.from_tokens(i, [*prompt, i, i, i, i], 2) for i in range(1, 4))
        )
        contexts = [json.loads(record)["Context Requests"] for record in served.host.statistics]
        assert contexts == [1, 0, 3, 0]
