from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from adapter_cases import LAYER, new_case
from devices import there_is
from kernel_values import close, randn

from gptmanager.cuda.device.launch import EmulatorLauncher
from gptmanager.cuda.device.streams import DeviceStream
from gptmanager.cuda.gemm import matmul_choice as product_choice
from gptmanager.cuda.gemm.matmul_choice import MatmulChoice
from gptmanager.cuda.gemm.own_matmuls import OwnMatmuls
from gptmanager.cuda.kernels import CudaKernels
from gptmanager.kernels.lora.adapter_arguments import AdapterModule


class CountingLauncher(EmulatorLauncher):
    def __init__(self, **options):
        super().__init__(**options)
        self.names = []

    def kernel(self, program, name, shared_mem=0):
        self.names.append(name.partition("<")[0])
        return super().kernel(program, name, shared_mem)


@pytest.fixture
def launcher(toolchain):
    return CountingLauncher(has_matmuls=True)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(product_choice, "_known", {})


def weights(count, width, depth):
    return [randn(width, depth, dtype=torch.bfloat16, seed=i) for i in range(count)]


@pytest.fixture
def own(launcher):
    return OwnMatmuls(launcher)


def test_up_to_16_rows_are_ours_unless_measured():
    choice, (weight,) = MatmulChoice(), weights(1, 8, 8)
    assert [choice.is_ours(rows, weight) for rows in (1, 16, 17, 256, 257)] == [
        *(True, True, False, False, False),
    ]


def test_the_faster_one_is_chosen_and_the_log_tells(own, caplog):
    """By turns ours and torch's, at 1, 2, 4, 8, 16, ... 256 rows; a percent is noise."""
    caplog.set_level("INFO", "gptmanager")
    by_torch = iter([8, 3, 3.96, 2, 5, 5, 3, 3.9, 3])
    runs, times = [], iter([1e-6 * it for other in by_torch for it in (4, other)])

    def seconds(run):
        runs.append(run())
        return 8 * next(times)

    choice, measured = MatmulChoice(), weights(8, 8, 16)
    choice.measure(own, measured, "card", seconds)

    numbers = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257)
    ours = [choice.is_ours(rows, measured[0]) for rows in numbers]
    few = [True, False, True, True, False, False, True, True]
    assert ours == [*few, True, True, False, False, True, True, False, False, False]
    assert choice.is_ours(2, measured[0].float()) and choice.is_ours(2, measured[0].T)
    assert [len(it) for it in runs[::2]] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    for one, other in zip(runs[::2], runs[1::2], strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
    assert caplog.messages == [
        "matmuls with 8 x 16 bfloat16 at 1, 2, 4, 8, 16, 32, 64, 128, 256 rows: 4.0, 4.0, 4.0, "
        "4.0, 4.0, 4.0, 4.0, 4.0, 4.0 us by our kernels, 8.0, 3.0, 4.0, 2.0, 5.0, 5.0, 3.0, 3.9, "
        "3.0 us by torch"
    ]

    again = MatmulChoice()
    again.measure(own, measured, "card", seconds)  # nothing is timed: there are no times left
    assert [again.is_ours(rows, measured[0]) for rows in numbers] == ours


def test_many_rows_of_float32_are_torchs(own, caplog):
    caplog.set_level("INFO", "gptmanager")
    choice, (weight,) = MatmulChoice(), weights(1, 8, 16)
    choice.measure(own, [weight.float()], "card", lambda run: 1e-6)
    assert "at 1, 2, 4, 8, 16 rows: 1.0," in caplog.text
    assert [choice.is_ours(rows, weight.float()) for rows in (16, 17)] == [True, False]


def test_what_the_kernel_does_not_take_is_not_timed(own):
    MatmulChoice().measure(own, weights(1, 8, 12), "card", None)


def test_no_memory_to_measure(own, caplog):
    def seconds(run):
        raise torch.OutOfMemoryError("none")

    choice, (weight,) = MatmulChoice(), weights(1, 8, 16)
    choice.measure(own, [weight], "card", seconds)
    assert choice.is_ours(16, weight) and not choice.is_ours(17, weight)
    assert "not enough memory to time matmuls" in caplog.text


def test_ops_of_few_rows_are_kernels(launcher):
    kernels, (weight, up) = CudaKernels(launcher), (randn(40, 72), randn(48, 72, seed=1))
    bias = randn(40, seed=2)
    for rows, names in ((16, ["gemv"]), (17, [])):
        launcher.names.clear()
        x = randn(rows, 72, seed=3)
        close(kernels.linear(x, weight, bias), F.linear(x.double(), weight.double(), bias.double()))
        assert launcher.names == names
        gate, own = F.linear(x.double(), up.double()).chunk(2, dim=1)
        close(kernels.linear_silu_mul(x, up), F.silu(gate) * own, absolute=1e-3)
        assert launcher.names == [*names, *(names or ["activate_gated"])]
    odd = randn(40, 70)
    close(kernels.linear(randn(1, 70), odd), F.linear(randn(1, 70).double(), odd.double()))
    assert launcher.names[-1] == "activate_gated", "rows of 280 bytes"


def test_ops_of_more_rows_are_kernels_where_they_are_faster(launcher):
    kernels, weight = CudaKernels(launcher), randn(40, 72, dtype=torch.bfloat16)
    kernels.measure_matmuls([weight], "card", lambda run: 1e-6)
    launcher.names.clear()
    bias = randn(40, dtype=torch.bfloat16, seed=2)
    for rows, name in ((16, "gemv"), (17, "gemm"), (256, "gemm")):
        x = randn(rows, 72, dtype=torch.bfloat16, seed=3)
        product = F.linear(x.double(), weight.double(), bias.double())
        close(kernels.linear(x, weight, bias), product)
        gate, up = product.chunk(2, dim=1)
        close(kernels.linear_silu_mul(x, weight, bias), F.silu(gate) * up)
        assert launcher.names[-2:] == [name, name]
    kernels.linear(randn(257, 72, dtype=torch.bfloat16), weight, bias)
    assert len(launcher.names) == 6, "more are torch's"


def test_the_emulator_leaves_products_to_torch(toolchain):
    launcher = CountingLauncher()
    kernels = CudaKernels(launcher)
    kernels.linear(randn(1, 8), randn(8, 8))
    assert not launcher.names


@pytest.mark.parametrize(
    ("op", "names"), [("linear", ["gemv"]), ("linear_silu_mul", ["gemv", "activate_gated"])]
)
def test_a_deterministic_row_is_the_same_beside_any_others(launcher, op, names):
    compute = getattr(CudaKernels(launcher, deterministic=True), op)
    x, weight = randn(35, 72, dtype=torch.bfloat16), randn(48, 72, dtype=torch.bfloat16)
    whole = compute(x, weight)
    assert launcher.names == names, "no other way, however many rows"
    for first, last in ((0, 1), (20, 36), (34, 35)):
        assert torch.equal(compute(x[first:last], weight), whole[first:last])


def test_a_deterministic_row_without_an_adapter_has_the_bits_of_a_step_without_any(launcher):
    kernels, dtype = CudaKernels(launcher, deterministic=True), torch.bfloat16
    layout = (AdapterModule(0, 0, 24, 72), AdapterModule(1, 24, 24, 72))
    adapters = new_case(layout, [(4, 4)], dtype).with_rows([-1, 0, -1])
    x, weight = randn(3, 72, dtype=dtype), randn(48, 72, dtype=dtype, seed=5)
    alone = kernels.linear_silu_mul(x, weight)
    among = kernels.linear_silu_mul_adapted(x, weight, None, adapters, LAYER, "qkv")
    assert torch.equal(alone[::2], among[::2]) and not torch.equal(alone[1], among[1])


@pytest.mark.gpu
def test_on_a_device():
    """Recordings of the stream are possible after measurements, too."""
    there_is("cuda")
    stream, choice = DeviceStream("cuda"), MatmulChoice()
    own = [weight.cuda() for weight in weights(2, 4096, 4096)]
    with stream, torch.inference_mode():
        choice.measure(OwnMatmuls(stream.launcher), own, "card", stream.seconds)
        replay, result = stream.capture(lambda: own[0] + 1)
        replay()
        stream.synchronize()
        assert torch.equal(result, own[0] + 1)
    assert len(product_choice._known) == 1
