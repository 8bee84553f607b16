"""Weights in 8 and 4 bits on a device, here the emulator: loading, matmuls of a model, texts."""

from __future__ import annotations

from types import SimpleNamespace

import devices
import pytest
import torch
from checkpoints import random_state
from devices import LLAMA, finals, prompt
from kernel_values import exact, randn, rounded
from separate_device import DEVICE, SeparateDevice

from gptmanager import InferenceRequest
from gptmanager.cuda.device.launch import EmulatorLauncher
from gptmanager.cuda.gemm import scaled_matmul
from gptmanager.cuda.gemm.byte_rows import Fp8Rows, Int8Rows
from gptmanager.cuda.kernels import CudaKernels
from gptmanager.errors import ConfigError
from gptmanager.kernels.gemm.int4_matrix import Int4Matrix
from gptmanager.kernels.gemm.packed_matrix import PackedMatrix
from gptmanager.kernels.gemm.weight_quantization import round_to_groups, round_to_int8
from gptmanager.memory import Place, Weights
from gptmanager.memory.checkpoint.tensor_sources import StateDict
from gptmanager.models.checkpoint_parts import as_floats
from gptmanager.models.conversion import convert_checkpoint
from gptmanager.models.model import load_model

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def state():
    return random_state(LLAMA)


@pytest.fixture
def load(toolchain, state):
    kernels = CudaKernels(EmulatorLauncher(has_matmuls=True))

    def load(tensors=state, config=LLAMA, **options):
        given = {"kernels": kernels, "weights_dtype": "int8", "dtype": "bfloat16", **options}
        return load_model((config, tensors), **given)

    load.kernels = kernels
    return load


def twice_rounded(state, kind):
    """What a model with quantized matrices computes with, as floats."""
    found = dict(state)
    for name, tensor in state.items():
        if tensor.dim() == 2 and name != EMBEDDING:
            if kind == "fp8":
                found[name] = rounded(tensor, Fp8Rows).unpacked()
            elif kind == "int8" or name == "lm_head.weight":
                ints, scales = round_to_int8(tensor)
                found[name] = ints * scales.unsqueeze(1)
            else:
                found[name] = round_to_groups(tensor).floats()
    return found


@pytest.mark.parametrize("kind", [Int8Rows, Fp8Rows])
def test_panels_of_a_converted_file_are_copied_to_rows_and_not_adopted(kind):
    """Their order is that of the CPU's kernels."""
    panels = PackedMatrix(32, 64, torch.float32, quantized=True).panels
    weight = rounded(randn(32, 64), kind)
    before = exact(weight)
    assert not weight.adopt(panels) and torch.equal(exact(weight), before)


@pytest.mark.parametrize("kind", [Int8Rows, Fp8Rows])
def test_codes_of_a_file_become_rows_of_their_floats(kind):
    """Through floats: the pieces in which a file is read are as small as those of a float file."""
    codes, scales = torch.arange(-120, 120, dtype=torch.int8).view(5, 48), torch.rand(5, 1) + 0.1
    channels = {"weights": {"type": "int", "num_bits": 8, "strategy": "channel"}}
    scheme = {"quant_method": "compressed-tensors", "config_groups": {"all": channels}}
    source = as_floats(
        {"quantization_config": scheme}, StateDict({"a.weight": codes, "a.weight_scale": scales})
    )
    weights = Weights(
        {"a": (5, 48)},
        lambda _: {"a.weight": Place("a")},
        matrices=["a"],
        new_matrix=lambda rows, columns, dtype, *_: kind(rows, columns, dtype),
        quantized={"a": "int8"},
    )
    weights.load(source)
    assert source.describe()["a.weight"].codes == "rows"
    assert torch.equal(weights["a"].unpacked(), rounded(codes * scales, kind).unpacked())


@pytest.mark.parametrize("kind", [Int8Rows, Fp8Rows])
def test_parts_of_rows_share_their_memory(kind):
    """The experts of a stacked matrix, of 32 rows each."""
    weight, values = (
        rounded(randn(96, 64, dtype=torch.bfloat16), kind),
        randn(32, 64, seed=7).bfloat16(),
    )
    for number, part in enumerate(weight.parts(3)):
        rows = slice(32 * number, 32 * number + 32)
        assert type(part) is kind and part.shape == (32, 64) and part.depth == 64 and not part.plans
        assert part.dtype is torch.bfloat16 and torch.equal(part.unpacked(), weight.unpacked(rows))
    weight.parts(3)[1].copy_(values)
    assert torch.equal(weight.unpacked(slice(32, 64)), rounded(values, kind).unpacked())


def test_matrices_are_int8_rows_and_a_load_changes_them_in_place(load, state):
    model = load()
    matrices = model.weights.matrices
    assert matrices and all(isinstance(it, Int8Rows) for it in matrices)
    before = [it.values.data_ptr() for it in matrices]
    down, own = "model.layers.0.mlp.down_proj.weight", model.weights["layers.0.down.weight"]
    step = state[down].abs().amax(dim=1, keepdim=True) / 127
    assert ((exact(own) - state[down].double()).abs() <= 0.51 * step).all()
    assert own.holds(state[down]) and not own.holds(-state[down])
    model.weights.load({name: -tensor for name, tensor in state.items()})
    assert [it.values.data_ptr() for it in matrices] == before
    assert own.holds(-state[down])
    assert own.nbytes == own.values.numel() + 4 * len(own)


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("num_rows", [3, 20, 300], ids=["gemv", "gemm", "torch"])
@pytest.mark.every(3)
def test_matmuls_of_any_number_of_rows(load, num_rows, kind):
    model = load(weights_dtype=kind)
    kernels, weight = load.kernels, model.weights["layers.0.down.weight"]
    x = randn(num_rows, weight.shape[1], dtype=torch.bfloat16)
    torch.testing.assert_close(
        kernels.linear(x, weight).double(), x.double() @ exact(weight).T, rtol=2e-2, atol=2e-2
    )
    gate = model.weights["layers.0.up.weight"]
    x = randn(num_rows, gate.shape[1], dtype=torch.bfloat16)
    one, other = (x.double() @ exact(gate).T).chunk(2, dim=1)
    expected = one * one.sigmoid() * other
    torch.testing.assert_close(
        kernels.linear_silu_mul(x, gate).double(), expected, rtol=3e-2, atol=3e-2
    )


@pytest.mark.parametrize("kind", [Int8Rows, Fp8Rows, Int4Matrix])
def test_rows_of_a_quantized_table(toolchain, kind):
    kernels, table = CudaKernels(EmulatorLauncher()), kind(35, 70, torch.bfloat16)
    table.copy_(randn(35, 70))
    found = kernels.embedding(torch.tensor([34, 0, 17, 34]), table)
    assert torch.equal(found, table.unpacked()[[34, 0, 17, 34]])
    assert found.dtype is torch.bfloat16


@pytest.mark.parametrize("kind", [Int8Rows, Fp8Rows, Int4Matrix])
def test_rows_are_written_on_a_device_that_shares_nothing_with_the_host(kind):
    values, expected = randn(70, 64), kind(70, 64, torch.float32)
    expected.copy_(values)
    with SeparateDevice():
        matrix = kind(70, 64, torch.float32, DEVICE)
        for first in (0, 35):  # within a panel
            matrix.copy_(values[first : first + 35], first)
        assert matrix.values.device == matrix.scales.device == DEVICE
        assert torch.equal(matrix.unpacked().cpu(), expected.unpacked())


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
@pytest.mark.every(3)
def test_a_manager_answers_as_with_the_rounded_floats(toolchain, state, monkeypatch, kind):
    requests = [
        InferenceRequest.from_tokens(number, prompt(number, 5 + 9 * number), 8)
        for number in range(1, 4)
    ]
    found = finals(requests, "emulator", weights_dtype=kind, dtype="float32")
    monkeypatch.setattr(devices, "checkpoint", lambda _: twice_rounded(state, kind))
    expected = finals(requests, "emulator", dtype="float32")
    for one, other in zip(found, expected, strict=True):
        assert not one.error and not other.error, (one.error, other.error)
        assert torch.equal(one.tensors["output_ids"], other.tensors["output_ids"])


def test_8_bit_floats_of_a_row(load, state):
    """The largest magnitude is exact, and others lose at most the bits after the third."""
    model = load(weights_dtype="fp8")
    matrices = model.weights.matrices
    assert matrices and all(isinstance(it, Fp8Rows) for it in matrices)
    down, own = state["model.layers.0.mlp.down_proj.weight"], model.weights["layers.0.down.weight"]
    smallest = down.abs().amax(dim=1, keepdim=True) / 448 / 2**10
    assert ((exact(own) - down.double()).abs() <= (down.abs() / 16 + smallest) * 1.0001).all()
    assert own.holds(down) and not own.holds(-down)
    zeros = Fp8Rows(2, 4, torch.float32)
    zeros.copy_(torch.tensor([[0.0, 0, 0, 0], [-3, 1, 0, 3]]))
    assert not zeros.unpacked()[0].any() and zeros.unpacked()[1, ::3].tolist() == [-3, 3]


def test_8_bit_floats_need_a_device_that_has_them(load, tmp_path):
    with pytest.raises(ConfigError, match="8.9 or later; 'int8' is for CPUs and for older devices"):
        load(kernels=None, weights_dtype="fp8")

    class Older(EmulatorLauncher):
        has_fp8 = False

    with pytest.raises(ConfigError, match="'fp8' is refused with kernels = CudaKernels: 8-bit"):
        load(kernels=CudaKernels(Older()), weights_dtype="fp8")
    with pytest.raises(ConfigError, match="it must be 'int8' or 'int4'"):
        convert_checkpoint("examples/tiny_llama", tmp_path / "made", weights_dtype="fp8")


def test_torchs_matmul_of_8_bit_floats():
    """Its activations lose bits, too."""
    weight = rounded(randn(48, 64, dtype=torch.bfloat16), Fp8Rows)
    x, bias = randn(5, 64, seed=1, dtype=torch.bfloat16), randn(48, seed=2, dtype=torch.bfloat16)
    assert not scaled_matmul.covers(x, weight)  # on a CPU
    found = scaled_matmul.multiply(x, weight, bias)
    expected = x.double() @ exact(weight).T + bias.double()
    assert found.dtype is torch.bfloat16
    assert (found.double() - expected).std() < 0.04 * expected.std()


@pytest.mark.parametrize(
    ("rows", "columns", "is_covered"), [(48, 64, True), (8, 64, False), (48, 72, False)]
)
def test_what_torch_multiplies_in_8_bit_floats(rows, columns, is_covered):
    weight = Fp8Rows(rows, columns, torch.bfloat16)
    x = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    assert scaled_matmul.covers(x, weight) == is_covered
    assert not scaled_matmul.covers(SimpleNamespace(is_cuda=True, dtype=torch.float16), weight)
    assert not scaled_matmul.covers(x, Int8Rows(rows, columns, torch.bfloat16))


def test_4_bits_of_experts_are_refused_by_name(load):
    spec = {"model_type": "mixtral", **{k: v for k, v in LLAMA.items() if k != "model_type"}}
    for kind in ("int4", "file"):
        with pytest.raises(ConfigError, match=f"'{kind}' is refused with kernels = CudaKernels: "):
            load(config={**spec, "num_local_experts": 4}, weights_dtype=kind)


@pytest.mark.parametrize(("count", "per_token"), [(1025, 2), (40, 33)])
def test_more_experts_than_kernels_choose_from_are_refused(load, count, per_token):
    spec = {"model_type": "mixtral", **{k: v for k, v in LLAMA.items() if k != "model_type"}}
    spec |= {"num_local_experts": count, "num_experts_per_tok": per_token}
    message = f"{per_token} of {count} experts for a token: CUDA kernels support at most 32 of 1024"
    with pytest.raises(ConfigError, match=message):
        load(config=spec, weights_dtype=None)
