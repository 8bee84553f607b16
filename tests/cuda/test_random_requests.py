"""Random requests of all kinds under random schedules of a device, against the CPU.

GPTMANAGER_FUZZ=n: n times as many runs.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from devices import GPU, LLAMA, WIDE, finals, set_token_sizes, there_is
from fuzz import FUZZ

from gptmanager import (
    CapacitySchedulerPolicy,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    PromptLookup,
)
from gptmanager.decoding.processors.raw_kernel import RawKernelLogitsPostProcessor

NUM_RUNS = 4 * FUZZ
HIDDEN = WIDE["hidden_size"]
VOCAB_SIZE, LONGEST = 48, 40
CONFIG = {**LLAMA, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 64}
FIELDS = np.dtype([("token", np.int32), ("added", np.float32)], align=True)
FAVOR = """
struct Params { int token; float added; };
extern "C" __global__ void favor(
    float* logits, const int* rows, const int* slots, const Params* params, const int* lengths,
    const int* prompt_lengths, const int* tokens, int max_seq_len, int vocab_size) {
    const Params& mine = params[slots[blockIdx.x]];
    int last = tokens[slots[blockIdx.x] * max_seq_len + lengths[blockIdx.x] - 1];
    int token = (last + mine.token) % vocab_size;
    if (threadIdx.x == 0) logits[rows[blockIdx.x] * vocab_size + token] += mine.added;
}
"""


def favor_by_numpy(logits, rows, slots, params, lengths, prompt_lengths, tokens, *sizes):
    for row, slot, length in zip(rows, slots, lengths, strict=True):
        token = (tokens[slot, length - 1] + params[slot]["token"]) % VOCAB_SIZE
        logits[row, token] += params[slot]["added"]


def favor_by_history(request_id, logits, tokens, stream, client_id):
    for beam, history in enumerate(tokens):
        logits[0, beam, (sum(history) * 7 + len(history)) % VOCAB_SIZE] += 3


@pytest.fixture(scope="module")
def favor():
    return RawKernelLogitsPostProcessor(FAVOR, "favor", FIELDS, block=32, twin=favor_by_numpy)


def words(chance, most):
    lengths = [chance.choice([1, 1, 2, 3]) for _ in range(chance.randint(1, most))]
    return [[chance.randrange(VOCAB_SIZE) for _ in range(length)] for length in lengths]


def random_request(chance, request_id, favor):
    """Its prompt, output length, and all else by name."""
    prompt = [chance.randrange(VOCAB_SIZE) for _ in range(chance.randint(1, 24))]
    if chance.random() < 0.3:  # something to look up
        prompt = (prompt[:3] * 8)[: len(prompt)]
    optional = {
        "end_id": [chance.randrange(VOCAB_SIZE) for _ in range(chance.choice([1, 3]))],
        "stop_words_list": words(chance, 6),
        "bad_words_list": words(chance, 4),
        "embedding_bias": np.array(
            [chance.choice([0, 0, 1, -2, -np.inf]) for _ in range(VOCAB_SIZE)], dtype=np.float32
        ),
        "repetition_penalty": chance.choice([0.7, 1.3]),
        "presence_penalty": chance.choice([-1.0, 0.5]),
        "frequency_penalty": chance.choice([-0.5, 1.0]),
        "noRepeatNgramSize": chance.choice([1, 2, 3]),
        "min_length": chance.choice([1, 4]),
        "return_log_probs": True,
        "num_top_log_probs": chance.choice([1, 7, VOCAB_SIZE]),
        "num_prompt_log_probs": chance.choice([0, 3]),
        "return_context_logits": True,
        "return_generation_logits": True,
        "include_stop_in_output": True,
        "logits_post_processor": chance.choice(
            [favor_by_history, favor.bind(token=chance.randrange(VOCAB_SIZE), added=3.0)]
        ),
    }
    options = {name: value for name, value in optional.items() if chance.random() < 0.2}
    kind = chance.choice(["greedy", "greedy", "sampled", "beams", "texts", "guesses"])
    if kind in ("sampled", "texts"):
        options |= {"temperature": chance.choice([0.5, 1.0, 1.7]), "random_seed": request_id}
        options |= chance.choice([{}, {"runtime_top_k": 5}, {"runtime_top_p": 0.8}])
    if kind == "texts":
        options["num_return_sequences"] = chance.choice([2, 3])
    if kind == "beams":
        options |= {"beam_width": chance.choice([2, 3]), "len_penalty": chance.choice([0.0, 2.0])}
    if kind == "guesses":
        options["draft_input_ids"] = words(chance, 1)[0]
    if "num_prompt_log_probs" not in options and chance.random() < 0.3:
        rows = np.random.default_rng(request_id).normal(0, 0.3, (3, HIDDEN))
        options["prompt_embedding_table"] = rows.astype(np.float32)
        prompt[0] = VOCAB_SIZE + 2
        prompt = [VOCAB_SIZE if token % 5 == 0 else token for token in prompt]
    return prompt, chance.randint(1, 12), options


def random_schedule(chance):
    chunked = chance.random() < 0.5
    policies = CapacitySchedulerPolicy.MAX_UTILIZATION, CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    options = {
        "policy": chance.choice(policies),
        "model_type": chance.choice(
            [ModelType.INFLIGHT_FUSED_BATCHING] * 2 + [ModelType.INFLIGHT_BATCHING]
        ),
        "cache": KvCacheConfig(
            max_tokens=chance.choice([256, 1024]),
            tokens_per_block=16,
            enable_block_reuse=chance.random() < 0.5,
        ),
        "enable_chunked_context": chunked,
        "max_num_tokens": chance.randint(16, 48) if chunked else 64,
        "cuda_graphs": chance.random() < 0.7,
    }
    options |= chance.choice([{"run_ahead": 0}, {"run_ahead": 1}, {"enable_trt_overlap": True}])
    if chance.random() < 0.4:
        options["speculative_decoding_config"] = PromptLookup(3, min_ngram=1)
    return options


@pytest.mark.every(2)
@pytest.mark.parametrize("place", ["emulator", GPU])
@pytest.mark.parametrize("seed", range(NUM_RUNS))
def test_a_device_answers_as_the_cpu_does(seed, place, favor, monkeypatch):
    device = there_is(place)
    if seed % 2:
        set_token_sizes(monkeypatch, 12, 40)  # for steps with contexts
    chance = random.Random(seed)
    drawn = [random_request(chance, i, favor) for i in range(chance.randint(2, 5))]

    def requests():
        return [
            InferenceRequest.from_tokens(i, prompt, count, **options)
            for i, (prompt, count, options) in enumerate(drawn)
        ]

    common = {"config": CONFIG, "max_beam_width": 3, "deterministic": True, "max_seq_len": LONGEST}
    expected = finals(requests(), "cpu", cache=KvCacheConfig(max_tokens=1024), **common)
    schedule = random_schedule(chance)
    found = finals(requests(), device, **schedule, **common)
    for one, other, request in zip(found, expected, drawn, strict=True):
        text = f"seed {seed}: {request} under {schedule}"
        assert one.error == other.error == "", text
        assert one.tensors.keys() == other.tensors.keys(), text
        for name, tensor in other.tensors.items():
            if name != "request_metrics":
                torch.testing.assert_close(
                    one.tensors[name], tensor, atol=2e-3, rtol=2e-3, msg=f"{name}, {text}"
                )
