"""A window on the attention of whole managers: the tokens of a mask, in the blocks of a window."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from checkpoints import CONFIGS, checkpoint, random_model

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
from gptmanager.errors import ConfigError
from gptmanager.testing import ContractChecker, RecordingCallbacks

FUSED = ModelType.INFLIGHT_FUSED_BATCHING
SIZE = 8


def windowed_logits(model, tokens, window):
    """Return the last position's logits, if each token attends to the last `window` positions."""
    count = len(tokens)
    position = torch.arange(count)
    hidden = position[None, :] > position[:, None]
    hidden |= position[None, :] <= position[:, None] - window
    mask = torch.zeros(1, 1, count, count).masked_fill(hidden, float("-inf"))
    with torch.inference_mode():
        return model(torch.tensor([tokens]), attention_mask=mask).logits[0, -1]


def serve(source, requests, window, *, policy=None, max_tokens=2048, model_type=FUSED, **options):
    host = RecordingCallbacks(requests)
    checker = ContractChecker(host.get_inference_requests, host.send_response)
    with GptManager(
        source,
        model_type,
        1,
        SchedulerConfig(policy or CapacitySchedulerPolicy.GUARANTEED_NO_EVICT),
        checker.get_inference_requests,
        checker.send_response,
        return_batch_manager_stats_cb=host.return_batch_manager_stats,
        optional_params=OptionalParams(
            kv_cache_config=KvCacheConfig(
                max_tokens=max_tokens, tokens_per_block=SIZE, max_attention_window=window
            ),
            deterministic=True,
            **options,
        ),
    ) as manager:
        assert manager.wait_idle(60)
        assert manager.audit().ok
    checker.check(manager)
    assert not [response.error for response in host.responses if response.error]
    return host


def requests():
    chance = np.random.default_rng(8)
    lengths = [(1, 60), (7, 40), (16, 20), (17, 30), (40, 25), (90, 12), (130, 20)]
    return [
        InferenceRequest.from_tokens(i, chance.integers(0, 96, prompt).tolist(), new)
        for i, (prompt, new) in enumerate(lengths)
    ]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("window", [5, 16, 21])
@pytest.mark.every(5)
def test_tokens_are_those_of_a_mask(family, window):
    model = random_model(CONFIGS[family])
    host = serve(checkpoint(model), requests(), window, max_batch_size=3)
    own = CONFIGS[family].get("sliding_window") or window
    for request in requests():
        prompt = request.input_ids.tolist()
        output = host.output(request.request_id)
        assert output[: len(prompt)] == prompt
        for end in range(len(prompt), len(output)):
            logits = windowed_logits(model, output[:end], min(own, window))
            assert logits[output[end]] >= logits.max() - 1e-4, (request.request_id, end)


@pytest.mark.parametrize(
    "options",
    [
        {"max_batch_size": 2},
        {"run_ahead": 1},
        {"enable_trt_overlap": True, "max_batch_size": 2},
        {"enable_chunked_context": True, "max_num_tokens": 264},
        {"policy": CapacitySchedulerPolicy.MAX_UTILIZATION, "max_tokens": 80},
        {"model_type": ModelType.INFLIGHT_BATCHING},
    ],
    ids=str,
)
@pytest.mark.every(4)
def test_no_schedule_shows_in_the_tokens(source, options):
    expected = serve(source, requests(), 16, max_batch_size=1)
    host = serve(source, requests(), 16, **options)
    assert [host.output(i) for i in range(7)] == [expected.output(i) for i in range(7)]


def test_a_sequence_never_holds_more_than_its_window_takes(source):
    host = serve(source, requests()[-1:], 16)
    used = [json.loads(record)["Used KV cache blocks"] for record in host.statistics]
    assert max(used) == 16 // SIZE + 1


def test_a_window_that_is_as_long_as_any_sequence_changes_nothing(source):
    plain, wide = (serve(source, requests(), window) for window in (None, 160))
    assert [plain.output(i) for i in range(7)] == [wide.output(i) for i in range(7)]


def test_context_logits_come_of_all_pieces(source):
    prompt = requests()[-1].input_ids.tolist()
    request = InferenceRequest.from_tokens(1, prompt, 1, return_context_logits=True)
    logits = serve(source, [request], 16).final(1).tensors["context_logits"]
    model = random_model(CONFIGS["llama"])
    for end in (1, 17, 24, 25, 77, 130):
        expected = windowed_logits(model, prompt[:end], 16)
        torch.testing.assert_close(logits[0, end - 1], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"speculative_decoding_config": PromptLookup()}, "speculative_decoding_config is refused"),
        ({"model_type": ModelType.V1}, "max_attention_window is refused with ModelType.V1"),
    ],
)
def test_what_cannot_have_a_window_is_named(source, more, text):
    with pytest.raises(ConfigError, match=text):
        serve(source, [], 16, **more)
