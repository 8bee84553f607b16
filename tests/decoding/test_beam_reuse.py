"""Block reuse of requests with several beams: they share the prompt, and it never shows."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

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
from gptmanager.errors import CapacityError
from gptmanager.kv_cache import BlockCopy, KvCacheManager, ReuseCounts
from gptmanager.loop.responses import REQUEST_METRICS
from gptmanager.request.llm_request import LlmRequest
from gptmanager.scheduler import GuaranteedNoEvictScheduler
from gptmanager.testing import ContractChecker, RecordingCallbacks

NO_EVICT = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION
STATIC_BATCH = CapacitySchedulerPolicy.STATIC_BATCH
EQUAL_PROGRESS = ContextChunkingPolicy.EQUAL_PROGRESS

# The KV cache alone, in blocks of ten --------------------------------------------------------


def caching(num_blocks=20, **options):
    return KvCacheManager(num_blocks, 10, enable_block_reuse=True, **options)


def tokens(count, first=0):
    return list(range(first, first + count))


def run_context(kv, request):
    """A whole context and what follows it: the beams fork, and a token is stored in each."""
    copies = kv.add_sequence(request)
    request.move_to_next_context_chunk()
    kv.store_context(request)
    request.add_token(7)
    if request.beam_width > 1:
        kv.fork(request.request_id, [0] * request.beam_width)
    kv.check()
    return copies


@pytest.mark.parametrize(("first_width", "width"), [(1, 3), (3, 1), (3, 2)])
def test_beams_and_single_texts_find_each_others_prompts(first_width, width):
    kv = caching()
    run_context(kv, LlmRequest(1, tokens(35), 10, beam_width=first_width))
    request = LlmRequest(2, [*tokens(30), 99, 98], 10, beam_width=width)
    assert kv.get_reusable_tokens(request) == 30
    assert kv.get_needed_blocks_one_step(request) == width
    assert kv.add_sequence(request) == ()
    assert (kv.num_cached_tokens(2), request.context_remaining_length) == (30, 2)
    tables = kv.block_ids(2)
    assert [table[:3] for table in tables] == [kv.block_ids(1)[0][:3]] * width
    assert len({table[3] for table in tables}) == width
    kv.check()


def test_the_first_beam_alone_begins_with_part_of_a_last_block():
    kv = caching()
    run_context(kv, LlmRequest(1, tokens(35), 10))
    kv.remove(1)
    request = LlmRequest(2, tokens(34), 10, beam_width=3)
    assert kv.add_sequence(request) == ()  # nobody holds it: it is taken over
    assert request.context_current_position == 33
    kv.check()
    request.move_to_next_context_chunk()
    kv.store_context(request)
    (first, *others) = [table[3] for table in kv.block_ids(2)]
    assert kv.fork(2, [0, 0, 0]) == tuple(BlockCopy(first, block, 4) for block in others)
    kv.check()


def test_the_beginning_of_a_full_block_is_shared_by_all_beams():
    kv = caching()
    run_context(kv, LlmRequest(1, tokens(25), 10))  # holds 0 to 2
    request = LlmRequest(2, [*tokens(14), *tokens(10, 50)], 10, beam_width=2)
    assert kv.add_sequence(request) == (BlockCopy(1, 3, 4),)
    assert [table[:2] for table in kv.block_ids(2)] == [[0, 3], [0, 3]]
    assert request.context_current_position == 14
    kv.check()


def test_of_beams_that_end_the_prompt_stays():
    kv = caching()
    request = LlmRequest(1, tokens(35), 10, beam_width=2)
    run_context(kv, request)
    for token in range(8):  # into a block of their own
        kv.add_token(1)
        request.add_token(token)
    kv.remove(1)
    kv.check()
    assert kv.audit().cached == 4
    again = LlmRequest(2, [*tokens(35), *request.tokens[35:]], 10)
    kv.add_sequence(again)
    assert kv.num_cached_tokens(2) == 35  # nothing of what a beam went on with
    kv.check()


def test_beams_that_end_between_chunks_leave_what_is_computed():
    kv = caching()
    request = LlmRequest(1, tokens(35), 10, beam_width=2, context_chunk_size=20)
    kv.add_sequence(request)
    request.move_to_next_context_chunk()
    kv.remove(1)
    assert kv.get_reusable_tokens(LlmRequest(2, tokens(35), 10, beam_width=2)) == 20


def test_beams_that_are_resumed_compute_their_last_prompt_token():
    kv = caching()
    request = LlmRequest(1, tokens(18), 50, beam_width=3)
    run_context(kv, request)
    for token in range(20):
        kv.add_token(1)
        request.add_token(token)
    kv.remove(1)
    request.pause(1000)
    kv.add_sequence(request)
    assert request.context_remaining_length == 1
    kv.check()


def test_what_is_held_is_not_needed_again_by_beams():
    kv = caching()
    run_context(kv, LlmRequest(1, tokens(35), 10))
    request = LlmRequest(2, [*tokens(30), 99, 98], 20, beam_width=2)
    assert kv.get_needed_resource_to_completion(request) == 3 + 3 * 2
    assert kv.get_needed_blocks_one_step(request) == 2
    assert kv.get_remaining_blocks_to_completion(request) == 3 * 2
    kv.remove(1)  # free ones, though cached, must be taken
    assert kv.get_needed_blocks_one_step(request) == 3 + 2
    assert kv.get_remaining_blocks_to_completion(request) == 3 + 3 * 2
    kv.add_sequence(request)
    assert kv.get_remaining_blocks_to_completion(request) == 2 * 2
    assert kv.reuse_counts[:3] == ReuseCounts(3, 4 + 1, 30)[:3]


def test_beams_for_which_there_is_no_room_change_nothing():
    kv = caching(num_blocks=7)
    run_context(kv, LlmRequest(1, tokens(35), 5))
    before = kv.audit()
    request = LlmRequest(2, tokens(38), 2, beam_width=4)
    with pytest.raises(CapacityError, match="request 2 needs 4 more KV cache blocks, 3 of 7"):
        kv.add_sequence(request)
    assert (kv.audit(), request.context_current_position) == (before, 0)
    kv.add_sequence(LlmRequest(3, tokens(38), 2, beam_width=3))
    kv.check()


def test_beams_come_back_from_the_host_into_blocks_that_all_of_them_hold():
    kv = caching(num_blocks=4, num_host_blocks=4)
    run_context(kv, LlmRequest(1, tokens(25), 5))
    kv.remove(1)
    kv.add_sequence(LlmRequest(2, tokens(40, 500), 0))
    kv.remove(2, store=False)
    request = LlmRequest(3, tokens(25), 5, beam_width=2)
    assert kv.get_reusable_tokens(request) == 20
    assert len(kv.add_sequence(request)) == 3
    (first, second) = kv.block_ids(3)
    assert first[:2] == second[:2] and first[2] != second[2]
    assert request.context_current_position == 24
    kv.check()


def test_beams_wait_for_a_prompt_that_another_computes():
    kv = caching(num_blocks=40)
    scheduler = GuaranteedNoEvictScheduler(8, kv)
    requests = [LlmRequest(i, tokens(35), 5, beam_width=1 + i) for i in range(3)]
    assert scheduler.schedule_request(requests) == ([requests[0]], [])
    run_context(kv, requests[0])
    assert scheduler.schedule_request(requests) == (requests, [])


def test_a_request_without_reuse_neither_waits_nor_is_waited_for():
    kv = caching(num_blocks=40, max_attention_window=40)
    scheduler = GuaranteedNoEvictScheduler(8, kv)
    requests = [LlmRequest(i, tokens(35), 6) for i in range(3)]
    requests += [LlmRequest(3, tokens(35), 5)]
    assert kv.find_new_context_block(requests[0]) is None
    assert scheduler.schedule_request(requests) == (requests, [])


# Whole managers ------------------------------------------------------------------------------


def waves():
    """Requests of one prompt's beginnings: searches, several texts, and single ones."""
    chance = np.random.default_rng(8)
    shared = chance.integers(0, 96, 44).tolist()

    def request(i, prompt, new):
        options = {"return_log_probs": True, "end_id": 7, "is_streaming": i % 5 == 0}
        width = 1 + i % 4
        if i % 3 == 0:
            options |= {"num_return_sequences": width, "temperature": 1.3, "random_seed": i}
        else:
            options |= {"beam_width": width, "len_penalty": 0.7}
        return InferenceRequest.from_tokens(i, prompt, new, **options)

    first = [request(i, shared[: 44 - 3 * (i % 5)], 6 + i % 7) for i in range(1, 9)]
    own = [chance.integers(0, 96, 1 + i % 6).tolist() for i in range(8)]
    second = [request(9 + i, shared[: 16 + 2 * i] + more, 12) for i, more in enumerate(own)]
    return [first, second, [request(i, shared[:41], 20) for i in range(17, 22)]]


class Answers:
    """What a manager answers to `waves`, with block reuse or without."""

    def __init__(
        self, source, *, reuse=True, policy=NO_EVICT, chunking=None, max_tokens=2048, **options
    ):
        self.host = host = RecordingCallbacks()
        checker = ContractChecker(host.get_inference_requests, host.send_response)
        cache = {"host_cache_size": options.pop("host_cache_size", None), "host_swap": "always"}
        cache["enable_partial_reuse"] = options.pop("enable_partial_reuse", True)
        with GptManager(
            source,
            ModelType.INFLIGHT_FUSED_BATCHING,
            4,
            SchedulerConfig(policy, chunking),
            checker.get_inference_requests,
            checker.send_response,
            host.poll_stop_signal,
            host.return_batch_manager_stats,
            OptionalParams(
                kv_cache_config=KvCacheConfig(
                    max_tokens=max_tokens, tokens_per_block=8, enable_block_reuse=reuse, **cache
                ),
                deterministic=True,
                **{"max_batch_size": 4, **options},
            ),
        ) as manager:
            host.manager = manager
            for wave in waves():
                host.submit(*wave)
                assert manager.wait_idle(60)
                report = manager.audit()
                assert report.ok and report.free_blocks == report.total_blocks
            checker.check(manager)
        self.ids = [request.request_id for wave in waves() for request in wave]
        assert not [r.error for r in host.responses if r.error]

    def differs_from(self, other):
        """The ids of requests whose answers are another's, and the first tensor that is."""
        differences = {}
        for i in self.ids:
            final, peer = self.host.final(i).tensors, other.host.final(i).tensors
            names = [name for name in final if name != "request_metrics"]
            assert names == [name for name in peer if name != "request_metrics"]
            unequal = [name for name in names if not torch.equal(final[name], peer[name])]
            if unequal or [r.tensors["output_ids"].tolist() for r in self.host.of(i)] != [
                r.tensors["output_ids"].tolist() for r in other.host.of(i)
            ]:
                differences[i] = unequal
        return differences

    def total(self, name):
        index = REQUEST_METRICS.index(name)
        return sum(int(self.host.final(i).tensors["request_metrics"][index]) for i in self.ids)


@pytest.fixture(scope="module")
def alone(source):
    answers = Answers(source, reuse=False, max_batch_size=1)
    assert answers.total("cached_tokens") == 0
    return answers


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"run_ahead": 1},
        {"enable_trt_overlap": True, "max_batch_size": 2},
        {"enable_chunked_context": True, "max_num_tokens": 16},
        {"enable_chunked_context": True, "max_num_tokens": 24, "chunking": EQUAL_PROGRESS},
        {"max_tokens": 304},
        {"max_tokens": 304, "host_cache_size": 1 << 20},
        {"policy": MAX_UTILIZATION, "max_tokens": 208},
        {"policy": MAX_UTILIZATION, "max_tokens": 208, "enable_partial_reuse": False},
        {"policy": MAX_UTILIZATION, "max_tokens": 208, "max_num_tokens": 16, "run_ahead": 1},
        {"policy": MAX_UTILIZATION, "max_tokens": 208, "host_cache_size": 1 << 20},
        {"policy": STATIC_BATCH},
    ],
    ids=str,
)
def test_reuse_shows_in_no_tensor_of_beams_bit_by_bit(source, alone, options, monkeypatch):
    monkeypatch.setattr(
        "gptmanager.assembly.blueprint._START_HEADROOM_STEPS", 0
    )  # so that some are paused
    answers = Answers(source, **options)
    assert answers.differs_from(alone) == {}
    assert answers.total("cached_tokens") > 150
    if options.get("policy") is MAX_UTILIZATION:
        assert answers.total("pauses") > 0


def test_a_prompt_that_beams_share_is_computed_once(source):
    host = RecordingCallbacks(
        [InferenceRequest.from_tokens(i, tokens(40), 4, beam_width=1 + i) for i in range(4)]
    )
    with GptManager(
        source,
        ModelType.INFLIGHT_FUSED_BATCHING,
        4,
        SchedulerConfig(),
        optional_params=OptionalParams(
            kv_cache_config=KvCacheConfig(
                max_tokens=1024, tokens_per_block=8, enable_block_reuse=True
            )
        ),
        **host.keywords(),
    ) as manager:
        assert manager.wait_idle(60)
    index = REQUEST_METRICS.index("cached_tokens")
    metrics = [host.final(i).tensors["request_metrics"] for i in range(4)]
    assert [int(values[index]) for values in metrics] == [0, 39, 39, 39]
    records = [json.loads(record) for record in host.statistics]
    assert [record["Total Context Tokens"] for record in records[:2]] == [40, 3]
