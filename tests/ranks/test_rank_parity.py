"""A model over several ranks answers as it does on one: tokens, reasons, log probabilities, finals.

All requests are there at the first Get and stops come at given polls, so that with one stage the
schedule is the same as on one rank, and with it the statistics.
"""

from __future__ import annotations

import json
import random
from functools import cache

import numpy as np
import pytest
import torch
from checkpoints import CONFIGS, checkpoint, random_model
from cuda_headers import require_cuda_headers
from fuzz import FUZZ
from rank_managers import PATIENCE_S, Host, rank_managers

from gptmanager import (
    CapacitySchedulerPolicy,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    PromptLookup,
    SchedulerConfig,
)

VOCAB_SIZE = 96
TIMES = {"Timestamp", "iteration_latency_us", "gil_wait_us", "callback_us"}
MEMORY = {"Runtime CPU Memory Usage", "adapters"}


@cache
def source(family):
    return checkpoint(random_model(CONFIGS[family]))


def lift(request_id, logits, tokens, stream, client_id):
    """A logits post-processor: what came last shall not come again."""
    for beam, history in enumerate(tokens):
        logits[0, beam, history[-1]] -= 4.0


def mixed_request(number, rng):
    """Return a random request of one of all kinds that a manager accepts."""
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 3, 9, 20, 45)))]
    if rng.random() < 0.3:  # that repeats itself: drafts
        prompt = (prompt[:6] * 6)[:30]
    options = {}
    kind = rng.choice(("greedy", "greedy", "sampled", "beams", "sampled beams", "drafts"))
    if kind.startswith("sampled"):
        options |= {"temperature": 0.7, "runtime_top_k": 20, "random_seed": number}
    if "beams" in kind:
        name = "num_return_sequences" if kind.startswith("sampled") else "beam_width"
        options |= {name: rng.choice((2, 3))}
    if kind == "drafts":
        options |= {"draft_input_ids": [rng.randrange(VOCAB_SIZE) for _ in range(3)]}
    if rng.random() < 0.3:
        options |= {"end_id": [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 3)))]}
        options |= {"min_length": rng.choice((0, 5))}
    if rng.random() < 0.2:
        options |= {"stop_words_list": [[rng.randrange(VOCAB_SIZE)], [1, 2]]}
    if rng.random() < 0.2:
        options |= {"return_log_probs": True, "num_top_log_probs": 1 + number}
    if rng.random() < 0.1:
        options |= {"return_context_logits": True, "return_generation_logits": True}
    if rng.random() < 0.15:
        options |= {"repetition_penalty": 1.2, "bad_words_list": [[5], [7, 8]]}
    if rng.random() < 0.2:
        options |= {"logits_post_processor": lift}
    if rng.random() < 0.1:
        numbers = torch.Generator().manual_seed(number)
        options |= {"prompt_embedding_table": torch.randn(3, 32, generator=numbers)}
        prompt = [VOCAB_SIZE, VOCAB_SIZE + 2, VOCAB_SIZE + 1, *prompt]
    elif number % 4 == 0:
        options |= {"num_prompt_log_probs": number % 3}
    if rng.random() < 0.1:
        options |= {"deadline_s": rng.choice((1e-9, 1e6))}
    if rng.random() < 0.3 and "beams" not in kind:
        options |= {"is_streaming": True}
    if rng.random() < 0.2:
        options |= {"priority": rng.random()}
    return InferenceRequest.from_tokens(number, prompt, rng.randint(1, 50), **options)


def load(count, seed):
    rng = random.Random(seed)
    requests = [mixed_request(number, rng) for number in range(count)]
    stops = {rng.randrange(3, 3 * count): {rng.randrange(count)} for _ in range(count // 10)}
    return requests, stops


def fill(params, **options):
    params.kv_cache_config = KvCacheConfig(
        max_tokens=168, tokens_per_block=8, enable_block_reuse=True
    )
    params.max_batch_size = 6
    params.max_active_requests = None
    params.enable_chunked_context = True
    params.max_num_tokens = 40
    params.speculative_decoding_config = PromptLookup(max_draft_tokens=3)
    for name, value in options.items():
        setattr(params, name, value)
    return params


def manager(model, params, callbacks):
    return GptManager(
        model,
        ModelType.INFLIGHT_FUSED_BATCHING,
        3,
        SchedulerConfig(CapacitySchedulerPolicy.MAX_UTILIZATION),
        optional_params=params,
        **callbacks,
    )


def run_alone(family, requests, stops, **options):
    host = Host(requests, stops)
    with manager(source(family), fill(OptionalParams(), **options), host.callbacks(0)) as one:
        assert one.wait_idle(PATIENCE_S)
        assert one.audit().ok
    return host


def run_on_ranks(monkeypatch, family, requests, stops, tensor, stages, **options):
    hosts = [Host(requests, stops) for _ in range(tensor * stages)]
    config = options.pop("ranks", {})

    def make(rank, params):
        return manager(source(family), fill(params, **options), hosts[rank].callbacks(rank))

    with rank_managers(monkeypatch, make, tensor, stages, **config) as managers:
        assert managers[0].wait_idle(PATIENCE_S)
        assert all(one.audit().ok for one in managers)
    assert [one.exception for one in managers] == [None] * len(managers)
    return hosts


def plain(record):
    """Statistics but for times and memory."""
    record = json.loads(record)
    both = record | record["gptmanager"]
    del both["gptmanager"]
    return {name: value for name, value in both.items() if name not in TIMES | MEMORY}


def assert_same_answers(hosts, alone, count, exactly):
    host = hosts[0]
    assert host.num_finals == count and host.finals.keys() == alone.finals.keys()
    assert all(other.num_finals == 0 for other in hosts[1:])
    stopped = set()
    for request_id, (tensors, error) in alone.finals.items():
        found, found_error = host.finals[request_id]
        assert found_error == error, request_id
        if not exactly and {4, 5} & {*reasons(found), *reasons(tensors)}:
            stopped.add(request_id)  # it depends on the schedule how far it came
            continue
        assert found.keys() == tensors.keys()
        by_step = request_id in alone.streamed and not exactly
        for name, value in tensors.items():
            if by_step and name != "finish_reasons":
                continue  # how many of the tokens come with the end, too
            if "log" in name:
                np.testing.assert_allclose(found[name], value, atol=2e-4, err_msg=str(request_id))
            else:
                assert found[name] == value, (request_id, name)
        assert host.streamed.get(request_id) == alone.streamed.get(request_id)
    assert len(stopped) < count / 2


def reasons(tensors):
    return tensors.get("finish_reasons", [[]])[0]


@pytest.mark.parametrize(
    ("family", "tensor", "stages", "dtype"),
    [
        ("llama", 2, 1, "float32"),
        ("gpt2", 2, 1, "float64"),
        ("qwen2", 1, 2, "float32"),
        ("qwen3", 2, 2, "float64"),
        ("llama", 4, 1, "float32"),
    ],
)
@pytest.mark.every(4)
def test_ranks_answer_as_one(monkeypatch, family, tensor, stages, dtype):
    count = 16 * FUZZ
    requests, stops = load(count, seed=tensor + 10 * stages)
    alone = run_alone(family, requests, stops, dtype=dtype)
    hosts = run_on_ranks(monkeypatch, family, requests, stops, tensor, stages, dtype=dtype)
    assert_same_answers(hosts, alone, count, exactly=stages == 1)
    if stages == 1:
        found, wanted = map(plain, hosts[0].statistics), map(plain, alone.statistics)
        assert list(found) == list(wanted)


@pytest.mark.parametrize(("tensor", "stages"), [(2, 1), (1, 2)])
@pytest.mark.every(2)
def test_every_rank_answers_its_host_where_it_is_to(monkeypatch, tensor, stages):
    requests, stops = load(12, seed=5)
    ranks = {"respond_on_all_ranks": True}
    hosts = run_on_ranks(
        monkeypatch, "llama", requests, stops, tensor, stages, ranks=ranks, dtype="float64"
    )
    first, second = hosts
    assert first.num_finals == second.num_finals == 12
    assert first.finals == second.finals and first.streamed == second.streamed
    assert list(map(plain, first.statistics)) == list(map(plain, second.statistics))


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.every(2)
def test_each_rank_with_logits_calls_its_own_hosts_processors(monkeypatch, stages):
    called = set()

    class Named:
        def __init__(self, rank):
            self.rank = rank

        def process_batch(self, request_ids, logits, tokens, stream, client_ids):
            called.add(self.rank)
            for own, histories in zip(logits, tokens, strict=True):
                lift(0, own, histories, stream, None)

    requests, stops = load(10, seed=8)
    for request in requests:
        request.logits_post_processor = None
    alone = run_alone("llama", requests, stops, logits_post_processor_batched=Named("alone"))
    hosts = [Host(requests, stops) for _ in range(2 * stages)]

    def make(rank, params):
        filled = fill(params, logits_post_processor_batched=Named(rank))
        return manager(source("llama"), filled, hosts[rank].callbacks(rank))

    replicated = {"replicate_logits_post_processors": True}
    with rank_managers(monkeypatch, make, 2, stages, **replicated) as managers:
        assert managers[0].wait_idle(PATIENCE_S)
    assert [one.exception for one in managers] == [None] * len(managers)
    assert called == {"alone", 0, 1}  # those of the last stage
    assert_same_answers(hosts, alone, 10, exactly=stages == 1)


@pytest.mark.slow
def test_ranks_on_the_emulator(monkeypatch):
    require_cuda_headers()
    requests, stops = load(6, seed=3)
    options = {"device": "emulator", "run_ahead": 1}
    alone = run_alone("llama", requests, stops, **options)
    hosts = run_on_ranks(monkeypatch, "llama", requests, stops, 2, 1, **options)
    assert_same_answers(hosts, alone, 6, exactly=True)
