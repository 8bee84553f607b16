"""Kernels that may begin while the one before them ends: what they must not do until it has."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest
from machine_code import instructions
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
__global__ void reads_early(float* x) {
    float early = x[threadIdx.x];  // line 11
    ptx::wait_for_previous();
    x[threadIdx.x] = early + 1;
}
__global__ void writes_early(float* x) {
    if (threadIdx.x == 7) x[7] = 1;  // line 16
    ptx::wait_for_previous();
}
__global__ void counts_early(unsigned* x) {
    atomicAdd(x, 1u);  // line 20
    ptx::wait_for_previous();
}
__global__ void copies_early(float* x) {
    __shared__ __align__(16) float own[128];
    ptx::cp_async_16(own + 4 * threadIdx.x, x);  // line 25
    ptx::wait_for_previous();
}
__global__ void one_never_waits(float* x) {
    if (threadIdx.x == 3) return;
    ptx::wait_for_previous();
    x[threadIdx.x] = 1;
}
__global__ void prefetches_behind(float* x) {
    ptx::prefetch_l2(x + 32);  // line 34
    ptx::wait_for_previous();
}
"""
# loads and stores that may be of global memory, copies of it, and atomics
ACCESS = re.compile(r"(LD|LDG|LDGSTS|ST|STG|ATOM|ATOMG|RED|REDG)\b")
EARLY = {"reads_early": 11, "writes_early": 16, "counts_early": 20, "copies_early": 25}


def early_accesses(code):
    """Return the accesses to global memory in front of the wait, from a kernel's instructions."""
    wait = next(place for place, it in enumerate(code) if it.startswith("ACQBULK"))
    return [it for it in code[:wait] if ACCESS.match(it)]


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


def test_a_prefetch_is_no_access_but_stays_inside(run):
    assert run("right").tolist() == list(range(32))
    with pytest.raises(emulator.EmulatorError, match="access to byte 128 of argument 0.*:34"):
        run("prefetches_behind")


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
@pytest.mark.every(4)
def test_the_instructions_are_there_from_sm_90_on(program):
    """A launch that begins early without them would be a race. Earlier devices do not know them."""
    kernels = one_of_each(program)
    counts = {"compute_90a": len(kernels)}
    if program is norms.PROGRAM:
        counts["compute_80"] = 0
    for arch, count in counts.items():
        ptx = ptx_of(program, list(kernels.values()), arch)
        for instruction in ("griddepcontrol.wait;", "griddepcontrol.launch_dependents;"):
            assert ptx.count(instruction) == count


@DEPENDENT
@pytest.mark.every(8)
@pytest.mark.timeout(240)  # gemm.cu takes long to compile
def test_machine_code_has_no_access_before_the_wait(program, tmp_path):
    """Neither NVRTC nor ptxas moves one up; only what is asked for with `prefetch_l2` is there."""
    kernels = one_of_each(program)
    code = compiler.compile(program.path, "sm_90a", list(kernels.values()), cache=tmp_path).code
    found = instructions(code, tmp_path)
    assert found.keys() == kernels.keys()
    for name, own in found.items():
        assert early_accesses(own) == [], name
        assert any(ACCESS.match(it) for it in own), name


def test_what_an_early_access_is_in_machine_code(tmp_path):
    names = [*EARLY, "right"]
    code = compiler.compile(SOURCE, "sm_90a", names, cache=tmp_path).code
    found = {name: early_accesses(own) for name, own in instructions(code, tmp_path).items()}
    assert not found["right"] and not found["prefetches_behind"]
    assert all(found[name] for name in EARLY)
