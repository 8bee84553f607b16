from __future__ import annotations

import functools
import itertools
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from adapter_cases import LAYER, new_case
from checkpoints import random_state
from devices import LLAMA, there_is
from kernel_values import close, exact, randn, rounded
from rank_links import at_once, linked

from gptmanager import OptionalParams
from gptmanager.assembly import device_backend
from gptmanager.assembly.ranks import Ranks
from gptmanager.cuda.device.launch import EmulatorLauncher
from gptmanager.cuda.device.streams import DeviceStream, EmulatedStream
from gptmanager.cuda.features import Features
from gptmanager.cuda.gemm import gemm, matmul_choice, scaled_matmul
from gptmanager.cuda.gemm.byte_rows import Fp8Rows, Int8Rows
from gptmanager.cuda.gemm.device_matrices import values_of
from gptmanager.cuda.gemm.matmul_choice import OWN, SCALED, TORCH, MatmulChoice
from gptmanager.cuda.gemm.own_matmuls import OwnMatmuls
from gptmanager.cuda.kernels import CudaKernels
from gptmanager.kernels.gemm.int4_matrix import Int4Matrix
from gptmanager.kernels.gemm.packed_matrix import stored
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
    monkeypatch.setattr(matmul_choice, "_known", {})


def weights(count, width, depth):
    return [randn(width, depth, dtype=torch.bfloat16, seed=i) for i in range(count)]


@pytest.fixture
def own(launcher):
    return OwnMatmuls(launcher)


def test_what_is_ours_unless_measured():
    choice, (weight,) = MatmulChoice(), weights(1, 8, 16)
    quantized = (rounded(weight, kind) for kind in (Int8Rows, Int4Matrix, Fp8Rows))
    found = [[choice.engine(n, it) for n in (16, 17, 256, 257)] for it in (weight, *quantized)]
    assert found == [
        [OWN, TORCH, TORCH, TORCH],
        [OWN, OWN, OWN, TORCH],
        [OWN, OWN, OWN, TORCH],
        [OWN, OWN, OWN, SCALED],
    ]


def test_the_faster_one_is_chosen_and_the_log_tells(own, caplog):
    """Ours and torch's, at 1, 2, 4, 8, 16, ... 256 rows; a percent is noise."""
    caplog.set_level("INFO", "gptmanager")
    by_torch = iter([8, 3, 3.96, 2, 5, 5, 3, 3.9, 3])
    runs, times = [], iter([1e-6 * it for other in by_torch for it in (4, other)])

    def timer(run):
        runs.append(run())
        taken = 8 * next(times)
        return lambda: taken

    choice, measured = MatmulChoice(), weights(8, 8, 16)
    choice.measure(own, measured, "card", timer)

    numbers = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257)
    ours = [choice.engine(rows, measured[0]) == OWN for rows in numbers]
    few = [True, False, True, True, False, False, True, True]
    assert ours == [*few, True, True, False, False, True, True, False, False, False]
    for other in (measured[0].float(), measured[0].T):
        assert choice.engine(2, other) == OWN
    assert [len(it) for it in runs[::2]] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    for one, other in zip(runs[::2], runs[1::2], strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
    assert caplog.messages == [
        "matmuls with 8 x 16 bfloat16, us by the number of rows: "
        "1: own 4.0, torch 8.0; 2: own 4.0, torch 3.0; 4: own 4.0, torch 4.0; "
        "8: own 4.0, torch 2.0; 16: own 4.0, torch 5.0; 32: own 4.0, torch 5.0; "
        "64: own 4.0, torch 3.0; 128: own 4.0, torch 3.9; 256: own 4.0, torch 3.0"
    ]

    again = MatmulChoice()
    again.measure(own, measured, "card", None)  # nothing is timed
    assert [again.engine(rows, measured[0]) == OWN for rows in numbers] == ours


def test_each_set_of_switches_is_timed_once():
    timed, counts = [], []

    def timer(run):
        timed.append(run)
        return lambda: 1.0

    for features in (Features(), Features(), Features(tiled=False)):
        own = OwnMatmuls(EmulatorLauncher(has_matmuls=True, features=features))
        MatmulChoice().measure(own, weights(1, 8, 16), "card", timer)
        counts.append(len(timed))
    assert counts[0] == counts[1] < counts[2]


def test_engines_alternate_after_warm_ups(own):
    """Torch is fast only at first, and ours is slow at first."""
    called, made = [], []

    def timer(run):
        name = ("own", "torch")[len(made) % 2]
        made.append(name)
        first = {"own": [9.0, 9.0], "torch": [0.1, 0.1]}[name]
        times = itertools.chain(first, itertools.repeat({"own": 2.0, "torch": 3.0}[name]))

        def seconds():
            called.append(name)
            return next(times)

        return seconds

    choice, (weight,) = MatmulChoice(), weights(1, 8, 16)
    choice.measure(own, [weight], "card", timer)
    assert len(made) == 18 and len(called) >= 18 * 5
    assert called == ["own", "torch"] * (len(called) // 2)
    assert choice.engine(1, weight) == choice.engine(256, weight) == OWN


def test_a_slow_repetition_does_not_decide(own):
    """As where another process uses the GPU for a moment."""
    made = []

    def timer(run):
        made.append(run)
        times = itertools.chain([2.0] * 4, [50.0], itertools.repeat(2.0))
        return functools.partial(next, times) if len(made) % 2 else lambda: 3.0

    choice, (weight,) = MatmulChoice(), weights(1, 8, 16)
    choice.measure(own, [weight], "card", timer)
    assert choice.engine(32, weight) == OWN


@pytest.fixture
def multiplied(own, monkeypatch):
    """The weights of each of our runs, as the addresses of their values."""
    found = []

    def multiply(out, x, weight, bias):
        values = weight if isinstance(weight, torch.Tensor) else weight.values
        found[-1].append((values.data_ptr(), exact(weight)))

    def timer(run):
        found.append([])
        run()
        return lambda: 1.0

    monkeypatch.setattr(own, "multiply", multiply)
    return found, timer


@pytest.mark.parametrize("kind", [None, Int8Rows, Fp8Rows, Int4Matrix])
def test_a_run_reads_more_weights_than_a_cache_holds(own, multiplied, monkeypatch, kind):
    """If there are too few of a size, it reads copies of them."""
    found, timer = multiplied
    small, large = weights(2, 32, 64), weights(1, 128, 256)
    if kind is not None:
        small, large = ([rounded(it, kind) for it in group] for group in (small, large))
    size = sum(it.nbytes for it in stored(small[0]))
    monkeypatch.setattr(matmul_choice, "_BEYOND_CACHES", 5 * size - 1)
    MatmulChoice().measure(own, [*small, *large], "card", timer)
    runs = [run for run in found if run]  # those of torch are empty
    assert {len(run) for run in runs} == {5, 1}
    for run in runs:
        addresses = [address for address, _ in run]
        assert len({*addresses}) == len(addresses)
        for number, (_, values) in enumerate(run):
            expected = large[0] if len(run) == 1 else small[number % 2]
            assert torch.equal(values, exact(expected))
    for it in small:
        assert sum(address == values_of(it).data_ptr() for address, _ in runs[0]) == 1


def test_a_model_that_fits_into_a_cache_is_timed_as_it_is(own, multiplied, monkeypatch):
    found, timer = multiplied
    MatmulChoice().measure(own, weights(3, 32, 64), "card", timer)
    assert {len(run) for run in found if run} == {3}
    monkeypatch.setattr(matmul_choice, "_MOST_WEIGHTS", 2)
    found.clear()
    MatmulChoice().measure(own, weights(3, 32, 64), "other card", timer)
    assert {len(run) for run in found if run} == {2}


def test_many_rows_of_float32_are_torchs(own, caplog):
    caplog.set_level("INFO", "gptmanager")
    choice, (weight,) = MatmulChoice(), weights(1, 8, 16)
    choice.measure(own, [weight.float()], "card", lambda run: lambda: 1e-6)
    assert re.findall(r"(\d+): own", caplog.text) == ["1", "2", "4", "8", "16"]
    assert [choice.engine(rows, weight.float()) for rows in (16, 17)] == [OWN, TORCH]


def test_what_only_torch_supports_is_not_timed(own, caplog):
    caplog.set_level("INFO", "gptmanager")
    MatmulChoice().measure(own, weights(1, 8, 12), "card", None)
    assert not caplog.messages


@pytest.mark.parametrize(("by_torch", "engine"), [(0.97, OWN), (0.969, TORCH)])
def test_a_difference_of_three_percent_is_noise(own, by_torch, engine):
    choice, (weight,) = MatmulChoice(), weights(1, 8, 16)
    choice.measure(own, [weight], "card", at(1.0, by_torch))
    assert choice.engine(32, weight) == engine


def test_no_memory_to_measure(own, caplog):
    def timer(run):
        raise torch.OutOfMemoryError("none")

    choice, (weight,) = MatmulChoice(), weights(1, 8, 16)
    choice.measure(own, [weight], "card", timer)
    assert [choice.engine(rows, weight) for rows in (16, 17)] == [OWN, TORCH]
    assert "not enough memory to time matmuls with 8 x 16" in caplog.text


def at(*seconds):
    """Return a timer for which the engines take these times, in turn, for any number of rows."""
    times = itertools.cycle(seconds)
    return lambda run: functools.partial(float, next(times))


def without_memory(run):
    raise torch.OutOfMemoryError("none")


def test_all_ranks_use_the_engines_of_the_first_rank_that_has_timed_a_weight(own):
    """Times differ from rank to rank, and so does a share: a rank may have weights of its own."""
    both, small, large = weights(3, 8, 16)[0], weights(1, 16, 16)[0], weights(1, 24, 16)[0]
    of_rank = [
        ([both, small], at(1, 2), [OWN, OWN]),
        ([both, large], at(2, 1), [OWN, TORCH]),
        ([small], without_memory, [OWN]),
    ]

    def measure(links, given):
        measured, timer, _ = given
        choice = MatmulChoice()
        ranks = Ranks(links, None, 3, links.rank)
        choice.measure(own, measured, f"card {links.rank}", timer, ranks.share_matmuls)
        return [choice.engine(32, weight) for weight in measured]

    with linked(3) as links:
        found = at_once(lambda pair: measure(*pair), list(zip(links, of_rank, strict=True)))
    assert found == [expected for *_, expected in of_rank]


@pytest.mark.parametrize(
    "options", [{"has_matmuls": False}, {"has_matmuls": True, "deterministic": True}], ids=str
)
def test_a_rank_that_times_nothing_takes_part(toolchain, options):
    """Another rank, whose kernels are not switched off, would wait for it."""
    shared, (weight,) = [], weights(1, 8, 16)
    has_matmuls, deterministic = options["has_matmuls"], options.get("deterministic", False)
    kernels = CudaKernels(CountingLauncher(has_matmuls=has_matmuls), deterministic)
    kernels.measure_matmuls([weight], "card", None, lambda table: shared.append(table) or table)
    assert shared == [{}]


class TimedStream(EmulatedStream):
    """A stream of a GPU, as far as loading knows: torch's matmuls are faster."""

    seconds = None

    def __init__(self):
        super().__init__(CountingLauncher(has_matmuls=True))
        self.timer = at(2, 1)


def test_ranks_share_what_they_have_timed_when_they_load(toolchain, monkeypatch):
    monkeypatch.setattr(device_backend, "DeviceStream", TimedStream)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "card")
    shared = []

    def share(table):
        shared.append(table)
        return {name: [(rows, OWN) for rows, _ in engines] for name, engines in table.items()}

    params = OptionalParams(device="emulator")
    backend = device_backend.DeviceBackend(TimedStream(), params)
    ranks = SimpleNamespace(collectives=None, share_matmuls=share)
    model = backend.load((LLAMA, random_state(LLAMA)), params, ranks)
    (table,) = shared
    assert {engine for engines in table.values() for _, engine in engines} == {TORCH}
    for weight in model.weights.matrices:
        assert backend.kernels._choice.engine(1, weight) == OWN


@pytest.fixture
def scaled(monkeypatch):
    """Torch's matmul of 8-bit floats on a CPU; the numbers of rows that it multiplied."""
    found = []

    def multiply(x, weight, bias=None):
        found.append(len(x))
        return F.linear(x, weight.unpacked(), bias)

    monkeypatch.setattr(scaled_matmul, "covers", lambda x, weight: isinstance(weight, Fp8Rows))
    monkeypatch.setattr(scaled_matmul, "multiply", multiply)
    return found


def test_each_number_of_rows_of_8_bit_floats_has_its_fastest_engine(launcher, scaled, caplog):
    """Ours, torch's matmul of 8-bit floats, and that of the dequantized weight."""
    caplog.set_level("INFO", "gptmanager")
    fastest = {1: 0, 2: 1, 4: 2, 8: 0, 16: 0, 32: 1, 64: 0, 128: 0, 256: 2, 1024: 0, 4096: 1}
    times = iter(
        [1.0 if engine == best else 2.0 for best in fastest.values() for engine in range(3)]
    )

    def timer(run):
        taken = next(times)
        return lambda: taken

    kernels, weight = CudaKernels(launcher), rounded(randn(40, 64, dtype=torch.bfloat16), Fp8Rows)
    kernels.measure_matmuls([weight], "card", timer)
    assert [int(it) for it in re.findall(r"(\d+): own", caplog.text)] == [*fastest]
    expected = {1: "gemv", 2: "scaled", 3: "torch", 32: "scaled", 64: "gemm", 200: "torch",
                300: "gemm", 1024: "gemm", 1025: "scaled", 5000: "scaled"}  # fmt: skip
    for rows, engine in expected.items():
        x = randn(rows, 64, dtype=torch.bfloat16, seed=3)
        launcher.names.clear()
        scaled.clear()
        product = x.double() @ exact(weight).T
        torch.testing.assert_close(kernels.linear(x, weight).double(), product, rtol=2e-2, atol=0.1)
        used = {*launcher.names} or ({"scaled"} if scaled else {"torch"})
        assert used == {engine} and len(scaled) == (engine == "scaled"), rows


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", [Int8Rows, Fp8Rows])
def test_many_rows_of_a_weight_in_8_bits_are_divided(own, launcher, kind):
    plain, bias = randn(48, 64, dtype=torch.bfloat16), randn(48, dtype=torch.bfloat16, seed=2)
    weight, x = rounded(plain, kind), randn(300, 64, dtype=torch.bfloat16, seed=3)
    assert own.covers(x, weight) and not own.covers(x, plain)
    out, gated = x.new_empty(300, 48), x.new_empty(300, 24)
    own.multiply(out, x, weight, bias)
    own.multiply(gated, x, weight, bias, silu=True)
    assert launcher.names == ["gemm"] * 4
    product = x.double() @ exact(weight).T + bias.double()
    close(out, product)
    gate, up = product.chunk(2, dim=1)
    close(gated, F.silu(gate) * up)


@pytest.mark.parametrize("max_shared_kib", [99, 130, 163, 227])
def test_rows_are_divided_into_as_few_parts_as_shared_memory_allows(
    launcher, max_shared_kib, monkeypatch
):
    """A gemm may have more rows of a weight in 8 bits than of a float weight."""
    launcher.max_shared_mem, parts = max_shared_kib << 10, []
    monkeypatch.setattr(gemm, "gemm", lambda _, out, x, *given, **options: parts.append(len(x)))
    weight, x = rounded(randn(48, 64, dtype=torch.bfloat16)), randn(600, 64, dtype=torch.bfloat16)
    OwnMatmuls(launcher).multiply(x.new_empty(600, 48), x, weight, None)
    most = max(rows for rows in range(1, 601) if gemm.covers(launcher, x[:rows], weight))
    assert parts == [most] * (600 // most) + [600 % most]


def test_all_gemms_share_their_counters(own, launcher, monkeypatch):
    """Each leaves them as it has found them."""
    made, new = [], gemm.new_counters
    monkeypatch.setattr(gemm, "new_counters", lambda *given: made.append(new(*given)) or made[-1])
    weight, x = randn(48, 64, dtype=torch.bfloat16), randn(20, 64, dtype=torch.bfloat16, seed=3)
    for _ in range(2):
        out = x.new_empty(20, 48)
        own.multiply(out, x, weight, None)
        close(out, x.double() @ weight.double().T)
    assert launcher.names == ["gemm"] * 2 and len(made) == 1 and not made[0].any()


def test_few_rows_of_a_weight_in_4_bits_are_ours(own, launcher):
    """And none whose activation would be computed with them."""
    weight = rounded(randn(48, 64, dtype=torch.bfloat16), Int4Matrix)
    x, bias = randn(65, 64, dtype=torch.bfloat16), randn(48, dtype=torch.bfloat16, seed=2)
    covered = [own.covers(x[:rows], weight) for rows in (1, 16, 17, 64, 65)]
    assert covered == [True, True, True, True, False]
    assert not own.covers(x[:1], weight, silu=True) and not own.covers(x[:1].float(), weight)
    out = x.new_empty(64, 48)
    own.multiply(out, x[:64], weight, bias)
    close(out, x[:64].double() @ exact(weight).T + bias.double(), absolute=2e-3)
    assert launcher.names == ["gemv_int4"]


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
    kernels.measure_matmuls([weight], "card", lambda run: lambda: 1e-6)
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


def test_the_emulator_leaves_matmuls_to_torch(toolchain):
    launcher = CountingLauncher()
    kernels = CudaKernels(launcher)
    kernels.linear(randn(1, 8), randn(8, 8))
    assert not launcher.names


@pytest.mark.parametrize(
    ("op", "names"), [("linear", ["gemv"]), ("linear_silu_mul", ["gemv", "activate_gated"])]
)
def test_a_deterministic_row_is_the_same_next_to_any_others(launcher, op, names):
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
        choice.measure(OwnMatmuls(stream.launcher), own, "card", stream.timer)
        replay, result = stream.capture(lambda: own[0] + 1)
        replay()
        stream.synchronize()
        assert torch.equal(result, own[0] + 1)
    assert len(matmul_choice._known) == 1
