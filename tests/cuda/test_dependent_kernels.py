"""Kernels that may begin while the one before them ends: what they must not do until it has."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest
from machine_code import LOADS_EARLY, instructions
from ptx_text import ptx_of

from gptmanager.cuda import emulator, norms
from gptmanager.cuda.device import compiler
from gptmanager.cuda.matrix import PROGRAMS

SOURCE = """
#include "intrinsics.cuh"
__global__ void right(float* x) {
    __shared__ float own[32];
    own[threadIdx.x] = threadIdx.x;
    ptx::prefetch_l2(x + threadIdx.x);
    ptx::wait_for_previous();
    x[threadIdx.x] += own[threadIdx.x];
}
__global__ void loads_early(float* x) {
    int early = ptx::load_early(reinterpret_cast<int*>(x));
    long long both = ptx::load_early(reinterpret_cast<long long*>(x));
    ptx::wait_for_previous();
    __syncthreads();
    x[threadIdx.x] = early + both + 1;
}
__global__ void reads_early(float* x) {
    float early = x[threadIdx.x];  // line 18
    ptx::wait_for_previous();
    x[threadIdx.x] = early + 1;
}
__global__ void writes_early(float* x) {
    if (threadIdx.x == 7) x[7] = 1;  // line 23
    ptx::wait_for_previous();
}
__global__ void counts_early(unsigned* x) {
    atomicAdd(x, 1u);  // line 27
    ptx::wait_for_previous();
}
__global__ void copies_early(float* x) {
    __shared__ __align__(16) float own[128];
    ptx::cp_async_16(own + 4 * threadIdx.x, x);  // line 32
    ptx::wait_for_previous();
}
__global__ void one_never_waits(float* x) {
    if (threadIdx.x == 3) return;
    ptx::wait_for_previous();
    x[threadIdx.x] = 1;
}
__global__ void prefetches_behind(float* x) {
    ptx::prefetch_l2(x + 32);  // line 41
    ptx::wait_for_previous();
}
__global__ void changes_what_another_loads_early(float* x) {
    int early = ptx::load_early(reinterpret_cast<int*>(x) + threadIdx.x / 2);
    ptx::wait_for_previous();
    x[threadIdx.x] = early;  // line 47
}
__global__ void loads_early_behind(float* x) {
    int early = ptx::load_early(reinterpret_cast<int*>(x) + 32);  // line 50
    ptx::wait_for_previous();
    x[threadIdx.x] = early;
}
"""
# loads and stores that may be of global memory, copies of it, and atomics
ACCESS = re.compile(r"(LD|LDG|LDGSTS|ST|STG|ATOM|ATOMG|RED|REDG)\b")
LOAD_EARLY = re.compile(r"LDG\.E(\.64)?\.STRONG\.GPU\b")  # `ptx::load_early` bypasses L1
EARLY = {"reads_early": 18, "writes_early": 23, "counts_early": 27, "copies_early": 32}


def early_accesses(code):
    """Return the accesses to global memory in front of the wait, from a kernel's instructions.

    Also return how many numbers are loaded there by `load_early`.
    """
    wait = next(place for place, it in enumerate(code) if it.startswith("ACQBULK"))
    found = [it for it in code[:wait] if ACCESS.match(it)]
    wrong = [it for it in found if not LOAD_EARLY.match(it)]
    return wrong, len(found) - len(wrong)


@functools.cache
def module(check):
    names = re.findall(r"__global__ void (\w+)", SOURCE)
    options = [f"-I{compiler.FOLDER}"]
    return emulator.Module(source=SOURCE, name_expressions=names, options=options, check=check)


@pytest.fixture
def run(toolchain):
    def run(name, dependent=True, check=True):
        kernel = module(check).get_function(name)
        kernel.dependent = dependent
        x = emulator.asarray(np.zeros(32, np.uint32 if name == "counts_early" else np.float32))
        kernel((1,), (32,), (x,))
        return x

    return run


@pytest.mark.parametrize("name", EARLY)
def test_what_is_touched_too_early(run, name):
    words = (
        f"{name}: argument 0 is used before wait_for_previous, at kernel.cu:{EARLY[name]}, block"
    )
    with pytest.raises(emulator.EmulatorError, match=words):
        run(name)
    run(name, dependent=False)


@pytest.mark.parametrize("check", [False, True])
def test_every_thread_waits(run, check):
    words = r"a thread ended without wait_for_previous, block \(0, 0, 0\), thread \(3, 0, 0\)"
    with pytest.raises(emulator.EmulatorError, match=words):
        run("one_never_waits", check=check)


def test_a_prefetch_is_not_an_access_but_stays_inside(run):
    assert run("right").tolist() == list(range(32))
    with pytest.raises(emulator.EmulatorError, match="access to byte 128 of argument 0.*:41"):
        run("prefetches_behind")


def test_an_early_load_is_permitted_but_stays_inside(run):
    assert run("loads_early").tolist() == [1] * 32
    with pytest.raises(emulator.EmulatorError, match="byte 128 of argument 0.*at kernel.cu:50"):
        run("loads_early_behind")
    with pytest.raises(emulator.EmulatorError, match="race on argument 0: a (read|write).*:47"):
        run("changes_what_another_loads_early")


def test_which_kernels_begin_early():
    """All that are launched in a chain."""
    late = {program.file for program in PROGRAMS if not program.dependent}
    assert late == {"attention/block_copy.cu"}


DEPENDENT = pytest.mark.parametrize(
    "program", [it for it in PROGRAMS if it.dependent], ids=lambda it: it.file
)


def one_of_each(program):
    """Kernel -> its first instantiation for tensor cores, if there is one."""
    found = {}
    for name in program.kernels:
        kernel = name.partition("<")[0]
        if kernel not in found or ("bfloat16" in name and "bfloat16" not in found[kernel]):
            found[kernel] = name
    return found


@DEPENDENT
@pytest.mark.every(9)
def test_the_instructions_are_there_from_sm_90_on(program):
    """A launch that begins early without them would be a race. Earlier devices do not know them."""
    kernels = list(one_of_each(program).values())
    for arch in ("compute_90a", "compute_80") if program is norms.PROGRAM else ("compute_90a",):
        _, *found = ptx_of(program, kernels, arch).split(".entry")
        assert len(found) == len(kernels)
        for instruction in ("griddepcontrol.wait;", "griddepcontrol.launch_dependents;"):
            assert {instruction in it for it in found} == {arch == "compute_90a"}


@DEPENDENT
@pytest.mark.every(16)
@pytest.mark.timeout(240)  # gemm.cu takes long to compile
def test_machine_code_has_no_access_before_the_wait(program, tmp_path):
    """Neither NVRTC nor ptxas moves one up; `prefetch_l2` and `load_early` are no such accesses."""
    kernels = one_of_each(program)
    code = compiler.compile(program.path, "sm_90a", list(kernels.values()), cache=tmp_path).code
    found = instructions(code, tmp_path)
    assert found.keys() == kernels.keys()
    for name, own in found.items():
        wrong, num_loads = early_accesses(own)
        assert not wrong and (num_loads > 0) == (name in LOADS_EARLY), name
        assert any(ACCESS.match(it) for it in own), name


def test_what_an_early_access_is_in_machine_code(tmp_path):
    names = [*EARLY, "right", "loads_early"]
    code = compiler.compile(SOURCE, "sm_90a", names, cache=tmp_path).code
    found = {name: early_accesses(own) for name, own in instructions(code, tmp_path).items()}
    assert found["right"] == ([], 0) and found["loads_early"] == ([], 2)
    assert all(found[name][0] for name in EARLY)
