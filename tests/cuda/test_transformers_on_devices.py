"""Models that transformers computes, with CUDA kernels: the logits and tokens of the CPU."""

from __future__ import annotations

import atexit
import functools
import json
import logging
import shutil
import tempfile

import numpy as np
import pytest
import torch
from attention_libraries import HostAttention
from devices import check_same, finals, prompt, there_is
from hf_models import ARCHITECTURES, NOT_NATIVE, REFUSED, new_network
from mixed_schedules import mixed
from separate_device import DEVICE, SeparateDevice, move_modules
from torch.utils._python_dispatch import _disable_current_modes

from gptmanager import (
    CapacitySchedulerPolicy,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
)
from gptmanager.assembly.loading import load
from gptmanager.callbacks import generate
from gptmanager.config import ParallelConfig, PromptLookup
from gptmanager.cuda.device.graphs import StepGraphs
from gptmanager.cuda.device.launch import EmulatorLauncher
from gptmanager.cuda.kernels import CudaKernels
from gptmanager.errors import ConfigError
from gptmanager.kernels import Kernels
from gptmanager.loop.responses import REQUEST_METRICS
from gptmanager.models.hf.network import TransformersModel

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.timeout(180)  # the emulator beside busy neighbors
from_tokens = InferenceRequest.from_tokens
THROUGH = {"model_backend": "transformers"}
WAITING = ("gemma3n_text", "gpt2", "phimoe")  # their code copies tensors to the device in each step


@pytest.fixture(autouse=True)
def built_elsewhere(monkeypatch):
    """transformers builds networks on torch's device "meta", which is not the separate device."""
    from_pretrained = transformers.AutoModelForCausalLM.from_pretrained

    def load_network(*given, **options):
        with _disable_current_modes():
            return from_pretrained(*given, **options)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load_network)


@functools.cache
def saved(name, **more):
    """A tiny random network, and its folder."""
    network = new_network(name, **more)
    folder = tempfile.mkdtemp(prefix="hf-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    network.save_pretrained(folder)
    return network, folder


@pytest.fixture
def streams(device, request):
    """The streams of the separate device; none of a GPU."""
    return request.getfixturevalue("separate") if device == "emulator" else []


def forget_waits(streams):
    """Code of transformers waits for the device."""
    for stream in streams:
        own = [wait for wait in stream.waits if "models/hf/network.py" in wait]
        assert own
        stream.waits[:] = [wait for wait in stream.waits if wait not in own]


def with_logits():
    wanted = {"return_context_logits": True, "return_generation_logits": True}
    return [from_tokens(i, prompt(i, length), 4, **wanted) for i, length in ((1, 30), (2, 19))]


CHUNKS = {**THROUGH, "enable_chunked_context": True, "max_num_tokens": 24, "max_seq_len": 48}


@pytest.mark.every(40)
@pytest.mark.parametrize("name", [it for it in ARCHITECTURES if it not in REFUSED])
def test_logits_are_those_of_the_cpu_and_of_transformers(device, streams, name):
    network, folder = saved(name)
    for found in check_same(device, with_logits, source=folder, **CHUNKS):
        tokens = found.tensors["output_ids"][0, :, :-1]
        own = [found.tensors[it].flatten(0, -2) for it in ("context_logits", "generation_logits")]
        with torch.inference_mode():
            exact = network(input_ids=tokens.long(), use_cache=False).logits[0]
        assert (torch.cat((own[0], own[1][1:])) - exact).abs().max() < 1e-4 * exact.std()
    if name in WAITING:
        forget_waits(streams)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", [NOT_NATIVE, "vaultgemma"])
def test_six_requests_in_flight_give_the_tokens_of_generate(device, name):
    """In chunks, with pauses, and blocks that later requests reuse."""
    network, folder = saved(name)
    prompts = [prompt(i, length) for i, length in enumerate((30, 7, 41, 3, 22, 17), start=1)]
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = []
    for own in map(torch.tensor, ([it] for it in prompts)):
        mask = torch.ones_like(own)  # id 0 is also that of padding
        expected += network.generate(own, attention_mask=mask, **options).tolist()
    found = finals(
        [from_tokens(i, it, 8) for i, it in enumerate(prompts)],
        *(device, None),
        source=folder,
        policy=CapacitySchedulerPolicy.MAX_UTILIZATION,
        cache=KvCacheConfig(max_tokens=80, tokens_per_block=16, enable_block_reuse=True),
        **{**THROUGH, "max_batch_size": 6, "max_num_tokens": 24, "max_seq_len": 64},
    )
    assert [it.tensors["output_ids"][0, 0].tolist() for it in found] == expected
    pauses = REQUEST_METRICS.index("pauses")
    assert sum(it.tensors["request_metrics"][pauses].item() for it in found) > 0


def test_requests_of_all_kinds(device):
    check_same(device, mixed, source=saved(NOT_NATIVE)[1], run_ahead=1, **THROUGH)


def test_beams_and_drafts(device):
    folder = saved(NOT_NATIVE)[1]

    def wide():
        return [from_tokens(i, prompt(i, 9), 6, beam_width=2) for i in (1, 2)]

    def alike():
        return [from_tokens(i, prompt(4, 12) * 3, 9) for i in range(2)]

    check_same(device, wide, source=folder, max_beam_width=2, **THROUGH)
    lookup = PromptLookup(max_draft_tokens=4)
    check_same(device, alike, source=folder, speculative_decoding_config=lookup, **THROUGH)


@pytest.mark.slow
def test_lock_step(device):
    def requests():
        return [from_tokens(i, prompt(i, 5 + 7 * i), 5) for i in (1, 2, 3)]

    check_same(device, requests, source=saved("gemma2")[1], model_type=ModelType.V1, **THROUGH)


def test_prompt_embeddings(device):
    network, folder = saved(NOT_NATIVE)
    table = np.linspace(-1, 1, 3 * 64, dtype=np.float32).reshape(3, 64)

    def requests():
        own = {"prompt_embedding_table": table, "prompt_vocab_size": 3}
        return [from_tokens(1, [256, 257, 258, 5], 6, **own), from_tokens(2, prompt(2, 9), 6)]

    found, _ = check_same(device, requests, source=folder, **THROUGH)
    embedded = network.get_input_embeddings()(torch.tensor([5])).detach()
    with torch.inference_mode():
        given = torch.cat((torch.from_numpy(table), embedded))[None]
        first = network(inputs_embeds=given, use_cache=False).logits[0, -1].argmax()
    assert found.tensors["output_ids"][0, 0, 4] == first


def test_our_kernels_compute_attention_and_no_step_is_captured(device, monkeypatch):
    """Heads of 16 dimensions run as heads of 32."""

    def attention(*given):
        raise AssertionError("attention of the reference")

    monkeypatch.setattr(Kernels, "attention", attention)
    monkeypatch.setattr(StepGraphs, "record", attention)
    folder = saved(NOT_NATIVE)[1]
    (found,) = finals([from_tokens(1, prompt(1, 9), 4)], device, source=folder, **THROUGH)
    assert found.error == ""


GROUP = {"num_attention_heads": 32, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (GROUP, "32 query heads do not divide into groups of up to 16 for 1 KV heads"),
        ({"head_dim": 320}, "head dimension 320 must be one of"),
    ],
)
def test_torch_computes_attention_that_no_kernel_takes(device, caplog, changes, reason):
    check_same(device, with_logits, source=saved("llama", **changes)[1], **CHUNKS)
    (line,) = {it.getMessage() for it in caplog.records if "no kernel" in it.getMessage()}
    assert reason in line and "PyTorch computes it" in line


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("name", "largest"),
    [("gpt_oss", 0.1), ("gemma2", 0.05), (NOT_NATIVE, 0.05)],  # routers may choose other experts
)
def test_bfloat16(device, name, largest):
    network, folder = saved(name)
    (found, _) = finals(with_logits(), device, source=folder, dtype="bfloat16", **CHUNKS)
    tokens = found.tensors["output_ids"][0, :, :30]
    with torch.inference_mode():
        exact = network(input_ids=tokens.long(), use_cache=False).logits[0]
    error = (found.tensors["context_logits"][0] - exact).std() / exact.std()
    assert 1e-4 < error < largest


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("kind", "largest", "stored"),
    [
        ("int8", 0.04, "17 in 8 bits"),
        ("fp8", 0.1, "17 in 8 bits"),
        ("int4", 0.3, "16 in 4 bits, 1 in 8 bits"),
    ],
)
def test_linear_layers_are_stored_in_few_bits(device, caplog, kind, largest, stored):
    caplog.set_level(logging.INFO, logger="gptmanager")
    network, folder = saved(NOT_NATIVE)
    (found, _) = finals(with_logits(), device, source=folder, weights_dtype=kind, **CHUNKS)
    assert f"through transformers; matrices: {stored}" in caplog.text
    tokens = found.tensors["output_ids"][0, :, :30]
    with torch.inference_mode():
        exact = network(input_ids=tokens.long(), use_cache=False).logits[0]
    error = (found.tensors["context_logits"][0] - exact).std() / exact.std()
    assert 1e-3 < error < largest


@pytest.mark.parametrize(
    "kind", [None, *(pytest.param(it, marks=pytest.mark.slow) for it in ("int8", "int4"))]
)
def test_a_step_may_need_no_logits(device, kind):
    """The first chunk of a prompt, alone."""

    def request():
        return [from_tokens(1, prompt(1, 30), 4)]

    found, expected = (
        finals(request(), where, source=saved("mixtral")[1], weights_dtype=kind, **CHUNKS)[0]
        for where in (device, "cpu")
    )
    assert found.error == expected.error == ""
    if kind is None:
        assert torch.equal(found.tensors["output_ids"], expected.tensors["output_ids"])


def test_a_provider_of_the_host_computes_attention():
    provider, given = HostAttention(), {"source": saved(NOT_NATIVE)[1], **CHUNKS}
    device = there_is("emulator")  # the provider waits for it
    own, others = (
        finals(with_logits(), device, attention_provider=it, **given) for it in (provider, "own")
    )
    for one, other in zip(own, others, strict=True):
        assert torch.equal(one.tensors["output_ids"], other.tensors["output_ids"])
    assert all(provider.calls.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deterministic": True}, "OptionalParams.deterministic = True is refused"),
        (
            {"kv_cache_config": KvCacheConfig(max_attention_window=8)},
            "kv_cache_config.max_attention_window = 8 is refused",
        ),
        (
            {"kv_cache_config": KvCacheConfig(dtype="fp8")},
            "kv_cache_config.dtype = 'fp8' is refused",
        ),
    ],
)
def test_options_that_it_does_not_have_are_refused(device, options, message):
    params = OptionalParams(device=device, **options)
    with pytest.raises(ConfigError, match=f"{message} .* leave the default"):
        generate(saved(NOT_NATIVE)[1], [prompt(1, 5)], 4, optional_params=params)


def test_ranks_and_adapters_are_refused(device):
    folder = saved(NOT_NATIVE)[1]
    ranks = OptionalParams(parallel_config=ParallelConfig(2, 1), device="emulator")
    kernels = CudaKernels(EmulatorLauncher())
    with pytest.raises(ConfigError, match="parallel_config = .* is refused"):
        load(folder, ranks, kernels, torch.device("cpu"), collectives=object())
    request = from_tokens(1, prompt(1, 5), 4, lora_task_id=3)
    (found,) = finals([request], device, source=folder, **THROUGH)
    assert "lora_task_id is refused: the model takes no adapters" in found.error


def test_float64_is_refused(device, tmp_path):
    folder = shutil.copytree(saved(NOT_NATIVE)[1], tmp_path / NOT_NATIVE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float64"}))
    with pytest.raises(ConfigError, match="dtype = 'float64' is refused with"):
        finals([], device, source=str(folder), **THROUGH)


def test_a_tensor_that_stays_on_the_cpu_is_named(toolchain, monkeypatch):
    move_modules(monkeypatch)
    network = new_network("llama")
    mlp, stray = network.model.layers[0].mlp, torch.ones(64)
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) * stray
    message = "LlamaForCausalLM: its forward fails on the device 'meta': .* on two devices"
    with SeparateDevice(), pytest.raises(ConfigError, match=message):
        TransformersModel(network, CudaKernels(EmulatorLauncher()), device=DEVICE)
