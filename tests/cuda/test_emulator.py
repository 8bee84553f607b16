"""What a host sees of the emulator: sources, launches, arrays, the cache, and refusals."""

from __future__ import annotations

import concurrent.futures
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gptmanager import GptManager, KvCacheConfig, ModelType, OptionalParams
from gptmanager.cuda import emulator
from gptmanager.cuda.device.launch import EmulatorLauncher
from gptmanager.cuda.emulator import toolchain as toolchains
from gptmanager.cuda.emulator.source import (
    compilable,
    compiler_options,
    separate_headers,
    translation_unit,
)
from gptmanager.errors import ConfigError
from gptmanager.testing import RecordingCallbacks

ROOT = Path(__file__).resolve().parents[2]

SCALE = """
template <typename T>
__global__ void scale(T* x, const int n, float factor, T* __restrict__ sums) {
    extern __shared__ __align__(16) float partial[];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    float value = i < n ? factor * x[i] : 0.0f;
    if (i < n) x[i] = value;
    for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xFFFFFFFF, value, step);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < (blockDim.x + 31) / 32; warp++) value += partial[warp];
        sums[blockIdx.x] = value;
    }
}

extern "C" __global__ void fill(unsigned long long* x, long long value) { x[threadIdx.x] = value; }
"""
NAMES = ("scale<float>", "fill")


pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++")


@pytest.fixture(scope="module")
def module():
    return emulator.Module(source=SCALE, name_expressions=NAMES)


@pytest.fixture(scope="module")
def scale(module):
    return module.get_function("scale<float>")


def arguments(n=200, blocks=2):
    x = emulator.asarray(np.arange(n, dtype=np.float32))
    return x, np.int32(n), np.float32(0.5), emulator.empty(blocks)


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("order", ["forward", "reverse", 3])
@pytest.mark.every(5)
def test_a_kernel_from_a_string(check, order):
    module = emulator.Module(source=SCALE, name_expressions=NAMES, check=check, order=order)
    x, n, factor, sums = arguments()

    module.get_function("scale<float>")((2,), (128,), (x, n, factor, sums), shared_mem=16)

    expected = np.arange(200) * 0.5
    assert np.array_equal(x, expected)
    assert np.array_equal(sums, [expected[:128].sum(), expected[128:].sum()])


@pytest.mark.parametrize("seed", [0, 1])
def test_a_seed_shuffles_the_blocks(seed):
    source = """
    __global__ void arrive(unsigned* next, unsigned* order) {
        order[atomicAdd(next, 1u)] = blockIdx.x;
    }"""
    next_, order = emulator.asarray(np.zeros(1, np.uint32)), emulator.empty(40, np.uint32)
    module = emulator.Module(source=source, name_expressions=["arrive"], order=seed)
    module.get_function("arrive")((40,), (1,), (next_, order))
    found = emulator.asnumpy(order).tolist()
    assert sorted(found) == list(range(40))
    assert found not in (list(range(40)), list(range(40))[::-1])


def test_libraries_share_their_stacks(module):
    """A process has at most 65,530 mappings, and each guard page is one."""
    checked = emulator.Module(source=SCALE, name_expressions=NAMES, check=True)
    before = len(Path("/proc/self/maps").read_text().splitlines())
    for threads in (32, 1024, 64):
        for fill in (module.get_function("fill"), checked.get_function("fill")) * 2:
            x = emulator.empty(threads, np.uint64)
            fill((1,), (threads,), (x, np.int64(threads)))
            assert (x == threads).all()
    assert len(Path("/proc/self/maps").read_text().splitlines()) - before < 3 * 1024


def test_one_kernel_of_several_is_built():
    only = emulator.Module(source=SCALE, name_expressions=NAMES, only=["fill"])
    x = emulator.empty(3, np.uint64)
    only.get_function("fill")((1,), (3,), (x, np.int64(5)))
    assert x.tolist() == [5, 5, 5]
    with pytest.raises(emulator.EmulatorError, match="'scale<float>'; .* are: fill$"):
        only.get_function("scale<float>")


def test_a_kernel_works_on_tensors_of_torch(scale):
    x, sums = torch.arange(64.0), torch.full((1,), torch.nan)

    scale((1,), (64,), (x, np.int32(64), np.float32(2), sums), shared_mem=16)

    assert x.tolist() == list(range(0, 128, 2))
    assert sums.item() == x.sum()


def test_block_sizes_in_three_dimensions():
    source = """
    __global__ void indices(int* out) {
        int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
        dim3 size = blockDim;
        out[block * size.x * size.y * size.z + thread] = block * 1000 + thread;
    }"""
    out = emulator.empty((6, 24), np.int32)
    module = emulator.Module(source=source, name_expressions=["indices"], check=True)

    module.get_function("indices")((1, 2, 3), (4, 3, 2), (out,))

    assert np.array_equal(out, np.arange(6)[:, None] * 1000 + np.arange(24))


def test_warp_functions():
    source = """
    __global__ void votes(unsigned* out) {
        int lane = threadIdx.x;
        unsigned odd = __ballot_sync(~0u, lane & 1);
        unsigned same = __match_any_sync(~0u, lane / 8);
        int up = __shfl_up_sync(~0u, lane, 3, 8), down = __shfl_down_sync(~0u, lane, 3, 8);
        int best = __reduce_max_sync(~0u, lane == 7 ? 99 : -lane);
        int upper = lane >= 16 ? __reduce_add_sync(0xFFFF0000u, lane) : 0;
        bool all = __all_sync(~0u, lane >= 0) && !__any_sync(~0u, lane > 31);
        int count = __syncthreads_count(lane < 5);
        unsigned mine[8] = {odd, same, (unsigned)up, (unsigned)down, (unsigned)best,
                            (unsigned)upper, all, (unsigned)count};
        for (int i = 0; i < 8; i++) out[lane * 8 + i] = mine[i];
    }"""
    out = emulator.empty((32, 8), np.uint32)

    emulator.Module(source=source, name_expressions=["votes"], check=True).get_function("votes")(
        (1,), (32,), (out,)
    )

    lanes = np.arange(32)
    assert np.all(out[:, 0] == 0xAAAAAAAA)
    assert np.array_equal(out[:, 1], [0xFF << lane // 8 * 8 for lane in lanes.tolist()])
    assert np.array_equal(out[:, 2], np.where(lanes % 8 < 3, lanes, lanes - 3))
    assert np.array_equal(out[:, 3], np.where(lanes % 8 > 4, lanes, lanes + 3))
    assert np.all(out[:, 4] == 99)
    assert np.array_equal(out[:, 5], np.where(lanes < 16, 0, lanes[16:].sum()))
    assert np.all(out[:, 6] == 1) and np.all(out[:, 7] == 5)


def test_lanes_that_run_together_count_by_one_atomic():
    source = """
    __global__ void count(unsigned* total, unsigned* place) {
        unsigned active = __activemask(), leader = __ffs(active) - 1, before;
        if (threadIdx.x == leader) before = atomicAdd(total, __popc(active));
        before = __shfl_sync(active, before, leader);
        place[threadIdx.x] = before + __popc(active & ((1u << threadIdx.x) - 1));
    }"""
    total, place = emulator.asarray(np.zeros(1, np.uint32)), emulator.empty(32, np.uint32)
    module = emulator.Module(source=source, name_expressions=["count"], check=True)
    module.get_function("count")((1,), (32,), (total, place))
    assert total == 32 and sorted(place) == list(range(32))


@pytest.mark.usefixtures("toolchain")
@pytest.mark.slow
def test_the_standard_library_of_cuda():
    source = """
    #include <cuda/std/array>
    #include <cuda/std/limits>
    __global__ void largest(float* x) {
        cuda::std::array<float, 2> both{x[0], cuda::std::numeric_limits<float>::max()};
        x[0] = both[1];
    }"""
    x = emulator.asarray(np.zeros(1, np.float32))
    module = emulator.Module(source=source, name_expressions=["largest"])
    module.get_function("largest")((1,), (1,), (x,))
    assert x == np.finfo(np.float32).max


# What CuPy would pass on, or the driver reject ---------------------------------------------------


@pytest.mark.parametrize(
    ("index", "value", "why"),
    [
        (1, 200, "argument 1 must be a NumPy scalar.* 4-byte signed integer, got the int 200"),
        (1, np.int64(200), "argument 1 must be a 4-byte signed integer .*, got int64"),
        (2, np.int32(2), "argument 2 must be a 4-byte float .*, got int32"),
        (2, 0.5, "argument 2 must be a NumPy scalar.*, got the float 0.5"),
        (0, np.zeros(200), "argument 0 must be .* element a 4-byte float .*, got 8-byte floats"),
        (0, np.zeros(200, np.int32), "argument 0 must be .* float .*, got 4-byte signed integers"),
        (0, np.zeros((200, 2), np.float32)[:, 0], "argument 0 must be a C-contiguous array"),
        (0, torch.zeros(9, 9).T, "argument 0 must be a contiguous tensor"),
        (0, torch.zeros(9, device="meta"), "argument 0 must be .* on the CPU, got one on meta"),
        (0, [1.0], "argument 0 must be an array, .* declares a pointer, got a list"),
    ],
)
def test_an_argument_of_another_type(scale, index, value, why):
    given = list(arguments())
    given[index] = value
    with pytest.raises(emulator.EmulatorError, match=f"scale<float>: {why}"):
        scale((2,), (128,), tuple(given), shared_mem=16)


def test_launches_that_no_device_takes(scale):
    with pytest.raises(emulator.EmulatorError, match="has 4 parameters, got 2 arguments"):
        scale((2,), (128,), arguments()[:2], shared_mem=16)
    with pytest.raises(emulator.EmulatorError, match="must have at most 1024 threads, got"):
        scale((2,), (64, 32), arguments())
    with pytest.raises(emulator.EmulatorError, match="`grid` must be one to three sizes"):
        scale((1, 1 << 16), (128,), arguments())
    with pytest.raises(emulator.EmulatorError, match="must be at most 49152: max_dynamic"):
        scale((2,), (128,), arguments(), shared_mem=50000)


def test_more_shared_memory_once_it_is_allowed(module):
    kernel = module.get_function("scale<float>")
    kernel.max_dynamic_shared_size_bytes = 100_000
    kernel((2,), (128,), arguments(), shared_mem=50_000)
    with pytest.raises(emulator.EmulatorError, match="a device has 232448 bytes"):
        kernel.max_dynamic_shared_size_bytes = 300_000
        kernel((2,), (128,), arguments(), shared_mem=250_000)


STATIC = """
template <class T> __global__ void tiles(T* x) {
    __shared__ T tile[8192];
    extern __shared__ T more[];
    tile[threadIdx.x] = more[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = tile[threadIdx.x] + more[threadIdx.x];
}
extern "C" __global__ void plain(float* x) {
    __shared__ float tile[1024], other[16];
    extern __shared__ float more[];
    tile[threadIdx.x] = other[threadIdx.x % 16] = more[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = tile[threadIdx.x] + other[threadIdx.x % 16] + more[threadIdx.x];
}
"""


@pytest.mark.parametrize("check", [False, True], ids=["fast", "check"])
def test_static_shared_memory_counts(check):
    names = ("tiles<float>", "plain", "tiles<double>")
    module = emulator.Module(source=STATIC, name_expressions=names, check=check)
    kernel, x = module.get_function("tiles<float>"), emulator.asarray(np.ones(1, np.float32))
    assert kernel.max_dynamic_shared_size_bytes == 16 << 10
    kernel((1,), (1,), (x,), shared_mem=16 << 10)
    assert x == 2
    kernel.max_dynamic_shared_size_bytes = 227 << 10
    kernel((1,), (1,), (x,), shared_mem=195 << 10)
    with pytest.raises(emulator.EmulatorError, match="232448 bytes, 32768 of them static"):
        kernel((1,), (1,), (x,), shared_mem=(195 << 10) + 1)
    assert module.get_function("plain").max_dynamic_shared_size_bytes == (48 << 10) - 4160
    with pytest.raises(emulator.EmulatorError, match="tiles<double>: static .*, got 65536"):
        module.get_function("tiles<double>")


def test_an_unknown_name(module):
    with pytest.raises(
        emulator.EmulatorError, match="unknown kernel 'scale'.*: scale<float>, fill"
    ):
        module.get_function("scale")
    with pytest.raises(emulator.EmulatorError, match="pass either `path` or `source`"):
        emulator.Module(name_expressions=NAMES)
    with pytest.raises(emulator.EmulatorError, match="`order` must be .*, got 'up'"):
        emulator.Module(source=SCALE, name_expressions=NAMES, order="up")
    with pytest.raises(emulator.EmulatorError, match="`name_expressions` must be .*, got 'fill'"):
        emulator.Module(source=SCALE, name_expressions="fill")
    with pytest.raises(emulator.EmulatorError, match="`options` must be .*, got '-DX'"):
        emulator.Module(source=SCALE, name_expressions=NAMES, options="-DX")
    with pytest.raises(
        emulator.EmulatorError, match="fill: `grid` must be a tuple of sizes, got 3"
    ):
        module.get_function("fill")(3, (1,), (np.zeros(4, np.uint64), np.int64(4)))


def test_a_compiler_that_is_none(monkeypatch):
    monkeypatch.setenv("CXX", "/nope")
    with pytest.raises(ConfigError, match="CXX='/nope' was not found"):
        emulator.Toolchain()


# Compilation -------------------------------------------------------------------------------------


def test_errors_carry_the_line_numbers_of_the_source():
    source = "__global__ void f(int* x) {\n    extern __shared__ int a[];\n    x[0] = missing;\n}\n"
    with pytest.raises(emulator.EmulatorError, match=r"kernel.cu:3:\d+: error: .missing. was not"):
        emulator.Module(source=source, name_expressions=["f"])
    with pytest.raises(emulator.EmulatorError, match="(?s)'g' was not.*must name a kernel"):
        emulator.Module(source=source.replace("missing", "1"), name_expressions=["g"])


ONE_KERNEL = """// A source with no other function.
__global__ void one(float* x) {
    x[threadIdx.x + 1] = 1;
}
"""


@pytest.mark.parametrize("check", [False, True], ids=["fast", "check"])
@pytest.mark.parametrize("given", ["source", "path"])
@pytest.mark.every(3)
def test_reports_name_the_file_of_the_only_kernel(given, check, tmp_path):
    path = tmp_path / "lonely.cu"
    path.write_text(ONE_KERNEL)
    text = {"path": path} if given == "path" else {"source": ONE_KERNEL}
    module = emulator.Module(**text, name_expressions=["one"], check=check)
    file = "lonely.cu" if given == "path" else "kernel.cu"
    with pytest.raises(emulator.EmulatorError, match=f"one: access to byte 256 .*, at {file}:3, "):
        module.get_function("one")((1,), (64,), (emulator.empty(64),))


def test_inline_ptx_is_explained():
    source = """
    __global__ void f(unsigned* x) {
        unsigned lane;
        asm volatile("mov.u32 %0, %laneid;" : "=r"(lane));
        x[0] = lane;
    }"""
    with pytest.raises(emulator.EmulatorError, match="Inline PTX does not run on a CPU"):
        emulator.Module(source=source, name_expressions=["f"])


def test_dynamic_shared_memory_declared_outside_of_the_kernel():
    source = "extern __shared__ float memory[];\n__global__ void f() { memory[0] = 1; }"
    with pytest.raises(emulator.EmulatorError, match="`memory` must be declared inside the kernel"):
        emulator.Module(source=source, name_expressions=["f"])


CONVERSIONS = """
__global__ void convert(int* integers, unsigned* naturals, const float* x) {
    integers[threadIdx.x] = __float2int_rn(x[threadIdx.x]);
    naturals[threadIdx.x] = __float2uint_rn(x[threadIdx.x]);
}
"""


def test_what_no_integer_holds_becomes_the_nearest_one():
    module = emulator.Module(source=CONVERSIONS, name_expressions=["convert"])
    x = emulator.asarray([2.5, -1.75, np.nan, np.inf, -np.inf, 3e9], np.float32)
    integers, naturals = emulator.empty(6, np.int32), emulator.empty(6, np.uint32)
    module.get_function("convert")((1,), (6,), (integers, naturals, x))
    assert integers.tolist() == [2, -2, 0, 2**31 - 1, -(2**31), 2**31 - 1]
    assert naturals.tolist() == [2, 0, 0, 2**32 - 1, 0, 3_000_000_000]


NOT_INLINED = """
__device__ __noinline__ float twice(float x) { return 2 * x; }
__device__ __attribute__((__noinline__)) float thrice(float x) { return 3 * x; }
__global__ void f(float* x) { x[threadIdx.x] = twice(x[threadIdx.x]) + thrice(1); }
"""


def check_not_inlined(**options):
    module = emulator.Module(source=NOT_INLINED, name_expressions=["f"], **options)
    x = emulator.asarray([1, 5], np.float32)
    module.get_function("f")((1,), (2,), (x,))
    assert x.tolist() == [5, 13]


def test_functions_that_are_not_inlined():
    check_not_inlined()


def test_a_machine_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"needs the C\+\+ compiler g\+\+.*apt-get install g\+\+"):
        emulator.Module(source=SCALE, name_expressions=NAMES)


def copy_machine(folder):
    """Put the compiled machine into a cache of a test's own: to compile it takes seconds."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    shutil.copy(emulator.Toolchain()._runtime(), folder)
    return folder


@functools.cache
def precompiled_headers(mode):
    """Return the precompiled headers of sources that include none themselves."""
    chain = emulator.Toolchain()
    unit = translation_unit("", "kernel.cu", ())
    unit = chain.preprocess(unit, "kernel.cu", compiler_options((), Path()))
    headers, _ = separate_headers(compilable(unit, "kernel.cu"), chain.headers)
    return chain._precompiled(headers, [*toolchains._FLAGS, *mode])


def copy_all(folder, modes=(toolchains.FAST,)):
    """Put the precompiled headers there, too."""
    copy_machine(folder)
    for mode in modes:
        shutil.copy(precompiled_headers(mode), folder)
    return folder


@pytest.fixture
def no_headers(monkeypatch, tmp_path):
    """A machine with g++ and without NVIDIA's headers."""
    copy_machine(tmp_path)
    monkeypatch.setattr(toolchains, "cuda_headers", lambda: None)
    return emulator.Toolchain(tmp_path)


@pytest.mark.slow
def test_functions_that_are_not_inlined_without_headers(no_headers):
    check_not_inlined(toolchain=no_headers)


def test_a_kernel_that_needs_no_header_compiles_without(no_headers):
    module = emulator.Module(source=SCALE, name_expressions=NAMES, toolchain=no_headers)
    x, n, factor, sums = arguments()
    module.get_function("scale<float>")((2,), (128,), (x, n, factor, sums), shared_mem=16)
    assert np.array_equal(x, np.arange(200) * 0.5)


def test_a_kernel_that_needs_one_says_where_to_get_it(no_headers):
    source = "#include <cuda_bf16.h>\n__global__ void f() {}"
    with pytest.raises(emulator.EmulatorError, match="pip install 'nvidia-cuda-runtime==13.0"):
        emulator.Module(source=source, name_expressions=["f"], toolchain=no_headers)


def new_manager():
    return GptManager(
        ROOT / "examples" / "tiny_llama",
        ModelType.INFLIGHT_FUSED_BATCHING,
        optional_params=OptionalParams(KvCacheConfig(max_tokens=256), device="emulator"),
        **RecordingCallbacks([]).keywords(),
    )


@pytest.mark.parametrize("make", [EmulatorLauncher, new_manager])
def test_nothing_is_made_where_no_kernel_could_be_compiled(make, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(toolchains, "cuda_headers", lambda: None)
        with pytest.raises(ConfigError, match="headers are not installed: pip install"):
            make()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"needs the C\+\+ compiler g\+\+"):
        make()


def test_a_library_is_built_once(tmp_path, monkeypatch):
    copy_all(tmp_path / "gptmanager" / "emulator", (toolchains.FAST, toolchains.CHECKED))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = 'extern "C" __global__ void f(int* x) { x[0] = 1; }'
    for _ in range(2):
        emulator.Module(source=source, name_expressions=["f"])
    kept = sorted((tmp_path / "gptmanager" / "emulator").iterdir())
    assert sorted(path.suffix for path in kept) == [".gch", ".gch", ".machine", ".so"]
    emulator.Module(source=source, name_expressions=["f"], options=["-DX=1"])
    assert len(list(kept[0].parent.iterdir())) == 4, "an unused macro changes nothing"
    emulator.Module(source=source, name_expressions=["f"], check=True)
    assert len(list(kept[0].parent.iterdir())) == 5


@pytest.mark.parametrize("works", [True, False])
def test_headers_are_parsed_once_for_all_kernels(works, tmp_path, monkeypatch):
    chain = emulator.Toolchain(copy_machine(tmp_path))
    parsed = []

    def run(arguments, text, name, original=chain._run):
        parsed.extend([len(text)] * ("c++-cpp-output" in arguments))
        if "c++-header" in arguments and not works:
            raise emulator.EmulatorError("no precompiled headers")
        return original(arguments, text, name)

    monkeypatch.setattr(chain, "_run", run)
    for number in range(1 + works):
        source = f"#include <cuda_fp16.h>\n#define N {number}\n" + (
            "__device__ half f(half x) { return __hmul(x, __float2half(N)); }\n"
            'extern "C" __global__ void g(half* x) { x[0] = f(x[0]); }'
        )
        module = emulator.Module(source=source, name_expressions=["g"], toolchain=chain)
        x = emulator.asarray(np.full(1, 3, np.float16))
        module.get_function("g")((1,), (1,), (x,))
        assert x.tolist() == [3 * number]
    assert len(list(tmp_path.glob("*.gch"))) == works
    assert len(parsed) == 1 + works and (max(parsed) < 10_000) == works


@pytest.mark.parametrize("kind", ["so", "machine", "gch"])
@pytest.mark.every(3)
def test_a_damaged_file_is_built_anew(tmp_path, caplog, kind):
    chain = emulator.Toolchain(copy_all(tmp_path))

    def build():
        return emulator.Module(source=SCALE, name_expressions=NAMES, toolchain=chain)

    build()
    (path,) = tmp_path.glob(f"*.{kind}")
    content = path.read_bytes()
    path.unlink()  # the file that is loaded stays whole
    path.write_bytes(content[:-1000])
    if kind == "gch":
        next(tmp_path.glob("*.so")).unlink()
    assert build().get_function("fill") is not None
    assert f"{path} is damaged: compiling it again" in caplog.text
    caplog.clear()
    build()
    assert not caplog.records


def test_a_kernel_runs_where_the_cache_cannot_be_written_to(monkeypatch, tmp_path, caplog):
    (tmp_path / f"gptmanager-{os.getuid()}").mkdir(mode=0o700)
    copy_all(tmp_path / f"gptmanager-{os.getuid()}" / "emulator")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nope")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    module = emulator.Module(source=SCALE, name_expressions=["fill"])
    x = emulator.empty(3, np.uint64)
    module.get_function("fill")((1,), (3,), (x, np.int64(5)))
    assert x.tolist() == [5, 5, 5]
    assert "/proc/nope" in caplog.text


def test_two_threads_build_the_same_at_once(tmp_path):
    copy_all(tmp_path)

    def build(_):
        chain = emulator.Toolchain(tmp_path)
        module = emulator.Module(source=SCALE, name_expressions=NAMES, toolchain=chain)
        return module.get_function("fill")

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        kernels = list(pool.map(build, range(2)))
    for kernel in kernels:
        x = emulator.empty(3, np.uint64)
        kernel((1,), (3,), (x, np.int64(5)))
        assert x.tolist() == [5, 5, 5]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".gch", ".machine", ".so"]


# Signals -----------------------------------------------------------------------------------------


def test_a_kernel_that_never_ends_can_be_interrupted():
    code = """
import signal
import numpy as np
from gptmanager.cuda import emulator

signal.signal(signal.SIGALRM, signal.default_int_handler)
bytes = emulator.asarray(np.zeros(1 << 18, np.uint8))
# the last body is nearly always in memcpy, in which no kernel is interrupted
copies = "memcpy(bytes, bytes + (1 << 17), 1 << 17); atomicAdd((int*)x, 0);"
for body in ("", "__syncwarp();", copies):
    head = "__global__ void spin(volatile int* x, char* bytes)"
    source = head + " { while (x[0] == 0) { %s } }" % body
    spin = emulator.Module(source=source, name_expressions=["spin"]).get_function("spin")
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        spin((1,), (64,), (emulator.asarray(np.zeros(1, np.int32)), bytes))
    except KeyboardInterrupt:
        print("interrupted")
    x = emulator.asarray(np.ones(1, np.int32))
    spin((1,), (64,), (x, bytes))
    print("and goes on")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.stdout == "interrupted\nand goes on\n" * 3, done.stderr


ENDLESS = """
__global__ void spin(volatile int* x) { if (threadIdx.x == 5) while (x[0] == 0) {} }
__global__ void ask(int* x) { if (threadIdx.x == 5) while (atomicAdd(x, 0) == 0) {} }
__global__ void meet(int* x) { if (blockIdx.x == 1) for (;;) __syncthreads(); }
__global__ void count(int* x) { for (int i = 0; i < 10000; i++) atomicAdd(x, 1); }
"""


@pytest.mark.parametrize("check", [False, True])
def test_a_block_that_never_ends_is_an_error(check):
    names = ["spin", "ask", "meet", "count"]
    options = {"check": check, "block_timeout_s": 0.01}
    module = emulator.Module(source=ENDLESS, name_expressions=names, **options)
    for line, name, place in (
        *((2, "spin", r"\(0, 0, 0\), thread \(5, "), (3, "ask", r"\(0, 0, 0\), thread \(5, ")),
        (4, "meet", r"\(1, 0, 0\), thread \("),
    ):
        why = (
            rf"{name}: a block has run for more than 0.01 s .*, at kernel.cu:{line}, block {place}"
        )
        with pytest.raises(emulator.EmulatorError, match=why):
            module.get_function(name)((3,), (64,), (emulator.asarray([0], np.int32),))
    if not check:  # many blocks of a millisecond or less
        x = emulator.asarray([0], np.int32)
        module.get_function("count")((300,), (1,), (x,))
        assert x.tolist() == [3_000_000]


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), "1"])
def test_a_limit_for_a_block_is_a_positive_number(seconds):
    with pytest.raises(
        emulator.EmulatorError, match="`block_timeout_s` must be a positive number or None"
    ):
        emulator.Module(source=SCALE, name_expressions=NAMES, block_timeout_s=seconds)


# Arrays ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32", "int32", "uint64", "bool"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (1000, 7)])
def test_arrays(shape, dtype):
    values = (np.arange(np.prod(shape, dtype=int)) % 2).reshape(shape).astype(dtype)
    array = emulator.asarray(values)
    assert array.dtype == dtype and array.flags.c_contiguous and array.ctypes.data % 16 == 0
    assert np.array_equal(emulator.asnumpy(array), values)
    if array.dtype.kind == "f":
        assert np.isnan(emulator.empty(shape, dtype)).all()


def test_reading_past_an_array_in_python_kills_no_test():
    code = (
        "from gptmanager.cuda import emulator; import ctypes; a = emulator.empty(4)\n"
        "ctypes.string_at(a.ctypes.data, 16); print('inside', flush=True)\n"
        "ctypes.string_at(a.ctypes.data, 17); print('outside')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "inside\n" and done.returncode < 0
