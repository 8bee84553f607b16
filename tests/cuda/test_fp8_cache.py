"""A KV cache of 8-bit floats in whole managers, beside transformers with such a cache."""

from __future__ import annotations

import functools

import pytest
import torch
from checkpoints import CONFIGS, checkpoint, random_model
from devices import LLAMA, NO_ADAPTERS

from gptmanager import (
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.assembly.assemble import place
from gptmanager.errors import ConfigError
from gptmanager.testing import ContractChecker, RecordingCallbacks

FP8 = torch.float8_e4m3fn
SCALES = [(0.02, 0.01), (0.05, 0.001)]  # of keys and values by layer; beyond 448 times that is cut
from_tokens = InferenceRequest.from_tokens
pytestmark = [pytest.mark.timeout(180), pytest.mark.every(2)]


@functools.cache
def model():
    return random_model(LLAMA)


def scaled_checkpoint():
    config, tensors = checkpoint(model())
    for layer, pair in enumerate(SCALES):
        for name, scale in zip("kv", pair, strict=True):
            tensors[f"model.layers.{layer}.self_attn.{name}_scale"] = torch.tensor(scale)
    return config, tensors


DynamicCache = pytest.importorskip(
    "transformers", reason="transformers is not installed"
).DynamicCache


class RoundingCache(DynamicCache):
    """Keys and values as 8-bit floats hold them."""

    def update(self, keys, values, layer, *others, **options):
        rounded = [
            (it / scale).clamp(-448, 448).to(FP8).float() * scale
            for it, scale in zip((keys, values), SCALES[layer], strict=True)
        ]
        return super().update(*rounded, layer, *others, **options)


def expected_logits(tokens, cache=None):
    with torch.no_grad():
        return model()(torch.tensor([tokens]), past_key_values=cache, use_cache=True).logits[0]


def serve(device, requests, *, beams=1, cache=None, source=None, **options):
    """The final responses by request."""
    host = RecordingCallbacks(requests)
    checker = ContractChecker(host.get_inference_requests, host.send_response)
    sizes = {"max_tokens": 512, "tokens_per_block": 16, "dtype": "fp8"}
    with GptManager(
        source or scaled_checkpoint(),
        ModelType.INFLIGHT_FUSED_BATCHING,
        beams,
        SchedulerConfig(),
        checker.get_inference_requests,
        checker.send_response,
        host.poll_stop_signal,
        host.return_batch_manager_stats,
        OptionalParams(
            KvCacheConfig(**sizes | (cache or {})),
            device=device,
            **{"max_batch_size": 4, "peft_cache_manager_config": NO_ADAPTERS, **options},
        ),
    ) as manager:
        assert manager.wait_idle(120), manager.exception
        assert manager.audit().ok
    checker.check(manager)
    finals = [host.final(request.request_id) for request in requests]
    assert not any(final.error for final in finals), finals
    return [final.tensors for final in finals]


def prompt(start, length):
    return [(start * 5 + 7 * i) % 90 for i in range(length)]


def requests(**by_name):
    """The last two begin as the first does, and share its blocks where blocks are reused."""
    options = {"return_generation_logits": True, **by_name}
    return [
        from_tokens(1, prompt(1, 36), 3, **options),
        from_tokens(2, prompt(2, 17), 4, **options),
        from_tokens(3, [*prompt(1, 33), 3], 3, **options),
        from_tokens(4, [*prompt(1, 36), 3, 8], 2, **options),
    ]


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("dtype", "allowed"), [("float32", 1e-3), ("float16", 0.1), ("bfloat16", 0.2)]
)
def test_logits_are_those_of_transformers_with_a_rounded_cache(device, dtype, allowed):
    """`allowed` is relative to the largest logit. Rounding twice may reach the next 8-bit float."""
    for request, tensors in zip(requests(), serve(device, requests(), dtype=dtype), strict=True):
        length = request.input_ids.size
        tokens = tensors["output_ids"][0, 0].tolist()[: int(tensors["sequence_length"][0, 0])]
        logits = tensors["generation_logits"][0, 0]
        expected = expected_logits(tokens[:-1], RoundingCache())[length - 1 :]
        exact = expected_logits(tokens[:-1])[length - 1 :]
        largest = expected.abs().max()
        assert (logits - expected).abs().max() <= allowed * largest
        assert (exact - expected).abs().max() > allowed * largest


@functools.cache
def usual(device):
    return serve(device, requests(), deterministic=True)


BLOCK_BYTES = 2 * 2 * 16 * 64  # keys and values, layers, tokens, elements


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("cache", "options"),
    [
        ({"max_tokens": 256}, {"enable_chunked_context": True, "max_num_tokens": 32}),
        ({"enable_block_reuse": True}, {"run_ahead": 1}),
        (
            {
                "enable_block_reuse": True,
                "max_tokens": 64,
                "host_cache_size": 8 * BLOCK_BYTES,
                "host_swap": "always",
            },
            {},
        ),
        ({}, {"max_batch_size": 1, "run_ahead": 0}),
    ],
    ids=["chunks", "reuse", "host", "alone"],
)
def test_logits_are_bitwise_the_same_under_any_schedule(device, cache, options):
    found = serve(device, requests(), cache=cache, deterministic=True, **options)
    for one, other in zip(found, usual(device), strict=True):
        assert torch.equal(one["output_ids"], other["output_ids"])
        assert torch.equal(one["generation_logits"], other["generation_logits"])


def test_heads_that_no_kernel_has(device):
    """The reference computes those of 16 dimensions with QK norm."""
    source = checkpoint(random_model(CONFIGS["qwen3"]))

    def short():
        return [from_tokens(1, prompt(1, 20), 4), from_tokens(2, [*prompt(1, 18), 3], 4)]

    usual, reused = (
        serve(device, short(), source=source, deterministic=True, cache=cache)
        for cache in ({}, {"enable_block_reuse": True, "tokens_per_block": 8})
    )
    for one, other in zip(usual, reused, strict=True):
        assert torch.equal(one["output_ids"], other["output_ids"])


def test_beams(device):
    wide = {"beam_width": 3, "return_generation_logits": False, "return_log_probs": True}
    usual, reused = (
        serve(device, requests(**wide)[::2], beams=3, cache=cache, deterministic=True)
        for cache in ({}, {"enable_block_reuse": True})
    )
    for one, other in zip(usual, reused, strict=True):
        assert torch.equal(one["output_ids"], other["output_ids"])
        assert torch.equal(one["cum_log_probs"], other["cum_log_probs"])


def test_a_window_with_a_sink(device):
    cache = {"max_attention_window": 24, "sink_token_length": 5}
    short, long = (requests()[i] for i in (1, 0))
    windowed = serve(device, [short, long], cache=cache, max_seq_len=64)
    usual = serve(device, [requests()[1], requests()[0]], max_seq_len=64)
    for tensors, other, same in zip(windowed, usual, (True, False), strict=True):
        found, expected = (it["generation_logits"][0, 0] for it in (tensors, other))
        assert torch.allclose(found, expected, atol=1e-3) == same


def test_pages_are_8_bit(device):
    params = OptionalParams(KvCacheConfig(dtype="fp8", tokens_per_block=16), device=device)
    backend = place(params)
    loaded = backend.load(scaled_checkpoint(), params)
    assert backend.memory_budget(loaded, params, 1).dtype is FP8


def test_what_is_refused(device):
    loaded = place(OptionalParams(device=device)).load(scaled_checkpoint(), OptionalParams())
    with pytest.raises(ConfigError, match="KvCacheConfig.dtype = 'fp8' has no effect on a Model"):
        serve(device, [], source=loaded)
    with pytest.raises(ConfigError, match="KvCacheConfig.dtype = 'fp8' is refused with Opt.* = 'c"):
        serve("cpu", [])
