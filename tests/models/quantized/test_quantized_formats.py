"""Quantized checkpoints: the numbers of the libraries that pack them, in floats and in our bits.

`pack_fixtures.py` and `pack_mlx_fixtures.py` made the files of this folder. Each has the packed
linears of one tiny Llama.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from family_runs import family_folder
from quantized_config import CONFIG, field_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from gptmanager.callbacks import generate
from gptmanager.errors import ConfigError
from gptmanager.kernels import Kernels
from gptmanager.kernels.gemm.int4_matrix import Int4Matrix
from gptmanager.kernels.gemm.packed_matrix import PackedMatrix
from gptmanager.kernels.gemm.panels.code_loops import E2M1, FOUR_BITS, NAMED
from gptmanager.kernels.gemm.panels.codes import Codes
from gptmanager.memory.checkpoint.tensor_sources import StateDict
from gptmanager.models import load_model
from gptmanager.models.checkpoint_parts import as_floats, is_quantized, open_tensors
from gptmanager.models.conversion import convert_checkpoint

HERE = Path(__file__).parent
EXPECTED = json.loads((HERE / "expected.json").read_text())
PROMPTS = [[3, 7, 11, 2], [30, 1, 5, 9, 9, 4, 21]]
LAYER = "model.layers.0."
Checkpoint = tuple[dict[str, Any], dict[str, Tensor]]


def checkpoint(name: str) -> Checkpoint:
    tensors = load_file(HERE / "floats.safetensors") | load_file(HERE / f"{name}.safetensors")
    return {**CONFIG, field_of(name): EXPECTED[name]["config"]}, tensors


def floats(name: str) -> dict[str, Tensor]:
    """The same checkpoint in floats."""
    config, tensors = checkpoint(name)
    source = as_floats(config, StateDict(tensors))
    found = {}
    for own in source.describe():
        [(_, found[own])] = source.pieces(own, 1 << 40)
    return found


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.every(3)
def test_matrices_are_those_of_the_library_that_packed_them(name: str) -> None:
    found = floats(name)

    assert set(found) == {*load_file(HERE / "floats.safetensors"), *EXPECTED[name]["digests"]}
    for matrix, digest in EXPECTED[name]["digests"].items():
        assert found[matrix].dtype is torch.float32
        own = found[matrix].contiguous().numpy().tobytes()
        assert hashlib.sha256(own).hexdigest() == digest, matrix


def test_experts_of_mlx_have_a_global_scale_each() -> None:
    tensors, module = load_file(HERE / "mlx-experts.safetensors"), "switch_mlp.up_proj"
    exact, largest = tensors.pop("floats"), f"{module}.global_scale"
    options = {"group_size": 16, "bits": 4, "mode": "nvfp4"}

    def read(own: dict[str, Any], changes: Mapping[str, Tensor | None]) -> Tensor:
        config = {"quantization": {"group_size": 32, "bits": 4, module: own}}
        given = {key: it for key, it in {**tensors, **changes}.items() if it is not None}
        source = as_floats(config, StateDict(given))
        assert source.describe()[f"{module}.weight"].groups is None  # groups have 16 columns
        return torch.cat([it.clone() for _, it in source.pieces(f"{module}.weight", 1 << 40)])

    # mlx_lm notes the global scale in the options of a module, or only writes the tensor
    for own in ({**options, "global_scale": True}, options):
        assert torch.equal(read(own, {}), exact)
    with pytest.raises(ConfigError, match=f"{largest} is missing: a quantized matrix needs it"):
        read({**options, "global_scale": True}, {largest: None})
    for wrong in (torch.ones(2), torch.ones(()), torch.ones(3, dtype=torch.int32)):
        with pytest.raises(ConfigError, match=rf"{largest} is .*: it must be .*float32.* \[3\]"):
            read(options, {largest: wrong})
    for number in (torch.nan, torch.inf, 1e30):
        with pytest.raises(ConfigError, match=f"{largest} leads to a scale .* NaN, or"):
            read(options, {largest: torch.tensor([1, number, 1])})


@pytest.mark.every(4)
@pytest.mark.parametrize("name", EXPECTED)
def test_a_model_answers_as_its_floats_do(name: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, *checkpoint(name))
    model = load_model(folder, dtype="float32")

    assert is_quantized(folder)
    expected = generate(load_model((CONFIG, floats(name)), dtype="float32"), PROMPTS, 12)
    assert generate(model, PROMPTS, 12) == expected


IN_4_BITS = {"ct-int4", "ct-int4-asymmetric", "gptq", "awq", "mlx"}


@pytest.mark.every(5)
@pytest.mark.parametrize("name", EXPECTED)
def test_matrices_are_kept_in_4_or_8_bits(name: str) -> None:
    weights = load_model(checkpoint(name), weights_dtype="file", dtype="float32").weights
    matrix, own = weights["layers.0.qkv.weight"], floats(name)
    exact = torch.cat([own[f"{LAYER}self_attn.{it}_proj.weight"] for it in "qkv"])

    assert isinstance(matrix, PackedMatrix)
    assert isinstance(matrix, Int4Matrix) == (name in IN_4_BITS)
    if "asymmetric" in name or name == "awq":  # the minimum of a group is rounded to float16
        assert (matrix.unpacked() - exact).abs().max() <= exact.abs().max() * 2**-11
    elif name in IN_4_BITS:
        assert torch.equal(matrix.unpacked(), exact)
    else:  # half a step of each row
        steps = exact.abs().amax(1, keepdim=True) / 127
        assert ((matrix.unpacked() - exact).abs() <= steps * 0.5001).all()
    up = weights["layers.0.up.weight"]  # its second half is not quantized in the checkpoint
    assert isinstance(up, PackedMatrix) and not isinstance(up, Int4Matrix)


@pytest.mark.parametrize("name", EXPECTED)
def test_rows_are_read_in_any_slices(name: str) -> None:
    config, tensors = checkpoint(name)
    source, own = (as_floats(config, StateDict(tensors)), f"{LAYER}self_attn.o_proj.weight")
    whole = floats(name)[own]

    pieces = list(source.pieces(own, 1, [range(3, 62), range(5, 30)]))
    assert len(pieces) > 3
    assert [start for start, _ in pieces] == [0, *range(5, 59, 8)]
    assert torch.equal(torch.cat([piece for _, piece in pieces]), whole[3:62, 5:30])
    if source.describe()[own].groups:
        groups = list(source.groups(own, 1, range(3, 62)))
        assert [start for start, _ in groups] == [start for start, _ in pieces]
        found = torch.cat([part.floats() for _, part in groups])
        assert (found - whole[3:62]).abs().max() <= whole.abs().max() * 2**-11


def scaled(codes: Tensor, scales: Tensor, **options: Any) -> Tensor:
    return Codes(codes=codes, scales=scales, block=64, **options).floats()


@pytest.mark.parametrize("columns", [16, 46])
def test_each_code_has_its_value(columns: int) -> None:
    """Also in columns that do not fill sixteen lanes."""
    one = torch.ones(256, 1)
    codes = torch.arange(256, dtype=torch.uint8)[:, None].expand(-1, columns).contiguous()
    float8 = codes.view(torch.float8_e4m3fn)
    found = scaled(float8, one)
    assert torch.equal(found.nan_to_num(999), float8.float().nan_to_num(999))
    numbers = ~found.isnan()
    assert torch.equal(found[numbers].signbit(), float8.float()[numbers].signbit())
    assert torch.equal(scaled(codes, one), codes.float())
    assert torch.equal(scaled(codes.view(torch.int8), one), codes.view(torch.int8).float())

    pairs = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
    table = torch.randn(16, generator=torch.Generator().manual_seed(1))
    assert torch.equal(scaled(codes, one, kind=FOUR_BITS), pairs.float())
    assert torch.equal(scaled(codes, one, kind=NAMED, table=table), table[pairs.long()])
    swapped = scaled(codes, one, kind=NAMED, table=table, high_first=True)
    assert torch.equal(swapped, table[pairs.unflatten(1, (-1, 2)).flip(2).flatten(1).long()])
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    found = scaled(codes, one, kind=E2M1)
    assert torch.equal(found, values[pairs.long()])
    assert torch.equal(found.signbit(), pairs > 7)


def test_experts_of_gpt_oss_are_those_of_transformers() -> None:
    convert = pytest.importorskip(
        "transformers.integrations.mxfp4", reason="transformers has no MXFP4 here"
    ).convert_moe_packed_tensors
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (3, 16, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 130, (3, 16, 2), generator=generator, dtype=torch.uint8)
    tensors = {"a.down_proj_blocks": blocks, "a.down_proj_scales": scales}
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    source = as_floats(config, StateDict(tensors))
    exact = convert(blocks, scales, dtype=torch.float32)

    assert source.describe()["a.down_proj"][:2] == ((3, 64, 16), "float32")
    found = torch.cat([it for _, it in source.pieces("a.down_proj", 1)])
    assert torch.equal(found, exact)
    region = [range(1, 3), range(5, 40), range(2, 9)]
    part = torch.cat([it for _, it in source.pieces("a.down_proj", 1, region)])
    assert torch.equal(part, exact[1:3, 5:40, 2:9])
    # outputs, numbered through all experts
    [(_, codes)] = source.codes("a.down_proj", 1 << 20, range(16 + 2, 16 + 13))
    assert torch.equal(codes.floats(), exact[1].t()[2:13])
    assert torch.equal(codes.rows(slice(None, None, 2)).floats(), exact[1].t()[2:13:2])
    assert source.describe()["a.down_proj"].groups == "e2m1"
    [(_, groups)] = source.groups("a.down_proj", 1 << 20, range(16 + 2, 16 + 13))
    assert torch.equal(groups.floats(), exact[1].t()[2:13])


def test_deepseek_in_8_bit_floats_has_the_numbers_of_its_floats() -> None:
    folder = family_folder("deepseek_v3")
    config = json.loads((folder / "config.json").read_text())
    packed, exact = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        packed[name] = exact[name] = tensor
        if name.endswith("proj.weight") or name.endswith("_with_mqa.weight"):
            rows, columns = (-(-size // 16) for size in tensor.shape)
            scales = torch.linspace(0.01, 0.02, rows * columns).view(rows, columns)
            wide = scales.repeat_interleave(16, 0).repeat_interleave(16, 1)
            wide = wide[: len(tensor), : tensor.shape[1]]
            packed[name] = (tensor / wide).to(torch.float8_e4m3fn)
            packed[f"{name}_scale_inv"] = scales
            exact[name] = packed[name].float() * wide
    own = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}
    found = load_model(({**config, "quantization_config": own}, packed), kernels=Kernels())
    expected = load_model((config, exact), kernels=Kernels())

    assert len(packed) > len(exact)
    for name in expected.weights:
        assert torch.equal(found.weights.tensor(name), expected.weights.tensor(name))


def powers(rows: int) -> Tensor:
    return torch.randint(120, 130, (rows, 3), generator=SEED, dtype=torch.uint8)


SEED = torch.Generator().manual_seed(2)
FLOAT8 = torch.randn(160, 96, generator=SEED).to(torch.float8_e4m3fn)
INT8 = torch.randint(-128, 128, (160, 96), generator=SEED, dtype=torch.int8)
PAIRS = torch.randint(0, 256, (160, 48), generator=SEED, dtype=torch.uint8)
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
ROWS, BLOCKS = torch.rand(160, generator=SEED), torch.rand(2, 1, 1, 1, generator=SEED)
ONE, POWERS = torch.tensor(0.5), powers(160)
AMD = {
    "quant_method": "quark",
    "global_quant_config": {"weight": {"dtype": "int8", "qscheme": "per_tensor"}},
}
NVIDIA = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
LAYERS = {"a": {"quant_algo": "fp8_pb_wo"}, "b": {"quant_algo": "NVFP4"}}
# The formulas are those of Quark 0.13 and ModelOpt 0.47, whose own numbers were compared once.
BY_DEFINITION: dict[str, tuple[dict[str, Any], dict[str, Tensor], Tensor]] = {
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        {"weight": FLOAT8, "weight_scale": ROWS[:, None], "input_scale_ub": torch.ones(1)},
        ROWS[:, None],
    ),
    "fp8 of Quark": (AMD, {"weight": FLOAT8, "weight_scale": ROWS}, ROWS[:, None]),
    "int8 of Quark": (
        AMD,
        {
            "weight": INT8,
            "weight_scale": ONE,
            "weight_zero_point": torch.zeros((), dtype=torch.int8),
        },
        ONE,
    ),
    "MXFP4 of Quark": (AMD, {"weight": PAIRS, "weight_scale": POWERS}, POWERS),
    "MXFP4 of ModelOpt": (
        {**NVIDIA, "quant_algo": "mxfp4"},
        {"weight": PAIRS, "weight_scale": POWERS},
        POWERS,
    ),
    "MXFP8 of ModelOpt": (
        {**NVIDIA, "quant_algo": "MXFP8"},
        {"weight": FLOAT8, "weight_scale": POWERS},
        POWERS,
    ),
    "MXFP8 of transformers": (
        {"quant_method": "mxfp8", "scale_fmt": "ue8m0"},
        {"weight": FLOAT8, "weight_scale_inv": POWERS},
        POWERS,
    ),
    "MXFP8 of compressed-tensors": (
        {
            "quant_method": "compressed-tensors",
            "format": "mxfp8-quantized",
            "config_groups": {
                "a": {
                    "weights": {
                        "num_bits": 8,
                        "type": "float",
                        "strategy": "group",
                        "group_size": 32,
                    }
                }
            },
        },
        {"weight": FLOAT8, "weight_scale": POWERS},
        POWERS,
    ),
    "blocks of ModelOpt": (
        {**NVIDIA, "quantized_layers": LAYERS},
        {"weight": FLOAT8, "weight_scale": BLOCKS},
        BLOCKS.view(2, 1).repeat_interleave(128, 0)[:160],
    ),
}


def unaligned(tensor: Tensor) -> Tensor:
    """Return a view of a larger tensor, which begins after its first element."""
    return torch.cat((tensor.flatten()[:1], tensor.flatten()))[1:].view(tensor.shape)


@pytest.mark.parametrize("name", BY_DEFINITION)
def test_scales_are_those_of_the_definition(name: str) -> None:
    config, tensors, scales = BY_DEFINITION[name]
    given = {f"a.q_proj.{ending}": unaligned(tensor) for ending, tensor in tensors.items()}
    source = as_floats({"quantization_config": config}, StateDict(given))
    if scales.dtype is torch.uint8:
        scales = torch.exp2(scales.float() - 127).repeat_interleave(32, 1)
    codes = tensors["weight"]
    if codes.dtype is torch.uint8:
        codes = FP4[torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()]

    assert [*source.describe()] == ["a.q_proj.weight"]
    found = torch.cat([piece for _, piece in source.pieces("a.q_proj.weight", 1 << 30)])
    assert torch.equal(found, codes.float() * scales)
    assert source.describe()["a.q_proj.weight"].groups == ("e2m1" if "MXFP4" in name else None)
    if "MXFP4" in name:
        groups = [it.floats() for _, it in source.groups("a.q_proj.weight", 1 << 30, range(160))]
        assert torch.equal(torch.cat(groups), found)


@pytest.mark.parametrize(
    ("largest", "kept"), [(113, None), (114, "e2m1"), (143, "e2m1"), (144, None), (255, None)]
)
def test_float16_must_hold_the_scales_of_groups_of_4_bit_floats(
    largest: int, kept: str | None
) -> None:
    """Half of a scale is stored. Half of the largest one is a normal number from 114 on."""
    scales = POWERS.clamp(max=largest)
    scales[3, 1], scales[3, 2] = largest, 0
    config, tensors, _ = BY_DEFINITION["MXFP4 of Quark"]
    given = {f"a.q_proj.{key}": it for key, it in {**tensors, "weight_scale": scales}.items()}
    source = as_floats({"quantization_config": config}, StateDict(given))
    assert source.describe()["a.q_proj.weight"].groups == kept
    if kept:
        [(_, groups)] = source.groups("a.q_proj.weight", 1 << 30, range(160))
        [(_, floats)] = source.pieces("a.q_proj.weight", 1 << 30)
        assert groups.scales.isfinite().all()
        torch.testing.assert_close(groups.floats(), floats, rtol=0, atol=6 * 2.0**-24)


@pytest.mark.parametrize("largest", [113, 144, 255])
def test_experts_whose_scales_float16_cannot_hold_are_not_kept_in_groups(largest: int) -> None:
    scales = torch.full((2, 16, 2), 100, dtype=torch.uint8)
    scales[1, 3, 1] = largest
    blocks = torch.full((2, 16, 2, 16), 119, dtype=torch.uint8)
    tensors = {"a.down_proj_blocks": blocks, "a.down_proj_scales": scales}
    source = as_floats({"quantization_config": {"quant_method": "mxfp4"}}, StateDict(tensors))
    assert source.describe()["a.down_proj"].groups is None
    with pytest.raises(ConfigError) if largest == 255 else contextlib.nullcontext():
        [(_, codes)] = source.codes("a.down_proj", 1 << 20, range(16, 32))
        assert codes.floats().max() == 6 * 2.0 ** (largest - 127)


NIBBLES = PAIRS & 15, PAIRS >> 4  # elements of two rows
INT4 = torch.stack([(it ^ 8).to(torch.int8) - 8 for it in NIBBLES], 1).flatten(0, 1)
GROUPS, INPUTS = torch.rand(320, 3, generator=SEED), torch.rand(48, generator=SEED).half()
FLOAT4 = FP4[torch.stack(NIBBLES, -1).flatten(1).long()]
POSITIVE = torch.rand(160, 3, generator=SEED).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("inputs", [None, INPUTS])
@pytest.mark.parametrize(
    ("algorithm", "tensors", "expected"),
    [
        (
            "W4A16_AWQ",
            {"weight": PAIRS, "weight_scale": GROUPS},
            INT4 * GROUPS.repeat_interleave(16, 1),
        ),
        (
            "W4A8_AWQ",  # the second scale is of the products
            {"weight": PAIRS, "weight_scale": GROUPS[:, :1], "weight_scale_2": ONE},
            INT4 * GROUPS[:, :1],
        ),
        (
            "W8A8_SQ_PER_CHANNEL",
            {"weight": INT8[:, :48], "weight_scale": ROWS, "input_scale": ONE},
            INT8[:, :48] * ROWS[:, None],
        ),
        (
            "W4A8_NVFP4_FP8",
            {"weight": PAIRS, "weight_scale": POSITIVE, "weight_scale_2": ONE},
            FLOAT4 * (POSITIVE.float() * 0.5).repeat_interleave(32, 1),
        ),
    ],
)
def test_modelopt_may_scale_inputs(
    algorithm: str, tensors: dict[str, Tensor], expected: Tensor, inputs: Tensor | None
) -> None:
    """The numbers of ModelOpt 0.47 were compared once."""
    given = {f"a.{ending}": tensor.contiguous() for ending, tensor in tensors.items()}
    if inputs is not None:
        inputs = inputs.repeat(expected.shape[1] // 48)
        given["a.pre_quant_scale"], expected = inputs, expected * inputs.float()
    config = {"quantization_config": {**NVIDIA, "quant_algo": algorithm}}
    source = as_floats(config, StateDict(given))
    assert [*source.describe()] == ["a.weight"]
    assert torch.equal(torch.cat([it for _, it in source.pieces("a.weight", 1 << 30)]), expected)
    part = torch.cat([it for _, it in source.pieces("a.weight", 1, [range(3, 90), range(5, 40)])])
    assert torch.equal(part, expected[3:90, 5:40])
    if source.describe()["a.weight"].codes:
        [(_, codes)] = source.codes("a.weight", 1 << 20, range(5, 38))
        assert torch.equal(codes.floats(), expected[5:38])
    if inputs is None:
        return
    for wrong, message in (
        (inputs[:40], r"a.pre_quant_scale is float16 \[40\]: it must be .* \["),
        (inputs.int(), "a.pre_quant_scale is int32"),
        (inputs.float() * torch.nan, "a.pre_quant_scale leads to a scale .* NaN"),
    ):
        with pytest.raises(ConfigError, match=message):
            source = as_floats(config, StateDict({**given, "a.pre_quant_scale": wrong}))
            next(source.pieces("a.weight", 1 << 30))


@pytest.mark.parametrize(
    ("codes", "scales", "zeros"),
    [
        (FLOAT8, ROWS[:, None], None),
        (FLOAT8, torch.rand(2, 3, generator=SEED), None),  # blocks
        (INT8, ONE.view(1, 1), torch.zeros(1, 1, dtype=torch.int8)),
        (INT8, torch.rand(160, 3, generator=SEED).bfloat16(), INT8[:, :3] // 9),
    ],
)
def test_torchao_has_8_bits(codes: Tensor, scales: Tensor, zeros: Tensor | None) -> None:
    """The numbers of torchao 0.18 were compared once."""
    given = {"a._weight_qdata": codes, "a._weight_scale": scales, "b.weight": FP4}
    if zeros is not None:
        given["a._weight_zero_point"] = zeros.contiguous()

    def wide(numbers: Tensor) -> Tensor:
        height, width = (160 // numbers.shape[0], 96 // numbers.shape[1])
        return numbers.float().repeat_interleave(height, 0).repeat_interleave(width, 1)

    config = {"quantization_config": {"quant_method": "torchao", "quant_type": {"default": {}}}}
    for inputs in (None, torch.rand(96, generator=SEED)):
        if inputs is not None:
            given["a._weight_act_pre_scale"] = inputs
        source = as_floats(config, StateDict(given))
        assert {*source.describe()} == {"a.weight", "b.weight"}
        found = torch.cat([piece for _, piece in source.pieces("a.weight", 1 << 30)])
        expected = (codes.float() - (0 if zeros is None else wide(zeros))) * wide(scales)
        assert torch.equal(found, expected if inputs is None else expected * inputs)
    for wrong in (scales.repeat(1, 5), scales.repeat(7, 1), scales[:, :0], torch.ones(3)):
        with pytest.raises(ConfigError, match="_weight_scale has shape .* a number for each block"):
            as_floats(config, StateDict({**given, "a._weight_scale": wrong}))
    with pytest.raises(ConfigError, match="a._weight_qdata is uint8: .* only int8 and float8"):
        as_floats(config, StateDict({**given, "a._weight_qdata": PAIRS}))


def test_pairs_of_modelopt_need_scales_that_fit() -> None:
    config = {"quantization_config": {**NVIDIA, "quant_algo": "W4A16_AWQ"}}
    for scales in (GROUPS[:, :0], GROUPS[:160], GROUPS[:, :1].repeat(1, 5), torch.ones(320, 49)):
        given = {"a.weight": PAIRS, "a.weight_scale": scales.contiguous()}
        with pytest.raises(
            ConfigError, match="a.weight_scale has shape .* a number for each block"
        ):
            as_floats(config, StateDict(given))


@pytest.mark.parametrize(
    ("cache", "has_scales"),
    [
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, True),
        ({"kv_cache_quant_algo": "FP8"}, True),
        ({"kv_cache_scheme": "NVFP4"}, False),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, False),
    ],
)
def test_modelopt_may_quantize_only_the_cache(cache: dict[str, Any], has_scales: bool) -> None:
    """Scales of a KV cache of 4 bits are too small for one of 8 bits, and biases are left out."""
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": None, **cache}}
    given = {"a.weight": FP4, "a.k_scale": ONE}
    found = [*as_floats(config, StateDict(given)).describe()]
    assert found == (["a.weight", "a.k_scale"] if has_scales else ["a.weight"])
    biased = {**given, "a.k_bias": FP4, "a.v_bias": FP4}
    assert [*as_floats(config, StateDict(biased)).describe()] == ["a.weight"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**AMD, "global_quant_config": {"weight": {"dtype": "int3"}}}, "= 'int3': must .*; pass"),
        ({**AMD, "global_quant_config": {"weight": "fp4" * 99}}, "weight.dtype = 'fp4fp4.*: must"),
        ({**AMD, "layer_quant_config": 3}, "layer_quant_config = 3: must be an object"),
        ({**AMD, "layer_quant_config": {"*k": [1]}}, r"layer_quant_config.\*k = \[1\]: must be"),
        (
            {**AMD, "layer_type_quant_config": {"a": {"weight": [[]]}}},
            r"a.weight.dtype = \[\[\]\]: must",
        ),
        (
            {"quant_method": "torchao", "quant_type": {"a": {"_type": "Int4WeightOnlyConfig"}}},
            "quant_type = 'Int4WeightOnlyConfig': must be of 8 bits",
        ),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "must be of 8 bits.*pass"),
        (NVIDIA, "quantized_layers = None: must be an object of objects"),
        ({**NVIDIA, "quantized_layers": {"a": 1}}, "quantized_layers = .*: must be an object of"),
        (
            {**NVIDIA, "quantized_layers": {"a\n" * 500: {"quant_algo": "MXFP6"}}},
            " = 'MXFP6': must be one of .'FP8', ",
        ),
        ({**NVIDIA, "quant_algo": ["FP8"]}, r"quant_algo = \['FP8'\]: must be one of .*MIXED"),
        ({**NVIDIA, "quant_algo": "NVFP4_SVD"}, "= 'NVFP4_SVD': .*; pass the"),
        ({**NVIDIA, "quant_algo": None}, "quant_algo = None: must be one of"),
        ({"quant_method": "aqlm"}, "quant_method = 'aqlm': must be one of .*; pass the checkpoint"),
    ],
)
def test_formats_of_further_libraries_are_refused_by_name(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        as_floats({"quantization_config": fields}, StateDict({}))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def words_of(integers: Tensor, bits: int) -> Tensor:
    """Pack integers along the first dimension, the first one in the lowest bits of a word."""
    stream = (integers.long()[:, None] >> torch.arange(bits)[:, None] & 1).flatten(0, 1)
    words = F.pad(stream, (0, 0, 0, -len(stream) % 32)).unflatten(0, (-1, 32))
    return (words << torch.arange(32)[:, None]).sum(1).to(torch.int32)


@pytest.mark.parametrize("field", ["extra_config", "dynamic"])
def test_modules_of_gptq_may_have_bits_and_groups_of_their_own(field: str) -> None:
    """As AutoRound writes int4-mixed folders, and GPTQModel those with `dynamic`."""
    tensors, expected = {}, {}
    generator = torch.Generator().manual_seed(1)
    modules = {"a": (4, 32), "b": (8, 32), "c": (8, 16), "d": (2, 64), "e": (4, 64), "f": (3, 32)}
    for module, (bits, size) in modules.items():
        own = {"generator": generator}
        integers = torch.randint(0, 1 << bits, (64, 32), **own)
        zeros = torch.randint(0, 1 << bits, (64 // size, 32), **own)
        scales = torch.rand(64 // size, 32, **own).half()
        tensors |= {
            f"{module}.qweight": words_of(integers, bits),
            f"{module}.qzeros": words_of(zeros.t(), bits).t(),
            f"{module}.scales": scales,
        }
        each = torch.arange(64) // size
        expected[f"{module}.weight"] = (
            (integers - (zeros + 1 & (1 << bits) - 1)[each]) * scales.float()[each]
        ).t()
    options = {"b": {"bits": 8}, ".*c": {"bits": 8, "group_size": 16, "sym": False}}
    options |= {"d": {"bits": 2, "group_size": -1}, "e": {"group_size": -1}, "f": {"bits": 3}}
    options["g"] = {"bits": 16}
    given = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
    config = {"quantization_config": {**given, field: {**options, "-:h": {}}}}
    source = as_floats(config, StateDict(tensors))
    for name, wanted in expected.items():
        assert torch.equal(torch.cat([it for _, it in source.pieces(name, 1 << 40)]), wanted), name

    for wrong, told in (
        ({"b": 8}, "b = 8: must be an object"),
        ({"b": {"bits": 5}}, f"{field}.b.bits = 5: must be one of"),
        ({"b": {"data_type": "mx_fp"}}, f"{field}.b.data_type = 'mx_fp': must be 'int'"),
        ({str(n): {"group_size": n + 1} for n in range(32)}, "at most 16 sizes are supported"),
        ({"b": {"bits": 8}}, r"c.qzeros is int32 \[4, 8\]: it must be"),
    ):
        with pytest.raises(ConfigError, match=told):
            as_floats({"quantization_config": {**given, field: wrong}}, StateDict(tensors))
    wrong = {"a": {"group_size": 40}, "b": {"group_size": 48}}  # both make two groups of 64 columns
    with pytest.raises(ConfigError, match="a.scales has shape .* fits several"):
        as_floats({"quantization_config": {**given, field: wrong}}, StateDict(tensors))


@pytest.mark.parametrize("bits", [2, 3, 5, 6, 7])
@pytest.mark.parametrize("method", ["auto-round", "compressed-tensors"])
def test_integers_may_be_in_two_words(bits: int, method: str) -> None:
    """As AutoRound 0.16 and compressed-tensors 0.20 pack them, whose numbers were compared once."""
    generator = torch.Generator().manual_seed(bits)
    rows, columns = (96, 64) if method == "auto-round" else (90, 50)  # also words that are not full
    integers = torch.randint(0, 1 << bits, (rows, columns), generator=generator)
    groups = torch.arange(columns) // 32
    zeros = torch.randint(0, 1 << bits, (rows, 2), generator=generator)
    scales = torch.rand(rows, 2, generator=generator)
    expected = (integers - zeros[:, groups]) * scales[:, groups]
    if method == "auto-round":
        tensors = {"qweight": words_of(integers.t(), bits), "scales": scales.t()}
        tensors["qzeros"] = words_of(zeros, bits).t()
        own = {"bits": bits, "group_size": 32, "packing_format": "auto_round"}
    else:
        tensors = {"weight_packed": words_of(integers.t(), bits).t(), "weight_scale": scales}
        tensors["weight_zero_point"] = words_of(zeros, bits)
        tensors["weight_shape"] = torch.tensor([rows, columns])
        weights = {"num_bits": bits, "symmetric": False, "strategy": "group", "group_size": 32}
        own = {"config_groups": {"a": {"weights": weights}}, "format": "pack-quantized"}
    given = {f"a.{ending}": tensor.contiguous() for ending, tensor in tensors.items()}
    source = as_floats({"quantization_config": {"quant_method": method, **own}}, StateDict(given))
    assert torch.equal(torch.cat([it for _, it in source.pieces("a.weight", 1 << 30)]), expected)
    part = torch.cat([it for _, it in source.pieces("a.weight", 1, [range(3, 80), range(5, 40)])])
    assert torch.equal(part, expected[3:80, 5:40])
    [(_, codes)] = source.codes("a.weight", 1 << 20, range(5, 89))
    assert torch.equal(codes.floats(), expected[5:89])


@pytest.mark.parametrize(("dtype", "method"), [("int4", "reorder"), ("uint4", "order")])
def test_quark_has_integers_as_awq_does(dtype: str, method: str) -> None:
    """The numbers of Quark 0.13 were compared once."""
    generator = torch.Generator().manual_seed(1)
    integers, zeros = (
        torch.randint(0, 16, (96, columns), generator=generator) for columns in (64, 2)
    )
    scales, groups = torch.rand(2, 96, generator=generator), torch.arange(64) // 32

    def words(numbers: Tensor) -> Tensor:
        order = [0, 2, 4, 6, 1, 3, 5, 7] if method == "reorder" else [*range(8)]
        return words_of(numbers.unflatten(0, (-1, 8))[:, order].flatten(0, 1), 4).t().contiguous()

    given = {"weight": words(integers), "weight_zero_point": words(zeros), "weight_scale": scales}
    if dtype == "int4":
        integers, zeros = ((it + 8) % 16 - 8 for it in (integers, zeros))
    expected = (integers - zeros[:, groups]) * scales.t()[:, groups]
    weight = {"dtype": dtype, "qscheme": "per_group", "group_size": 32}
    own = {**AMD, "global_quant_config": {"weight": weight}, "export": {"pack_method": method}}

    def opened(fields: Mapping[str, Any]) -> Any:
        tensors = {f"a.{ending}": tensor for ending, tensor in given.items()}
        return as_floats({"quantization_config": {**own, **fields}}, StateDict(tensors))

    source = opened({})
    assert torch.equal(torch.cat([it for _, it in source.pieces("a.weight", 1 << 30)]), expected)
    [(_, codes)] = source.codes("a.weight", 1 << 20, range(5, 89))
    assert torch.equal(codes.floats(), expected[5:89])
    other = {"weight": {**weight, "dtype": "uint4" if dtype == "int4" else "int4"}}
    for fields, message in (
        ({"export": None}, "export.pack_method = None: must be one of .*; pass the model in"),
        ({"global_quant_config": {}}, "a.weight is int32: the config must have 'int4' or 'uint4'"),
        ({"export": {"pack_method": ["order"]}}, r"pack_method = \['order'\]: must be one of"),
        ({"layer_quant_config": {"b": other}}, r"= \['int4', 'uint4'\]: one of them must be alone"),
        (
            {"global_quant_config": {"weight": {**weight, "qscheme": "per_channel"}}},
            "weight.qscheme = 'per_channel': must be 'per_group' for 4 bits",
        ),
        (
            {"global_quant_config": {"weight": {**weight, "group_size": -1}}},
            "weight.group_size = -1: must be a positive integer",
        ),
        (
            {"global_quant_config": {"weight": {**weight, "group_size": 16}}},
            r"a.weight_scale is float32 \[2, 96\]: it must be .* \[4, 96\]",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            opened(fields)


def changed(name: str, **fields: Any) -> dict[str, Any]:
    config = copy.deepcopy(checkpoint(name)[0])
    config[field_of(name)] |= fields
    return config


GROUP = "group_0"
REFUSED = [
    ("gptq", {"quant_method": "quip"}, "quant_method = 'quip': must be one of"),
    ("gptq", {"quant_method": ["gptq"]}, r"quant_method = \['gptq'\]: must be one of"),
    ("gptq", {"bits": 5}, "bits = 5: must be one of .*; pass the model in floats, in another"),
    ("gptq", {"bits": 3}, r"qweight is int32 \[4, 64\]: it must have whole words of 3 bits"),
    ("gptq", {"bits": 10**30}, "bits = 10*: must be one of"),
    ("gptq", {"bits": True}, "bits = True: must be one of"),
    ("gptq", {"group_size": 0}, "group_size = 0: must be a positive integer"),
    ("gptq", {"group_size": 2**40}, "group_size = .*: must be a positive integer"),
    ("gptq", {"group_size": 16}, r"scales is float16 .*: it must be"),
    ("gptq", {"format": "gptq_v2"}, r"qzeros has other values than 8: .* symmetric \(sym\)"),
    ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin': must be"),
    ("gptq", {"sym": "yes"}, "sym = 'yes': must be true or false"),
    ("gptq", {"desc_act": "yes"}, "desc_act = 'yes': must be true or false"),
    ("gptq-reordered", {"sym": True}, r"has other values than 7: .* symmetric \(sym\)"),
    ("awq", {"version": "gemv"}, "version = 'gemv': must be 'gemm'"),
    ("awq", {"zero_point": False}, "zero_point = False: must be true"),
    ("fp8", {"weight_block_size": [32]}, r"weight_block_size = \[32\]: must be a list of two"),
    ("fp8", {"weight_block_size": [64, 32]}, "weight_scale_inv has shape .* a number for each"),
    ("fp8", {"fmt": "e5m2"}, "fmt = 'e5m2': must be 'e4m3'"),
    ("ct-int4", {"format": "marlin-24"}, "format = 'marlin-24': must be one of"),
    ("ct-int4", {"config_groups": []}, r"config_groups = \[\]: must be an object"),
    ("ct-int4", {"config_groups": {GROUP: {"weights": None}}}, "weights = None: must be an object"),
    ("ct-int4", {"transform_config": {"a": 1}}, "transform_config = .*: not supported"),
    (
        "ct-int4",
        {"config_groups": {GROUP: {"weights": {"type": "int", "num_bits": 9}}}},
        "config_groups.group_0.weights = .*must be int with 2 to 8 bits",
    ),
    (
        "ct-int4",
        {"config_groups": {GROUP: {"weights": {"type": "int", "num_bits": []}}}},
        "config_groups.group_0.weights = .*must be int with 2 to 8 bits",
    ),
    (
        "ct-int4",
        {"config_groups": {GROUP: {"weights": {"num_bits": 4, "strategy": "group"}}}},
        "group_size = None: must be a positive integer",
    ),
    ("awq", {"group_size": -32}, "group_size = -32: must be a positive integer"),
    ("mlx", {"group_size": -32}, r"quantization.group_size = -32: must be one of \[32, 64, 128"),
    ("mlx", {"group_size": 128}, r"weight is uint32 \[\d+, \d\]: .* whole groups of 128 columns"),
    ("mlx", {"group_size": 2**70}, "quantization.group_size = 1.*: must be one of"),
    ("mlx", {"bits": 7}, "quantization.bits = 7: must be one of"),
    ("mlx", {"bits": True}, "quantization.bits = True: must be one of"),
    ("mlx", {"bits": 8}, r"q_proj.weight is \[32, 8\] with scales \[32, 2\], .* have 4 bits"),
    ("mlx", {"mode": "mxfp4"}, "scales is bfloat16 .*: it must be uint8"),
    ("mlx", {"mode": "mxfp8"}, "quantization.bits = 4: must be one of"),
    ("mlx", {"mode": ["affine"]}, r"quantization.mode = \['affine'\]: must be one of"),
    ("mlx", {"mode": "ternary"}, "quantization.mode = 'ternary': must be one of"),
    ("mlx", {"lm_head": "4"}, "quantization.lm_head = '4': must be an object, true or false"),
    ("mlx", {"lm_head": {"bits": 0}}, "quantization.lm_head.bits = 0: must be one of"),
    ("mlx", {"lm_head": {"quantize_input": True}}, "lm_head.quantize_input = True: not supported"),
    (
        "mlx",
        {"lm_head": {"global_scale": True}},
        "lm_head.global_scale = True: must be true or false, and false unless",
    ),
    (
        "mlx",
        {"lm_head": {"mode": "nvfp4", "global_scale": 2}},
        "lm_head.global_scale = 2: must be true or false",
    ),
    ("mlx", {f"{LAYER}mlp.down_proj": False}, "down_proj = False: but tensor .* is uint32"),
]


@pytest.mark.parametrize(("name", "fields", "message"), REFUSED)
def test_a_config_that_is_not_supported_is_named(
    name: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_model((changed(name, **fields), checkpoint(name)[1]), dtype="float32")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_part_that_is_missing_or_has_another_shape_is_named(name: str) -> None:
    config, tensors = checkpoint(name)
    module = f"{LAYER}self_attn.o_proj."
    optional = ("zero_point", "g_idx", "weight_format", "global_scale")
    for part in [it for it in tensors if it.startswith(module)]:
        others = {n: it for n, it in tensors.items() if n != part}
        if not part.endswith(optional):
            with pytest.raises(ConfigError, match="is missing: a quantized|are (missing|unknown)"):
                load_model((config, others))
        if part.endswith("weight_format"):
            continue
        for broken in (torch.zeros(3, 5, 7), torch.zeros(7, 5, dtype=torch.int32)):
            with pytest.raises(
                ConfigError, match="tensors? .*(must|fit|requires|unknown|dtype|missing)"
            ):
                load_model((config, {**others, part: broken}))


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("ct-int4-asymmetric", "mlp.down_proj.weight_zero_point"),
        ("ct-int4-reordered", "mlp.gate_proj.weight_g_idx"),
        ("gptq-reordered", "mlp.gate_proj.g_idx"),
    ],
)
def test_zero_points_and_indices_that_the_config_declares_are_needed(name: str, part: str) -> None:
    config, tensors = checkpoint(name)
    del tensors[LAYER + part]
    with pytest.raises(ConfigError, match=f"{part} is missing: a quantized matrix needs it"):
        load_model((config, tensors))


@pytest.mark.parametrize("name", ["ct-int4", "gptq", "awq"])
def test_a_matrix_in_floats_and_quantized_is_refused(name: str) -> None:
    config, tensors = checkpoint(name)
    own = f"{LAYER}mlp.down_proj.weight"
    with pytest.raises(ConfigError, match=f"tensors {own} and .*down_proj.* are the same matrix"):
        load_model((config, {**tensors, own: torch.zeros(64, 32)}))


def test_zero_points_of_int8_that_the_config_declares_are_needed() -> None:
    config, tensors = checkpoint("ct-int8")
    groups = config["quantization_config"]["config_groups"]
    only = changed("ct-int8", config_groups={"group_1": groups["group_1"]})
    with pytest.raises(ConfigError, match="weight_zero_point is missing: a quantized matrix"):
        load_model((only, tensors))


def test_numbers_of_a_file_size_nothing_before_they_are_checked() -> None:
    config, tensors = checkpoint("bnb4")
    name = f"{LAYER}self_attn.o_proj.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(tensors[name].tolist()))
    for fields, message in [
        ({"shape": [2**30, 2**30]}, r"weight is uint8 .*: it must be uint8 \["),
        ({"shape": [64, -1]}, "shape = .*sizes must be integers from 1"),
        ({"shape": 5}, r"shape = 5: must be \[rows, columns\]"),
        ({"blocksize": 0}, "blocksize = 0: sizes must be integers from 1"),
        ({"blocksize": 1}, r"blocksize = 1: must be one of \[32, 64"),
        ({"blocksize": 32}, "absmax is "),
    ]:
        content = torch.tensor(list(json.dumps({**state, **fields}).encode()), dtype=torch.uint8)
        with pytest.raises(ConfigError, match=message):
            load_model((config, {**tensors, name: content}))
    with pytest.raises(ConfigError, match="is not JSON"):
        load_model((config, {**tensors, name: torch.full((9,), 7, dtype=torch.uint8)}))
    with pytest.raises(ConfigError, match="must hold at most 65536 bytes"):
        load_model((config, {**tensors, name: torch.zeros(1 << 17, dtype=torch.uint8)}))
    nested = name.replace("self_attn.o_proj", "mlp.down_proj")
    state = json.loads(bytes(tensors[nested].tolist())) | {"nested_offset": 10**400}
    content = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    with pytest.raises(
        ConfigError, match="nested_offset = 10.*: its magnitude must be less than 1.8"
    ):
        load_model((config, {**tensors, nested: content}))
    config, tensors = checkpoint("gptq-reordered")
    wild = torch.full_like(tensors[f"{LAYER}mlp.gate_proj.g_idx"], 1 << 30)
    unused = torch.full_like(wild, -1)  # only compressed-tensors has this
    for broken in (wild, wild.long() << 3, wild.long() << 33, unused):
        with pytest.raises(ConfigError, match="g_idx must have numbers of groups, 0 to 1"):
            load_model((config, {**tensors, f"{LAYER}mlp.gate_proj.g_idx": broken}))
    config, tensors = checkpoint("ct-int4")
    huge = torch.tensor([64, 1 << 50])
    with pytest.raises(ConfigError, match="does not fit a matrix of"):
        load_model((config, {**tensors, f"{LAYER}mlp.down_proj.weight_shape": huge}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bitsandbytes_may_store_bytes_as_floats(dtype: torch.dtype) -> None:
    """The numbers of bitsandbytes 0.50 with `bnb_4bit_quant_storage` were compared once."""
    config, tensors = checkpoint("bnb4")
    expected = floats("bnb4")
    packed = [name for name in tensors if name.endswith("proj.weight") and name in expected]
    packed = [name for name in packed if tensors[name].dtype is torch.uint8]
    stored = {name: tensors[name].flatten().view(dtype).view(-1, 1) for name in packed}
    source = as_floats(config, StateDict({**tensors, **stored}))
    assert len(packed) == 6
    for name in packed:
        assert torch.equal(next(source.pieces(name, 1 << 40))[1], expected[name])
        part = torch.cat([it for _, it in source.pieces(name, 1, [range(3, 30), range(5, 30)])])
        assert torch.equal(part, expected[name][3:30, 5:30])
    with pytest.raises(ConfigError, match=r"down_proj.weight is \w+ .*: it must be .*\["):
        wrong = {name: it[1:] for name, it in stored.items()}
        as_floats(config, StateDict({**tensors, **wrong}))


@pytest.mark.parametrize(
    ("name", "part", "number"),
    [
        ("ct-int8", "mlp.down_proj.weight_scale", 1e30),
        ("ct-fp4", "self_attn.o_proj.weight_global_scale", 0.0),
        ("fp8", "mlp.down_proj.weight_scale_inv", float("nan")),
        ("ct-int4", "mlp.down_proj.weight_scale", float("nan")),
        ("gptq", "mlp.down_proj.scales", float("inf")),
        ("awq", "mlp.down_proj.scales", float("inf")),
        ("bnb8", "mlp.down_proj.SCB", -1e30),
        ("bnb4", "self_attn.o_proj.weight.absmax", float("nan")),
        ("bnb4", "self_attn.o_proj.weight.quant_map", float("nan")),
        ("mlx", "mlp.down_proj.scales", float("nan")),
        ("mlx", "self_attn.o_proj.biases", float("inf")),
        ("mlx-mixed", "mlp.down_proj.biases", float("nan")),
        ("mlx-floats", "self_attn.q_proj.scales", 255),  # 2^128
        ("mlx-floats", "self_attn.k_proj.scales", 127),  # NaN
    ],
)
@pytest.mark.parametrize("kind", [None, "file"])
def test_a_scale_that_is_not_a_number_is_named(
    name: str, part: str, number: float, kind: Any
) -> None:
    config, tensors = checkpoint(name)
    broken = tensors[LAYER + part].clone()
    broken.view(-1)[0] = number
    with pytest.raises(ConfigError, match=f"{part} leads to a scale or zero that is NaN, or has"):
        load_model((config, {**tensors, LAYER + part: broken}), weights_dtype=kind, dtype="float32")


def test_zero_points_that_are_not_a_matrix_are_named() -> None:
    config, tensors = checkpoint("ct-int4-asymmetric")
    name = f"{LAYER}mlp.down_proj.weight_zero_point"
    for broken in (tensors[name].flatten(), torch.zeros((), dtype=torch.int32)):
        with pytest.raises(ConfigError, match="weight_zero_point has shape .* a number for each"):
            load_model((config, {**tensors, name: broken}))


def test_a_quantized_folder_is_converted(tmp_path: Path) -> None:
    source = saved(tmp_path / "a", *checkpoint("gptq"))
    floats_of, int4 = tmp_path / "floats", tmp_path / "int4"

    convert_checkpoint(source, floats_of, dtype="float32")
    assert not is_quantized(floats_of)
    written = load_file(floats_of / "model.safetensors")
    assert torch.equal(
        written[f"{LAYER}mlp.down_proj.weight"], floats("gptq")[f"{LAYER}mlp.down_proj.weight"]
    )
    convert_checkpoint(source, int4, weights_dtype="int4")
    pieces = open_tensors(int4).pieces(f"{LAYER}mlp.down_proj.weight", 1 << 40)
    assert torch.equal(next(pieces)[1], floats("gptq")[f"{LAYER}mlp.down_proj.weight"])


def saved(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(dict(tensors), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
