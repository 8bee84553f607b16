"""Models against transformers: logits, greedy tokens, ropes, dtypes, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    CONFIGS,
    LLAMA3_ROPE,
    PagedDriver,
    checkpoint,
    expected_logits,
    expected_rope,
    is_greedy,
    random_model,
    save_large,
)
from packed_logits import packed_logits, random_tokens, reference
from torch import Tensor

from gptmanager import GptManager, ModelType, OptionalParams
from gptmanager.errors import ConfigError
from gptmanager.kernels import CpuKernels, Kernels, PackedMatrix
from gptmanager.kernels.gemm import matmul_plan
from gptmanager.kernels.gemm.int4_matrix import Int4Matrix
from gptmanager.kernels.gemm.matmul_plan import packing_pays
from gptmanager.kernels.gemm.unit.int8_unit_tiles import has_int8_unit
from gptmanager.kernels.gemm.weight_quantization import round_to_groups
from gptmanager.models import load_model
from gptmanager.models.read_spec import read_spec
from gptmanager.models.rope_scaling import rope_table
from gptmanager.testing import RecordingCallbacks

TOLERANCE = 1e-4  # logits have a standard deviation of about 1
INT16_TOLERANCE = 2e-3  # the same, where a matrix unit multiplies activations of 16 bits
UNITS = [
    False,
    pytest.param(
        True,
        marks=pytest.mark.skipif(
            not has_int8_unit(), reason="this processor has no matrix unit for bytes"
        ),
    ),
]
both_kernels = pytest.mark.parametrize("new_kernels", [Kernels, CpuKernels])


def max_difference(name_or_model: Any, driver: PagedDriver, sequences: list[list[int]]) -> float:
    model = reference(name_or_model) if isinstance(name_or_model, str) else name_or_model
    pairs = zip(packed_logits(driver, sequences), sequences, strict=True)
    return max((ours - expected_logits(model, tokens)).abs().max().item() for ours, tokens in pairs)


@both_kernels
@pytest.mark.parametrize("name", CONFIGS)
def test_packed_logits_equal_transformers(name: str, new_kernels: Callable[[], Kernels]) -> None:
    model = load_model(checkpoint(reference(name)), kernels=new_kernels())
    sequences = random_tokens(1, 5, 23, 40, 8)
    assert max_difference(name, PagedDriver(model, 5), sequences) < TOLERANCE


@both_kernels
@pytest.mark.parametrize("chunk", [None, 6], ids=["in one piece", "in chunks"])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.every(7)
def test_64_greedy_tokens_equal_transformers(
    name: str, chunk: int | None, new_kernels: Callable[[], Kernels]
) -> None:
    model = load_model(checkpoint(reference(name)), kernels=new_kernels())
    prompts = random_tokens(2, 33, 7)
    generated = PagedDriver(model, 3).greedy(prompts, 64, chunk)
    assert [len(tokens) for tokens in generated] == [64, 64, 64]
    for prompt, tokens in zip(prompts, generated, strict=True):
        assert is_greedy(reference(name), prompt, tokens)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gpt2"])
def test_deterministic_logits_are_bitwise_equal_alone_in_a_batch_and_in_chunks(name: str) -> None:
    kernels = CpuKernels(deterministic=True)
    model = load_model(checkpoint(reference(name)), kernels=kernels)
    sequences = random_tokens(1, 5, 23, 40, 8)
    chunked = packed_logits(PagedDriver(model, 5), sequences)
    together = PagedDriver(model, 5).forward(list(enumerate(sequences)))
    for tokens, chunks, row in zip(
        sequences, chunked, together.split([len(tokens) for tokens in sequences]), strict=True
    ):
        alone = PagedDriver(model, 1).forward([(0, tokens)])
        assert torch.equal(chunks, alone)
        assert torch.equal(row, alone)
        last = PagedDriver(model, 1).forward([(0, tokens)], [len(tokens) - 1])
        assert torch.equal(last, alone[-1:])


SHORT, LONG = [1.0, 1.1, 1.3, 1.7], [1.5, 2.0, 3.0, 4.5]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": 40,
}
ROPES: Mapping[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3_ROPE,
    "yarn": YARN,
    "yarn_mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4, "truncate": False},
    "yarn_factor": {**YARN, "attention_factor": 1.3, "beta_fast": 20.0, "beta_slow": 2.0},
    "longrope": {**LONGROPE, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.3},
    "longrope_implied": LONGROPE,
    "longrope_factor": {**LONGROPE, "attention_factor": 1.2},
}


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", ROPES)
def test_rope_variants(name: str, spelling: str) -> None:
    rope = {"rope_theta": 300.0, **ROPES[name]}
    hf = random_model({**CONFIGS["llama"], "rope_parameters": rope})
    config, state_dict = checkpoint(hf)
    if spelling == "rope_scaling":
        del config["rope_parameters"]
        config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
        rope["type"] = rope.pop("rope_type")
    # transformers takes longrope's long factors when a sequence is longer than the original
    # length, here the model's limit decides
    sequences = random_tokens(60) if name.startswith("longrope") else random_tokens(60, 9)
    model = load_model((config, state_dict), kernels=Kernels())
    driver = PagedDriver(model, 2)
    for slot, tokens in enumerate(sequences):
        ours = driver.forward([(slot, tokens)])
        assert (ours - expected_logits(hf, tokens)).abs().max() < TOLERANCE


LLAMA_3_1 = LLAMA3_ROPE | {"factor": 8.0, "rope_theta": 5e5}
LONG_YARN = YARN | {"rope_theta": 50.0, "original_max_position_embeddings": 131072}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e6},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.7},
        {**LLAMA_3_1, "original_max_position_embeddings": 8192},
        {**YARN, "rope_theta": 1e6, "original_max_position_embeddings": 32768},
        {**LONG_YARN, "beta_fast": 1e5, "beta_slow": 1e-3},
    ],
    ids=["default", "linear", "dynamic", "llama3", "yarn", "yarn of all dimensions"],
)
@pytest.mark.every(4)
def test_tables_are_exact_far_out(rope: dict[str, Any]) -> None:
    sizes = {"max_position_embeddings": 131072, "head_dim": 128, "rope_parameters": rope}
    spec = read_spec({**CONFIGS["llama"], **sizes})
    (rope,) = set(spec.ropes)
    positions = torch.tensor([0, 1, 4097, 131071])
    table = rope_table(rope, spec.max_seq_len)
    assert table.shape == (131072, 128)
    expected = expected_rope({**CONFIGS["llama"], **sizes}, positions)
    assert torch.allclose(table[positions], expected, rtol=0, atol=1e-6)
    # a request that continues with another limit has the same bits
    assert torch.equal(rope_table(rope, 4097), table[:4097])


def test_llama_4_scales_rope_without_interpolation() -> None:
    """Its two factors are equal."""
    config = {**CONFIGS["llama"], "rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": 1.0}}
    table = rope_table(read_spec(config).ropes[0], 160)
    assert torch.allclose(table, expected_rope(config, torch.arange(160)), rtol=0, atol=1e-6)


def test_a_manager_with_a_shorter_limit_leaves_the_tables_of_another_one() -> None:
    model, (tokens,) = load_model(checkpoint(random_model(CONFIGS["llama"]))), random_tokens(40)
    logits = []
    for limit in (40, 8):
        model.reserve_positions(limit)
        logits.append(PagedDriver(model, 1).forward([(0, tokens)]))
    assert torch.equal(*logits)


def test_dynamic_rope_is_refused_for_sequences_that_it_would_stretch() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = {**CONFIGS["llama"], "max_position_embeddings": 64, "rope_parameters": rope}
    assert {it.theta for it in read_spec(config, max_seq_len=64).ropes if it} == {1e4}
    with pytest.raises(ConfigError, match="max_seq_len = 65 must be at most max_position_embedd"):
        read_spec(config, max_seq_len=65)


def test_longrope_takes_the_short_factors_for_a_short_limit() -> None:
    hf = random_model({**CONFIGS["llama"], "rope_parameters": LONGROPE})
    source = checkpoint(hf)
    (tokens,) = random_tokens(40)
    short = load_model(source, kernels=Kernels(), max_seq_len=40)
    assert short.spec.ropes[0].divisors == tuple(SHORT)
    ours = PagedDriver(short, 1).forward([(0, tokens)])
    assert (ours - expected_logits(hf, tokens)).abs().max() < TOLERANCE

    long = load_model(source, kernels=Kernels(), max_seq_len=41)
    other = PagedDriver(long, 1).forward([(0, tokens)])
    assert (ours - other).abs().max() > 0.01


def test_the_original_length_outside_the_rope_wins() -> None:
    config = {**CONFIGS["llama"], "rope_scaling": {**YARN}, "original_max_position_embeddings": 20}
    rope = read_spec(config).ropes[0]
    assert rope.original_max_positions == 20


# Root mean square errors over 240 rows of logits, as a share of their standard deviation, against
# float32. transformers, computing in the same dtype, is the yardstick.
@both_kernels
@pytest.mark.every(3)  # all values of each parameter are run
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.03), ("float16", 0.004)])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_narrow_dtypes_are_as_exact_as_in_transformers(
    name: str, dtype: str, tolerance: float, new_kernels: Callable[[], Kernels]
) -> None:
    model = load_model(checkpoint(reference(name)), kernels=new_kernels(), dtype=dtype)
    assert model.spec.dtype == getattr(torch, dtype)
    sequences = random_tokens(120, 120)
    logits = PagedDriver(model, 2).forward(list(enumerate(sequences)))
    assert logits.dtype == getattr(torch, dtype)
    exact = torch.cat([expected_logits(reference(name), tokens) for tokens in sequences])
    narrow = random_model(CONFIGS[name]).to(getattr(torch, dtype))
    theirs = torch.cat([expected_logits(narrow, tokens) for tokens in sequences])
    error, their_error = ((x - exact).std() / exact.std() for x in (logits.float(), theirs))
    assert error < tolerance
    assert error < 1.2 * their_error


def test_the_dtype_is_the_argument_else_the_configs_else_float32() -> None:
    config = CONFIGS["llama"]
    assert read_spec(config).dtype == torch.float32
    assert read_spec({**config, "torch_dtype": "bfloat16"}).dtype == torch.bfloat16
    assert read_spec({**config, "dtype": "float16"}).dtype == torch.float16
    assert read_spec({**config, "dtype": "float16"}, dtype="float32").dtype == torch.float32
    assert read_spec(config, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_windows_are_those_of_the_config() -> None:
    assert read_spec(CONFIGS["mistral"]).windows == (7, 7, 7)
    assert read_spec(CONFIGS["mistral"]).sliding_window == 7
    assert read_spec({**CONFIGS["mistral"], "sliding_window": None}).windows == (None,) * 3
    assert read_spec(CONFIGS["mistral"], max_seq_len=7).windows == (None,) * 3
    assert read_spec(CONFIGS["qwen2"] | {"sliding_window": 9}).windows == (None,) * 3
    assert read_spec(CONFIGS["qwen2_windows"]).windows == (None, 9, 9)
    assert read_spec(CONFIGS["qwen2_windows"]).sliding_window is None
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert read_spec({**CONFIGS["qwen2_windows"], "layer_types": types}).windows == (9, None, 9)
    assert read_spec({**CONFIGS["qwen2_windows"], "max_window_layers": 0}).windows == (9, 9, 9)


def test_kernels_of_the_cpu_are_the_default_there_and_there_alone() -> None:
    rows = list(enumerate(random_tokens(9, 4)))
    source = checkpoint(reference("llama"))
    given, default = load_model(source, kernels=CpuKernels()), load_model(source)
    logits = [PagedDriver(model, 2).forward(rows) for model in (given, default)]
    assert torch.equal(*logits)
    with pytest.raises(ConfigError, match="kernels = None is refused with device = 'meta'"):
        load_model(source, device="meta")


def rounded_to_8_bits(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """Return the values of a matrix that is stored in int8, with a scale for each output."""
    looked_up = ["wpe"] if config["tie_word_embeddings"] else ["wpe", "embed_tokens", "wte"]
    if tensor.dim() < 2 or any(part in name for part in looked_up):
        return tensor
    rows = 0 if any(part in name for part in ("c_attn", "c_proj", "c_fc")) else 1
    scale = tensor.abs().amax(dim=rows, keepdim=True) / 127
    return (tensor / scale).round() * scale


@pytest.mark.parametrize("unit", UNITS, ids=["floats", "unit"])
@pytest.mark.parametrize("name", CONFIGS)
def test_weights_in_8_bits_are_those_rounded_by_row(
    name: str, unit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul_plan, "has_int8_unit", lambda: unit)
    config, tensors = checkpoint(reference(name))
    config = {"tie_word_embeddings": False} | {**config}
    held = load_model((config, tensors), kernels=CpuKernels(True), weights_dtype="int8")
    tied = held.spec.tied_embeddings
    rounded = {
        key: rounded_to_8_bits(key, tensor, {"tie_word_embeddings": tied})
        for key, tensor in tensors.items()
    }
    expected = load_model((config, rounded), kernels=Kernels())
    rows = list(enumerate(random_tokens(9, 40, 1)))
    logits, wanted = (PagedDriver(model, 3).forward(rows) for model in (held, expected))
    torch.testing.assert_close(logits, wanted, atol=INT16_TOLERANCE if unit else TOLERANCE, rtol=0)
    assert held.weights.nbytes < expected.weights.nbytes
    held.weights.load(tensors)  # twins are compared as they are held
    assert torch.equal(PagedDriver(held, 3).forward(rows), logits)


@pytest.mark.parametrize("head_dtype", [None, "int4"])
@pytest.mark.parametrize("unit", UNITS, ids=["floats", "unit"])
@pytest.mark.parametrize("name", CONFIGS)
def test_weights_in_4_bits_are_those_rounded_in_groups(
    name: str, head_dtype: Any, unit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul_plan, "has_int8_unit", lambda: unit)
    config, tensors = checkpoint(reference(name))
    options = {"weights_dtype": "int4", "head_dtype": head_dtype}
    held = load_model((config, tensors), kernels=CpuKernels(True), **options)
    plain_model = load_model((config, tensors), kernels=Kernels())
    heads = {"embedding.weight", "lm_head.weight"}
    for parameter in held.weights:
        own = held.weights[parameter]
        if not isinstance(own, PackedMatrix) or own.scales is None:
            continue
        is_int4 = head_dtype == "int4" or parameter not in heads
        assert isinstance(own, Int4Matrix) == is_int4, parameter
        floats = plain_model.weights.tensor(parameter)
        if is_int4:
            assert torch.equal(own.unpacked(), round_to_groups(floats).floats()), parameter
        floats.copy_(own.unpacked())
    rows = list(enumerate(random_tokens(9, 40, 1)))
    logits, wanted = (PagedDriver(model, 3).forward(rows) for model in (held, plain_model))
    torch.testing.assert_close(logits, wanted, atol=INT16_TOLERANCE if unit else TOLERANCE, rtol=0)
    held.weights.load(tensors)  # twins are compared as they are held
    assert torch.equal(PagedDriver(held, 3).forward(rows), logits)


@pytest.mark.skipif(not packing_pays(), reason="weights are packed only on processors with AVX2")
def test_the_network_computes_with_packed_matrices() -> None:
    weights = load_model(checkpoint(reference("llama"))).weights
    assert isinstance(weights["layers.0.qkv.weight"], PackedMatrix)
    assert isinstance(weights["embedding.weight"], Tensor)  # it is not tied
    assert isinstance(weights["final_norm.weight"], Tensor)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"weights_dtype": "int2"},
            "weights_dtype = 'int2' must be one of ('int8', 'int4', 'fp8', 'file')",
        ),
        (
            {"weights_dtype": 8},
            "weights_dtype = 8 must be one of ('int8', 'int4', 'fp8', 'file') or None",
        ),
        (
            {"weights_dtype": "int8", "head_dtype": "int4"},
            "head_dtype = 'int4' is refused with weights_dtype = 'int8': it belongs to 'int4'",
        ),
        (
            {"weights_dtype": "int4", "head_dtype": "float32"},
            "head_dtype = 'float32' must be 'int8', 'int4' or None",
        ),
        (
            {"weights_dtype": "int8", "kernels": Kernels()},
            "weights_dtype = 'int8' is refused with kernels = Kernels: they have matmuls for none",
        ),
        (
            {"weights_dtype": "int8", "device": "meta", "kernels": CpuKernels()},
            "weights_dtype = 'int8' is refused with device = 'meta'",
        ),
    ],
)
def test_8_bits_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_model(checkpoint(reference("llama")), **given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights_dtype": "int2"}, "weights_dtype = 'int2' must be one of"),
        (
            {"head_dtype": "int4"},
            "head_dtype = 'int4' is refused with weights_dtype = None: it belongs to 'int4'",
        ),
    ],
)
def test_a_manager_refuses_8_bits_by_name(options: dict[str, Any], message: str) -> None:
    host = RecordingCallbacks()
    params = OptionalParams(**options)
    with pytest.raises(ConfigError, match=f"OptionalParams.{message}"):
        GptManager(
            checkpoint(reference("llama")),
            ModelType.INFLIGHT_FUSED_BATCHING,
            **host.keywords(),
            optional_params=params,
        )
    with pytest.raises(ConfigError, match=r"OptionalParams\.weights_dtype = 'int8' has no effect"):
        GptManager(
            load_model(checkpoint(reference("llama"))),
            ModelType.INFLIGHT_FUSED_BATCHING,
            **host.keywords(),
            optional_params=OptionalParams(weights_dtype="int8"),
        )


def test_weights_have_their_names() -> None:
    weights = load_model(checkpoint(reference("llama"))).weights
    assert {"embedding.weight", "layers.1.down.weight", "lm_head.weight"} <= set(weights)
    assert sum(weights[name].nbytes for name in weights) == weights.nbytes


def test_a_model_in_another_object_reserves_positions_for_its_longest_sequence() -> None:
    class Wrapped:
        def __init__(self, network: Any) -> None:
            self.spec, self.nbytes, self.forward = network.spec, network.nbytes, network.forward
            self.reserved: list[int] = []

        def reserve_positions(self, num_positions: int) -> None:
            self.reserved.append(num_positions)

    model = Wrapped(load_model(checkpoint(reference("llama"))))
    host = RecordingCallbacks()
    params = OptionalParams(max_batch_size=1, max_seq_len=40)
    manager = GptManager(
        model, ModelType.INFLIGHT_FUSED_BATCHING, optional_params=params, **host.keywords()
    )
    manager.shutdown()
    assert model.reserved == [40]


class CountingKernels(Kernels):
    """Notes the rows of every product."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, int]] = []

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        self.rows.append((len(x), len(weight)))
        return super().linear(x, weight, bias)


def test_only_sampling_tokens_reach_the_last_matmuls() -> None:
    kernels = CountingKernels()
    model = load_model(checkpoint(reference("llama")), kernels=kernels)
    driver = PagedDriver(model, 3)
    rows = list(enumerate(random_tokens(9, 6, 5)))
    logits = driver.forward(rows, [8, 19])
    assert logits.shape == (2, 96)
    per_layer = [64, 32, 112, 32]
    assert kernels.rows[-4:] == [(2, 32), (2, 112), (2, 32), (2, 96)]
    assert kernels.rows[:-4] == [(20, width) for width in [*per_layer, *per_layer, 64]]
    everything = PagedDriver(model, 3).forward(rows)
    assert torch.allclose(logits, everything[[8, 19]], atol=1e-5)


@both_kernels
def test_a_step_without_sampling_tokens_writes_the_cache(
    new_kernels: Callable[[], Kernels],
) -> None:
    model = load_model(checkpoint(reference("llama")), kernels=new_kernels())
    (tokens,) = random_tokens(21)
    driver = PagedDriver(model, 1)
    nothing = driver.forward([(0, tokens[:13])], [])
    assert nothing.shape == (0, 96)
    assert nothing.dtype == torch.float32
    rest = driver.forward([(0, tokens[13:])])
    assert (rest - expected_logits(reference("llama"), tokens)[13:]).abs().max() < TOLERANCE


@both_kernels
def test_replaced_weights_are_used(new_kernels: Callable[[], Kernels]) -> None:
    model = load_model(checkpoint(reference("gpt2")), kernels=new_kernels())
    (tokens,) = random_tokens(12)
    other = random_model(CONFIGS["gpt2"], seed=1)
    model.weights.load(other.state_dict())
    logits = PagedDriver(model, 1).forward([(0, tokens)])
    assert (logits - expected_logits(other, tokens)).abs().max() < TOLERANCE

    norm = {"transformer.ln_f.bias": torch.full((32,), 2.0)}
    other.load_state_dict(norm, strict=False)
    model.weights.load(norm, partial=True)
    logits = PagedDriver(model, 1).forward([(0, tokens)])
    assert (logits - expected_logits(other, tokens)).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    "names",
    [
        ("self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
        ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
        ("self_attn.kv_scale",),
    ],
)
def test_scales_of_an_8_bit_cache_have_several_names(names: tuple[str, ...]) -> None:
    config, tensors = checkpoint(random_model(CONFIGS["llama"]))
    for name in names:
        tensors[f"model.layers.1.{name}"] = torch.tensor(0.25)
    weights = load_model((config, tensors), kernels=Kernels()).weights
    assert (weights["layers.0.cache_scales"] == 1).all()
    assert (weights["layers.1.cache_scales"] == 0.25).all()


@pytest.mark.parametrize("name", ["llama", "qwen2_windows", "gpt2"])
def test_folders_single_and_sharded_equal_the_state_dict(name: str, tmp_path: Path) -> None:
    hf = reference(name)
    tokens = list(enumerate(random_tokens(9, 4)))
    hf.save_pretrained(tmp_path / "single")
    hf.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    pair = load_model(checkpoint(hf), kernels=Kernels())
    expected = PagedDriver(pair, 2).forward(tokens)
    for folder in ("single", "sharded"):
        model = load_model(tmp_path / folder, kernels=Kernels())
        assert model.spec == pair.spec
        assert torch.equal(PagedDriver(model, 2).forward(tokens), expected)


def test_the_first_gpt2_checkpoints_load() -> None:
    """Their tensors have no prefix, and each layer saves its causal mask."""
    config, state_dict = checkpoint(reference("gpt2"))
    del state_dict["lm_head.weight"]
    bare = {name.removeprefix("transformer."): tensor for name, tensor in state_dict.items()}
    bare["h.0.attn.bias"] = torch.ones(1, 1, 160, 160).tril()
    model = load_model((config, bare), kernels=Kernels())
    (tokens,) = random_tokens(12)
    logits = PagedDriver(model, 1).forward([(0, tokens)])
    assert (logits - expected_logits(reference("gpt2"), tokens)).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("name", "change", "texts"),
    [
        ("llama", {"model_type": "mamba"}, ["model_type = 'mamba'", "qwen3"]),
        ("llama", {"model_type": None}, ["model_type = None"]),
        ("llama", {"hidden_act": "mish"}, ["hidden_act = 'mish'", "silu"]),
        ("gpt2", {"activation_function": "swiglu"}, ["activation_function = 'swiglu'", "gelu_new"]),
        ("llama", {"hidden_size": "32"}, ["hidden_size = '32'", "positive integer"]),
        ("llama", {"vocab_size": None}, ["vocab_size = None"]),
        ("gpt2", {"n_embd": -1}, ["n_embd = -1"]),
        ("llama", {"hidden_size": 33}, ["num_attention_heads = 4", "hidden_size = 33"]),
        ("llama", {"head_dim": 7}, ["head_dim = 7", "even"]),
        (
            "llama",
            {"num_key_value_heads": 3},
            ["num_key_value_heads = 3", "num_attention_heads = 4"],
        ),
        ("llama", {"rms_norm_eps": "x"}, ["rms_norm_eps = 'x'"]),
        ("gpt2", {"layer_norm_epsilon": float("nan")}, ["layer_norm_epsilon = nan"]),
        ("llama", {"attention_bias": "yes"}, ["attention_bias = 'yes'"]),
        ("llama", {"sliding_window": 8}, ["sliding_window = 8"]),
        ("mistral", {"sliding_window": -8}, ["sliding_window = -8"]),
        ("mistral", {"layer_types": ["full_attention"] * 3}, ["layer_types = ['full_attention'"]),
        ("qwen2", {"layer_types": ["sliding_attention"] * 3}, ["layer_types", "full_attention"]),
        ("qwen2", {"layer_types": ["full_attention"]}, ["layer_types = ['full_attention']", "3"]),
        ("qwen2", {"layer_types": 5}, ["layer_types = 5"]),
        ("qwen2_windows", {"layer_types": ["linear_attention"] * 3}, ["linear_attention"]),
        ("qwen2_windows", {"max_window_layers": -1}, ["max_window_layers = -1"]),
        ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor = 0.5"]),
        ("llama", {"quantization_config": {"bits": 4}}, ["quantization_config = {'bits': 4}"]),
        ("gpt2", {"add_cross_attention": True}, ["add_cross_attention = True"]),
        ("qwen2", {"is_causal": False}, ["is_causal = False"]),
        ("llama", {"torch_dtype": "int8"}, ["torch_dtype = 'int8'", "bfloat16"]),
        ("llama", {"rope_scaling": {"type": "ntk", "factor": 2}}, [".type = 'ntk'"]),
        ("llama", {"rope_parameters": {"rope_type": "ntk"}}, ["rope_type = 'ntk'", "yarn"]),
        ("llama", {"rope_scaling": {"type": "dynamic"}}, ["rope_scaling.factor = None"]),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 1e30}}, ["leads to the base 0"]),
        ("llama", {"rope_scaling": {"type": "linear"}}, ["rope_scaling.factor = None"]),
        ("llama", {"rope_scaling": "yarn"}, ["rope_scaling = 'yarn'"]),
        ("llama", {"rope_scaling": {**YARN, "extra": 1}}, ["rope_scaling.extra = 1", "yarn"]),
        ("llama", {"rope_scaling": YARN, "rope_parameters": LONGROPE}, ["rope_scaling = {"]),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor"]),
        ("llama", {"rope_parameters": {"full_attention": YARN}}, [".full_attention = {"]),
        ("llama", {"rope_parameters": {"rope_theta": 1.0}}, ["rope_theta = 1.0"]),
        (
            "llama",
            {"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 0.5}},
            ["high_freq_factor = 0.5"],
        ),
        (
            "llama",
            {"rope_scaling": LONGROPE | {"long_factor": [1.0]}},
            ["long_factor = [1.0]", "4"],
        ),
        ("llama", {"rope_scaling": LONGROPE | {"short_factor": [0] * 4}}, ["short_factor = [0, 0"]),
    ],
)
def test_config_values_that_are_not_supported_are_named(
    name: str, change: dict[str, Any], texts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_spec({**CONFIGS[name], **change})
    for text in texts:
        assert text in str(caught.value)


def test_arguments_that_cannot_work_are_named() -> None:
    with pytest.raises(ConfigError, match=r"^dtype = 'float8'"):
        read_spec(CONFIGS["llama"], dtype="float8")
    with pytest.raises(ConfigError, match="max_seq_len = 0"):
        read_spec(CONFIGS["llama"], max_seq_len=0)
    with pytest.raises(ConfigError, match="max_seq_len = '9' must be an integer of at least 1"):
        read_spec(CONFIGS["llama"], max_seq_len="9")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_seq_len = 161: .* learned positions for 160"):
        read_spec(CONFIGS["gpt2"], max_seq_len=161)
    assert read_spec(CONFIGS["llama"], max_seq_len=500).max_seq_len == 500


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"attention_window": 0}, "attention_window = 0 must be an integer of at least 1"),
        ({"attention_window": -3}, "attention_window = -3 must be an integer of at least 1"),
        ({"attention_window": 2.5}, "attention_window = 2.5 must be an integer of"),
        ({"sink": -1}, "sink = -1 must be an integer of at least 0"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype = 'fp8': must be torch.float8_e4m3fn or None"),
        ({"kv_cache_dtype": torch.float16}, "kv_cache_dtype = torch.float16: must be torch.float8"),
    ],
)
def test_a_model_names_options_of_attention_that_it_cannot_use(
    given: dict[str, Any], refused: str
) -> None:
    with pytest.raises(ConfigError, match=refused):
        load_model(checkpoint(reference("llama")), **given)


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("llama", {"tie_word_embeddings": True}, "lm_head.weight differs from embedding.weight"),
        ("qwen2", {"model_type": "llama"}, "unknown: model.layers.0.self_attn.k_proj.bias, "),
        ("llama", {"model_type": "qwen2"}, "missing: model.layers.0.self_attn.k_proj.bias, "),
        ("qwen3", {"model_type": "llama"}, "unknown: model.layers.0.self_attn.k_norm.weight"),
        ("llama", {"num_hidden_layers": 2}, "unknown: model.layers.2."),
        ("llama", {"num_hidden_layers": 4}, "missing: model.layers.3."),
        ("qwen2_windows", {"tie_word_embeddings": False}, "; if the output matrix is the embedd"),
        ("llama", {"vocab_size": 10**9}, "embed_tokens.weight has shape [96, 32]; the config"),
        (
            "llama",
            {"head_dim": 16},
            "self_attn.q_proj.weight has shape [32, 32]; the config requires",
        ),
        (
            "gpt2",
            {"n_inner": 40},
            "mlp.c_fc.weight has shape [32, 128]; the config requires [32, 4",
        ),
        ("gpt2_odd", {"n_positions": 99}, "transformer.wpe.weight has shape [160, 32]"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_named(
    name: str, change: dict[str, Any], text: str
) -> None:
    config, state_dict = checkpoint(reference(name))
    if config["tie_word_embeddings"]:
        del state_dict["lm_head.weight"]
    with pytest.raises(ConfigError, match=re.escape(text)):
        load_model((config | change, state_dict), kernels=Kernels())


def test_sources_that_are_not_a_checkpoint_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model_path = 'meta/llama': must be a checkpoint folder"):
        load_model("meta/llama", kernels=Kernels())
    with pytest.raises(ConfigError, match="must be a checkpoint folder with a config.json"):
        load_model(tmp_path, kernels=Kernels())
    with pytest.raises(
        ConfigError, match=r"model_path = \(dict\): must be a folder, a GGUF file or"
    ):
        load_model(({},), kernels=Kernels())  # type: ignore[arg-type]
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        load_model(tmp_path, kernels=Kernels())
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must be a JSON object"):
        load_model(tmp_path, kernels=Kernels())
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"]))
    with pytest.raises(ConfigError, match=r"holds neither model\.safetensors"):
        load_model(tmp_path, kernels=Kernels())


# VmHWM, not getrusage: ru_maxrss is inherited from the process that started this one.
_MEASURE = """
import re, sys, torch
from gptmanager.kernels import CpuKernels, Kernels
from gptmanager.models import load_model

def kilobytes(field):
    return int(re.search(field + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1])

kernels, tiny, *folders = sys.argv[1:]
kernels = CpuKernels() if kernels == "CpuKernels" else Kernels()
load_model(tiny, kernels=kernels)
for folder in folders:
    open("/proc/self/clear_refs", "w").write("5")
    before = kilobytes("VmHWM")
    model = load_model(folder, kernels=kernels)
    print((kilobytes("VmHWM") - before) * 1024 / model.weights.nbytes)
    del model
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@both_kernels
@pytest.mark.slow
def test_loading_peaks_at_the_final_weights_and_a_fifth(
    tmp_path: Path, new_kernels: type[Kernels]
) -> None:
    # one tensor of 61 MB beside fused, transposed and tied ones
    large = {"vocab_size": 20000, "tie_word_embeddings": True}
    llama = {"hidden_size": 768, "intermediate_size": 2048}
    random_model(CONFIGS["llama"]).save_pretrained(tmp_path / "tiny")
    save_large(CONFIGS["llama"] | large | llama, tmp_path / "llama")
    save_large(CONFIGS["gpt2"] | large | {"n_embd": 512}, tmp_path / "gpt2")
    folders = [tmp_path / name for name in ("tiny", "llama", "gpt2")]
    command = [sys.executable, "-c", _MEASURE, new_kernels.__name__, *folders]
    process = subprocess.run(command, check=True, capture_output=True, text=True)
    shares = [float(line) for line in process.stdout.split()]
    assert len(shares) == 2
    assert all(1.0 < share < 1.2 for share in shares)
