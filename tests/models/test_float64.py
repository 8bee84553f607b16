"""float64 on the CPU: as exact as transformers in float64, and the same bits in any company."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from beam_oracle import search
from checkpoints import CONFIGS, PagedDriver, checkpoint, exact_logits, in_float64, random_model
from kernel_cases import Sizes, new_pages, randn, textbook_attention
from packed_adapters import adapter_of, packed
from packed_logits import packed_logits, random_tokens
from tuned_models import tuned

from gptmanager import (
    CapacitySchedulerPolicy,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.assembly.options import checked_optional_params
from gptmanager.cuda.kernels import CudaKernels
from gptmanager.errors import ConfigError
from gptmanager.kernels import CpuKernels, Kernels
from gptmanager.kernels.experts.mixture import ExpertMatrices
from gptmanager.kernels.experts.routing import Routing, Score
from gptmanager.models import load_model
from gptmanager.testing import ContractChecker, RecordingCallbacks

TOLERANCE = 1e-12  # logits have a standard deviation of about 1; float32 is off by 1e-6
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gpt2"]


@cache
def double(name: str) -> Any:
    return in_float64(random_model(CONFIGS[name]))


def driver_of(name: str, num_slots: int, **options: Any) -> PagedDriver:
    model = load_model(checkpoint(double(name)), dtype="float64", **options)
    return PagedDriver(model, num_slots, dtype=torch.float64)


# The network ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.every(4)
def test_logits_are_those_of_transformers(name: str) -> None:
    sequences = random_tokens(1, 5, 23, 40, 8)
    for tokens, ours in zip(sequences, packed_logits(driver_of(name, 5), sequences), strict=True):
        assert ours.dtype is torch.float64
        assert (ours - exact_logits(double(name), tokens)).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["llama_biased", "mistral", "qwen3", "gpt2_odd"])
@pytest.mark.every(3)
def test_a_deterministic_row_has_its_bits_in_any_company(name: str) -> None:
    new_driver = partial(driver_of, name, kernels=CpuKernels(deterministic=True))
    sequences = random_tokens(1, 5, 23, 40, 8)
    chunked = packed_logits(new_driver(5), sequences)
    together = new_driver(5).forward(list(enumerate(sequences)))
    rows = together.split([len(tokens) for tokens in sequences])
    for tokens, chunks, row in zip(sequences, chunked, rows, strict=True):
        alone = new_driver(1).forward([(0, tokens)])
        assert torch.equal(chunks, alone) and torch.equal(row, alone)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_adapters_are_their_merged_models(family: str, tmp_path: Any) -> None:
    base, driver = double(family), driver_of(family, 3)
    spec: Any = driver.model.spec
    ids = (0, 4, 5, 6) if family == "gpt2" else (1, 2, 3, 4, 5, 6, 7)
    adapters, networks = [], [base]
    for index, rank in enumerate((3, 16)):
        adapter, state = adapter_of(base, family, ids, rank, spec, tmp_path / str(index))
        networks.append(copy.deepcopy(base))
        networks[-1].load_state_dict(state)
        adapters.append(adapter)
    slots = torch.tensor([-1, 0, 1], dtype=torch.int32)
    driver.adapters = replace(packed(spec, adapters), rows=slots)
    assert driver.adapters.pool.dtype is torch.float64
    prompts = [[5, 6, 7], [9, 10, 11, 12], [13, 14]]
    logits = driver.forward(list(enumerate(prompts))).split([3, 4, 2])
    for network, prompt, ours in zip(networks, prompts, logits, strict=True):
        assert (ours - exact_logits(network, prompt)).abs().max() < TOLERANCE


# The reference's ops, which are the only ones for float64 ---------------------------------------


def mix_equal_experts(kernels: Kernels, x: torch.Tensor, score: Score) -> torch.Tensor:
    """Only the weights of the chosen experts depend on the logits, `x[:, :7]`."""
    matrix = x[:1].repeat(7 * 16, 1) * 0.03
    down = x[:1, :8].repeat(7 * x.shape[1], 1)
    experts = ExpertMatrices(matrix, None, down, None, "silu", True, 0, 7)
    return kernels.experts(x, x[:, :7].clone(), None, Routing(3, score), experts)


OPS = {
    "experts": partial(mix_equal_experts, score="sigmoid"),
    "experts_of_best": partial(mix_equal_experts, score="sigmoid_of_best"),
    "gated": lambda kernels, x: kernels.gated(x, x.flip(1)),
    "rms_norm": lambda kernels, x: kernels.rms_norm(x, x[0].clone(), 1e-5),
    "add_rms_norm": lambda kernels, x: kernels.add_rms_norm(x, x.flip(1), x[0].clone(), 1e-5),
    "layer_norm": lambda kernels, x: kernels.layer_norm(x, x[0].clone(), None, 1e-5),
    "add_layer_norm": lambda kernels, x: kernels.add_layer_norm(
        x, x.flip(1), x[0].clone(), x[0].clone(), 1e-5
    ),
    "silu_mul": lambda kernels, x: kernels.silu_mul(torch.cat([x, x.flip(1)], dim=1)),
    "gelu": lambda kernels, x: kernels.gelu(x),
    "gelu_tanh": lambda kernels, x: kernels.gelu(x, "tanh"),
    "activate_times": lambda kernels, x: kernels.activate_times(x, "gelu", x.flip(1)),
    "xielu": lambda kernels, x: kernels.xielu(x, x[0, :2].clone()),
    "linear_heads": lambda kernels, x: kernels.linear_heads(
        x.view(len(x), 7, 11), x[:1].view(7, 11, 1) * x[0]
    ),
    "linear": lambda kernels, x: kernels.linear(x, x[:1].repeat(50, 1) * 0.3),
}


@pytest.mark.parametrize("op", OPS)
def test_the_bits_of_an_op_are_the_references(op: str) -> None:
    """No vector width divides their number, so torch may round the last elements differently."""
    x = randn(41, 77).double() * 1.1
    exact = OPS[op](CpuKernels(deterministic=True), x)
    assert exact.dtype is torch.float64
    assert torch.equal(exact, OPS[op](Kernels(deterministic=True), x))
    assert (exact - OPS[op](CpuKernels(), x)).abs().max() < 1e-13
    narrow = OPS[op](Kernels(), x.float())
    assert 1e-10 < (exact - narrow).abs().max() < 1e-3
    for first, last in ((1, 2), (0, 7), (3, 40)):
        some = torch.cat([x[:1], x[first:last]])  # the weights are made of the first
        assert torch.equal(OPS[op](CpuKernels(deterministic=True), some)[1:], exact[first:last])


@pytest.mark.parametrize("window", [None, 5])
def test_attention_gives_a_token_its_bits_in_any_chunk(window: int | None) -> None:
    pages = new_pages(Sizes(heads=6, dim=12, block=4, window=window, sink=2), [(30, 30), (9, 17)])
    wide = {name: getattr(pages, name).double() for name in ("keys", "values", "q")}
    pages = dataclasses.replace(pages, **wide)
    kernels = CpuKernels(deterministic=True)
    whole = pages.attend_all(kernels)
    assert torch.equal(whole, pages.attend_all(Kernels(deterministic=True)))
    close = textbook_attention(pages)
    assert whole.dtype is torch.float64 and abs(whole.numpy() - close).max() < 1e-14
    for first, last in ((0, 1), (3, 11), (29, 30)):
        part = pages.attend(kernels, [(1, 0, 9), (0, first, last)])
        assert torch.equal(part, torch.cat([whole[30:], whole[first:last]]))


# Managers ---------------------------------------------------------------------------------------


def serve(
    source: Any, requests: Any, max_tokens: int = 1024, first: Any = (), **options: Any
) -> RecordingCallbacks:
    """`requests` come when those of `first` have ended."""
    host = RecordingCallbacks(first or requests)
    checker = ContractChecker(host.get_inference_requests, host.send_response)
    cache = KvCacheConfig(max_tokens, tokens_per_block=8, enable_block_reuse=True)
    policy = options.pop("policy", CapacitySchedulerPolicy.GUARANTEED_NO_EVICT)
    with GptManager(
        source,
        ModelType.INFLIGHT_FUSED_BATCHING,
        3,
        SchedulerConfig(policy),
        checker.get_inference_requests,
        checker.send_response,
        host.poll_stop_signal,
        host.return_batch_manager_stats,
        OptionalParams(kv_cache_config=cache, max_batch_size=4, **options),
    ) as manager:
        assert manager.wait_idle(60)
        if first:
            host.submit(*requests)
            manager.notify()
            for request in requests:
                host.final(request.request_id, timeout=60)
    checker.check(manager)
    assert not [response.error for response in host.responses if response.error]
    return host


def prompts() -> list[list[int]]:
    """Some begin alike, so that blocks are reused."""
    chance = np.random.default_rng(5)
    common = chance.integers(0, 96, 24).tolist()
    return [
        (common if i % 2 else []) + chance.integers(0, 96, 1 + 5 * i).tolist() for i in range(6)
    ]


def beams_of(host: RecordingCallbacks, request_id: int) -> list[list[int]]:
    final = host.final(request_id).tensors
    lengths = final["sequence_length"][0].tolist()
    return [row[:n] for row, n in zip(final["output_ids"][0].tolist(), lengths, strict=True)]


CHUNKS = {"enable_chunked_context": True, "max_num_tokens": 16}
PAUSES = {"policy": CapacitySchedulerPolicy.MAX_UTILIZATION, "max_tokens": 112, "max_seq_len": 64}


@pytest.mark.parametrize("options", [{}, CHUNKS], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.every(5)
def test_tokens_are_those_of_transformers(family: str, options: dict[str, Any]) -> None:
    model, asked = double(family), prompts()
    requests = [InferenceRequest.from_tokens(i, prompt, 10) for i, prompt in enumerate(asked)]
    requests.append(InferenceRequest.from_tokens(6, asked[1], 6, beam_width=3))
    host = serve(checkpoint(model), requests, dtype=torch.float64, **options)
    for i, prompt in enumerate(asked):
        output = host.output(i)
        logits = exact_logits(model, output[:-1])[len(prompt) - 1 :]
        assert output[len(prompt) :] == logits.argmax(-1).tolist() and len(logits) == 10

    def log_probs_after(text: tuple[int, ...]) -> Any:
        return exact_logits(model, [*asked[1], *text])[-1].float().log_softmax(-1).numpy()

    beams = search(log_probs_after, 3, 6, [], 1.0, 1)
    assert beams_of(host, 6) == [[*asked[1], *text] for text, _ in beams]
    reused = [
        record["gptmanager"]["block_reuse"]["reused_tokens"]
        for record in map(json.loads, host.statistics)
    ]
    assert sum(reused) >= 24


def drawn_requests() -> list[InferenceRequest]:
    """With drawn tokens, adapters, and beams."""
    own: dict[str, Any] = {"return_generation_logits": True, "return_log_probs": True}
    return [
        InferenceRequest.from_tokens(
            *(i, prompt, min(20, 64 - len(prompt))),
            **own | ({"beam_width": 2} if i == 3 else {"temperature": 1.2, "random_seed": i}),
            **tuned("llama", (2, 16)).lora((None, 0, 1)[i % 3], brings=False),
        )
        for i, prompt in enumerate(prompts())
    ]


def finals(requests: list[InferenceRequest], **options: Any) -> dict[int, Any]:
    """The adapters are there before: when they are read would decide how many requests compete."""
    model = tuned("llama", (2, 16))
    first = [
        InferenceRequest.from_tokens(100 + task, [1], 1, **model.lora(task)) for task in (0, 1)
    ]
    host = serve(
        model.source, requests, first=first, dtype="float64", deterministic=True, **options
    )
    if options == PAUSES:
        records = map(json.loads, host.statistics)
        assert sum(record["Paused Requests"] for record in records)
    return {it.request_id: host.final(it.request_id).tensors for it in requests}


@pytest.fixture(scope="module")
def alone() -> dict[int, Any]:
    return {i: own for request in drawn_requests() for i, own in finals([request]).items()}


@pytest.mark.parametrize("options", [{}, CHUNKS, PAUSES, {"run_ahead": 1}], ids=str)
@pytest.mark.every(2)
def test_no_schedule_shows(alone: dict[int, Any], options: dict[str, Any]) -> None:
    """Not in a bit of the logits as hosts get them."""
    together = finals(drawn_requests(), **options)
    assert together.keys() == alone.keys()
    for i, expected in alone.items():
        for name in ("output_ids", "output_log_probs", "generation_logits"):
            assert torch.equal(together[i][name], expected[name]), (i, name)
        assert together[i]["generation_logits"].dtype is torch.float32


# What asks for it, what it takes, and where it is refused ----------------------------------------


def test_a_checkpoint_may_ask_for_it_and_pages_are_as_wide() -> None:
    config, state = checkpoint(double("llama"))
    requests = [InferenceRequest.from_tokens(1, [5, 6, 7], 4)]
    config.pop("dtype", None)
    memory = []
    for asked in ({"torch_dtype": "float32"}, {"torch_dtype": "float64"}):
        host = serve((config | asked, state), requests)
        memory.append(json.loads(host.statistics[-1])["Runtime CPU Memory Usage"])
    pages = 2 * 3 * 1024 * 2 * 8  # keys and values, of layers, tokens, heads and their dimensions
    weights = sum(tensor.numel() for tensor in state.values())
    assert memory[1] - memory[0] >= 4 * (pages + weights)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            {"weights_dtype": "int8"},
            "weights_dtype = 'int8': its matmuls compute at most in float32",
        ),
        (
            {"device": "meta", "kernels": Kernels()},
            "device = 'meta': only the CPU supports it",
        ),
        (
            {
                "kernels": CudaKernels(
                    cast(Any, SimpleNamespace(has_fp8=False, max_shared_mem=1 << 20))
                )
            },
            "kernels = CudaKernels: they do not support it",
        ),
    ],
    ids=["weights_dtype", "device", "kernels"],
)
@pytest.mark.parametrize("by_config", [False, True])
def test_load_model_refuses_it_by_name(by_config: bool, given: dict[str, Any], reason: str) -> None:
    config, state = checkpoint(double("llama"))
    asked = {"dtype": "float64"}
    source = (config | asked, state) if by_config else (config | {"dtype": "float32"}, state)
    with pytest.raises(ConfigError, match=re.escape(f"dtype = 'float64' is refused with {reason}")):
        load_model(source, **given if by_config else given | asked)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"device": "cuda"}, "device = 'cuda': only the CPU supports it"),
        ({"device": "emulator"}, "device = 'emulator': only the CPU supports it"),
    ],
    ids=str,
)
def test_a_manager_refuses_it_by_name(options: dict[str, Any], reason: str) -> None:
    message = f"OptionalParams.dtype = 'float64' is refused with {reason}"
    with pytest.raises(ConfigError, match=re.escape(message)):
        checked_optional_params(OptionalParams(dtype="float64", **options))
