"""NVRTC, and every kernel of the project through it; the whole matrix is `make compile-check`."""

from __future__ import annotations

import ctypes
import random
from functools import partial

import pytest
from fuzz import ALL_CASES
from requirements import skip

from gptmanager.cuda.attention import block_copy
from gptmanager.cuda.device import compiler
from gptmanager.cuda.device.launch import Program
from gptmanager.cuda.matrix import (
    PROGRAMS,
    Row,
    compile_all,
    compile_side_by_side,
    table,
    whole_matrix,
)
from gptmanager.errors import ConfigError

SOURCE = """
#include "numerics.cuh"
template <int N> __global__ void add(float* x) {
    __shared__ float partial[N];
    partial[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] += partial[N - 1 - threadIdx.x];
}
"""
NUM_SAMPLES = 4 if ALL_CASES else 0


@pytest.fixture(scope="module", autouse=True)
def nvrtc():
    try:
        return compiler.find_nvrtc()
    except ConfigError as error:
        skip(f"{error}; make test installs it where it can be had")


def test_a_cubin_and_its_figures(tmp_path):
    names = ["add<32>", "add<64>"]
    made = compiler.compile(SOURCE, "sm_90a", names, cache=tmp_path)
    assert made.code[:4] == b"\x7fELF"
    assert made.lowered["add<64>"].startswith("_Z3addILi64E")
    assert made.figures["add<64>"].shared_memory - made.figures["add<32>"].shared_memory == 128
    assert 0 < made.figures["add<32>"].registers < 40
    assert compiler.compile(SOURCE, "sm_90a", names, cache=tmp_path) == made, "from the cache"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("arch", compiler.ARCHITECTURES)
def test_a_cubin_is_whole(nvrtc, monkeypatch, tmp_path, arch):
    """It has all bytes that NVRTC returns; CuPy's binding cuts off the last one."""
    whole = []

    def ask(program):
        library = ctypes.CDLL(f"libnvrtc.so.{nvrtc.getVersion()[0]}")  # which CuPy has loaded
        handle, size = ctypes.c_void_p(program), ctypes.c_size_t()
        assert library.nvrtcGetCUBINSize(handle, ctypes.byref(size)) == 0
        code = ctypes.create_string_buffer(size.value)
        assert library.nvrtcGetCUBIN(handle, code) == 0
        whole.append(code.raw)
        return binding(program)

    binding = nvrtc.getCUBIN
    monkeypatch.setattr(nvrtc, "getCUBIN", ask)
    made = compiler.compile(SOURCE, arch, ["add<32>"], cache=tmp_path)
    assert made.code == whole[0]
    monkeypatch.setattr(nvrtc, "getCUBIN", lambda program: binding(program)[:-5])
    with pytest.raises(compiler.CompilationError, match=rf"its header says {len(whole[0])}"):
        compiler.compile(SOURCE, arch, ["add<32>"], cache=tmp_path / "other")


def test_a_folder_in_which_nothing_can_be_kept(tmp_path):
    cache = tmp_path / "file"
    cache.write_text("no folder")
    assert compiler.compile(SOURCE, "sm_80", ["add<32>"], cache=cache).code[:4] == b"\x7fELF"


@pytest.mark.parametrize("name", ["cubin", "kernels.json"])
def test_a_damaged_cubin_is_compiled_anew(tmp_path, caplog, name):
    made = compiler.compile(SOURCE, "sm_90a", ["add<32>"], cache=tmp_path)
    (kept,) = tmp_path.glob(f"*/{name}")
    for content in (
        b"",
        kept.read_bytes()[:-40],
        kept.read_bytes().replace(b"\0\0", b"\0\1") + b"x",
    ):
        kept.write_bytes(content)
        assert compiler.compile(SOURCE, "sm_90a", ["add<32>"], cache=tmp_path).code == made.code
    assert caplog.text.count("is damaged: compiling it again") == 3
    assert compiler.compile(SOURCE, "sm_90a", ["add<32>"], cache=tmp_path).code == made.code
    assert caplog.text.count("is damaged") == 3


def test_spills_are_seen(tmp_path):
    source = """
    __global__ void __launch_bounds__(1024) wide(float* x) {
        float values[128];
        for (int i = 0; i < 128; i++) values[i] = x[i * 1024 + threadIdx.x];
        __syncthreads();
        for (int i = 0; i < 128; i++) x[i * 1024 + threadIdx.x] = values[127 - i] * values[i / 2];
    }"""
    figures = compiler.compile(source, "sm_90a", ["wide"], cache=tmp_path).figures["wide"]
    assert figures.spill_stores > 0 and figures.spill_loads > 0
    row = Row("x.cu", "wide", "sm_90a", figures)
    assert row.spills and "bytes spilled" in table([row])


def test_an_error_has_the_log(tmp_path):
    with pytest.raises(compiler.CompilationError, match=r"kernel.cu\(2\): error: .*missing"):
        source = "__global__ void f(int* x) {\n  x[0] = missing;\n}"
        compiler.compile(source, "sm_80", ["f"], cache=tmp_path)


def test_an_edited_header_makes_another_cubin(tmp_path):
    """Also one that another header includes; and so do another architecture, option or kernel."""
    file, header = tmp_path / "f.cu", tmp_path / "value.cuh"
    (tmp_path / "outer.cuh").write_text('#include "value.cuh"\n')
    file.write_text(
        '#include "outer.cuh"\n#ifndef MORE\n#define MORE 0\n#endif\n'
        "template <int N> __global__ void f(int* x) { x[0] = VALUE + MORE + N; }"
    )
    codes = set()
    for value, arch, name, options in (
        (1, "sm_80", "f<0>", ()),
        (20, "sm_80", "f<0>", ()),
        (20, "sm_90a", "f<0>", ()),
        (20, "sm_80", "f<300>", ()),
        (20, "sm_80", "f<0>", ("-DMORE=4000",)),
    ):
        header.write_text(f"#define VALUE {value}\n")
        made = compiler.compile(file, arch, [name], options, cache=tmp_path / "cache")
        assert made.lowered.keys() == {name}
        codes.add(made.code)
    assert len(codes) == 5


@pytest.mark.parametrize(
    ("program", "arch"),
    [(program, arch) for program in PROGRAMS for arch in program.architectures],
    ids=lambda it: getattr(it, "file", it),
)
@pytest.mark.every(9)
def test_kernels_compile_without_spilling(program, arch):
    """One instantiation of each kernel, and a sample that differs by architecture."""
    kernels = {name.partition("<")[0]: name for name in program.kernels}
    count = min(NUM_SAMPLES, len(program.kernels))
    sample = random.Random(f"{program.file} {arch}").sample(program.kernels, count)
    names = tuple(sorted({*kernels.values(), *sample}))
    rows = list(compile_all(((program, name, arch) for name in names), pytest.fail))
    assert [row.kernel for row in rows] == list(names)
    assert not [row for row in rows if row.spills]


def test_headers_that_are_not_next_to_nvrtc(monkeypatch, tmp_path):
    """In CUDA 12, each wheel has a folder of its own."""
    compiled = compiler.compile(SOURCE, "sm_90a", ["add<32>"], cache=tmp_path / "first")
    monkeypatch.setattr("cupy.cuda.get_cuda_path", lambda: None)
    again = compiler.compile(SOURCE, "sm_90a", ["add<32>"], cache=tmp_path / "second")
    assert again.code == compiled.code
    monkeypatch.setattr(compiler, "_header_folders", lambda: iter([tmp_path]))
    with pytest.raises(ConfigError, match="CUDA's headers: pip install nvidia-cuda-runtime"):
        compiler.compile(SOURCE, "sm_90a", ["add<32>"], cache=tmp_path / "third")


def test_no_ptx_but_in_one_file():
    files = {
        path.name for path in compiler.FOLDER.rglob("*.cu*") if "asm" in path.read_text("utf-8")
    }
    assert files == {"intrinsics.cuh"}


@pytest.mark.parametrize(
    "compile_",
    [
        compile_all,
        pytest.param(partial(compile_side_by_side, num_workers=2), marks=pytest.mark.slow),
    ],
)
def test_a_kernel_that_does_not_compile_stops_no_other(nvrtc, monkeypatch, tmp_path, compile_):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    broken = Program("attention/block_copy.cu", ("no_such_kernel",))
    choices = [(broken, "no_such_kernel", "sm_90a"), (block_copy.PROGRAM, "copy_blocks", "sm_80")]
    errors = []
    rows = list(compile_(choices, on_error=errors.append))
    assert [(row.kernel, row.arch) for row in rows] == [("copy_blocks", "sm_80")]
    assert len(errors) == 1 and "no_such_kernel for sm_90a: " in errors[0]


def test_which_kernels_are_compiled():
    every = list(whole_matrix())
    assert {arch for _, _, arch in every} == set(compiler.ARCHITECTURES)
    one = [(program.file, name, arch) for program, name, arch in whole_matrix("sm_86", "bfloat16")]
    assert {arch for _, _, arch in one} == {"sm_86"}
    files = {file for file, _, _ in one}
    assert "attention/warpgroup_attention.cu" not in files and "attention/block_copy.cu" in files
    assert all("half" not in name and "<float" not in name for _, name, _ in one)
    hopper = {program.file for program, _, _ in whole_matrix("sm_90a")}
    assert hopper == {program.file for program in PROGRAMS}


def test_kernels_for_weights_in_8_bit_floats_are_compiled_where_a_device_converts_them():
    """Pages in 8-bit floats work on all devices."""
    found = {
        arch: {program.file for program, name, _ in whole_matrix(arch) if "fp8" in name}
        for arch in ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
    }
    weights = {"gemm/gemv.cu", "gemm/gemm.cu", "moe.cu"}
    assert found["sm_80"] == found["sm_86"] and "attention/cache_write.cu" in found["sm_80"]
    assert not found["sm_80"] & weights
    for arch in ("sm_89", "sm_90a", "sm_100", "sm_120"):
        assert found[arch] == found["sm_80"] | weights
