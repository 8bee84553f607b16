"""What each instruction of intrinsics.cuh is on a device: nvdisasm's names of it."""

from __future__ import annotations

import re

import pytest
from machine_code import disassembler, instructions

from gptmanager.cuda import norms
from gptmanager.cuda.attention.warpgroup_attention import PROGRAM
from gptmanager.cuda.device import compiler
from gptmanager.cuda.gemm import gemv, gemv_int4

SOURCE = """
#include "intrinsics.cuh"
__global__ void power(float* x) { x[0] = ptx::exp2_approx(x[0]); }
__global__ void wait(float* x) { ptx::wait_for_previous(); x[0] = 1; }
__global__ void prefetch(const float* x) { ptx::prefetch_l2(x); }
__global__ void early(long long* x, const int* y) {
    x[0] = ptx::load_early(x + 1);
    x[2] = ptx::load_early(y);
}
__global__ void once(uint4* to, const uint4* x) { *to = ptx::load_once_16(x, x > to); }
__global__ void increment(unsigned* x) { x[0] = ptx::atomic_inc_acq_rel(x + 1, x[2]); }
__global__ void copy(float* x) {
    ptx::cp_async_16(ptx::dynamic_shared(), x + 4, x[0] > 0);
    ptx::cp_async_commit();
    ptx::cp_async_wait<1>();
    x[0] = ptx::dynamic_shared()[0];
}
__global__ void rows(uint4* x) {
    unsigned a[4];
    ptx::load_matrix_x4(a, ptx::dynamic_shared());
    x[threadIdx.x] = {a[0], a[1], a[2], a[3]};
}
__global__ void columns(uint4* x) {
    unsigned a[4];
    ptx::load_matrix_x4_transposed(a, ptx::dynamic_shared());
    x[threadIdx.x] = {a[0], a[1], a[2], a[3]};
}
__global__ void transpose(unsigned* x) { x[threadIdx.x] = ptx::transpose_matrix(x[threadIdx.x]); }
template <class T> __device__ void multiply(const unsigned* x, float* out) {
    unsigned a[4] = {x[0], x[1], x[2], x[3]};
    float d[4] = {out[0], out[1], out[2], out[3]};
    ptx::mma_m16n8k16(d, a, x[4], x[5], T());
    for (int i = 0; i < 4; i++) out[i] = d[i];
}
__global__ void halves(const unsigned* x, float* out) { multiply<__half>(x, out); }
__global__ void bfloats(const unsigned* x, float* out) { multiply<__nv_bfloat16>(x, out); }
"""
INSTRUCTIONS = {
    "power": ["MUFU.EX2"],
    "wait": ["ACQBULK", "PREEXIT"],  # from sm_90 on
    "prefetch": ["CCTL.E.PF2"],
    "early": ["LDG.E.64.STRONG.GPU", "LDG.E.STRONG.GPU"],
    "once": ["LDG.E.NA.LTC128B.128.CONSTANT"],
    # release, the atomic, and acquire: what L1 holds is no longer valid
    "increment": ["MEMBAR.ALL.GPU", "ERRBAR", "ATOMG.E.INC.STRONG.GPU", "CCTL.IVALL"],
    "copy": ["LDGSTS.E.BYPASS.LTC128B.128", "LDGDEPBAR", "DEPBAR.LE SB0, 0x1"],
    "rows": ["LDSM.16.M88.4"],
    "columns": ["LDSM.16.MT88.4"],
    "transpose": ["MOVM.16.MT88"],
    "halves": ["HMMA.16816.F32"],
    "bfloats": ["HMMA.16816.F32.BF16"],
}
# What is not to move operands about. FMUL: numbers that are not normalized would cost some.
TOLD = re.compile(
    "MUFU|FMUL|MEMBAR|ERRBAR|ATOM|RED|CCTL|FENCE|LDGSTS|LDGDEP|DEPBAR|LDSM|MOVM|HMMA"
    "|ACQBULK|PREEXIT|LDG.E.NA|LDG.E.STRONG|LDG.E.64.STRONG"
)


@pytest.mark.parametrize("arch", compiler.ARCHITECTURES)
@pytest.mark.every(3)
def test_each_intrinsic_is_the_instruction_it_names(arch, tmp_path):
    disassembler()
    code = compiler.compile(SOURCE, arch, [*INSTRUCTIONS], cache=tmp_path / "cache").code
    found = instructions(code, tmp_path)
    assert found.keys() == INSTRUCTIONS.keys()
    for name, expected in INSTRUCTIONS.items():
        if name in ("wait", "early") and arch == "sm_80":
            expected = []
        kept = [instruction for instruction in found[name] if TOLD.match(instruction)]
        assert len(kept) == len(expected), (name, kept)
        for whole, begin in zip(kept, expected, strict=True):
            assert whole == begin or whole.startswith(begin + " "), (name, whole)


@pytest.mark.parametrize(
    ("program", "name", "count"),
    [
        (norms, "norm<__nv_bfloat16, 8, 1, true, true>", 2),  # of the weight, and of the bias
        (gemv, "gemv<__nv_bfloat16, 1, false>", 4),  # of the chunks that a warp loads ahead
        (gemv_int4, "gemv_int4<__nv_bfloat16, true>", 3),  # in a loop: values, scales and minima
    ],
    ids=["norm", "gemv", "gemv_int4"],
)
@pytest.mark.every(3)
def test_kernels_ask_for_their_weight_before_they_wait(program, name, count, tmp_path):
    """For the kernel before: what that one does not write is on its way when it ends."""
    disassembler()
    code = compiler.compile(program.PROGRAM.path, "sm_90a", [name]).code
    kinds, (own,) = ("CCTL.E.PF2", "ACQBULK", "LDG"), instructions(code, tmp_path).values()
    found = [it.split()[0] for it in own if it.startswith(kinds)]
    assert found[: count + 1] == ["CCTL.E.PF2"] * count + ["ACQBULK"]
    assert all(it.startswith("LDG") for it in found[count + 1 :]) and len(found) > count + 1


@pytest.mark.parametrize("head_dim", [128, 64])  # with 64 each store of the loop matters
@pytest.mark.parametrize(("dtype", "told"), [("__half", "F16"), ("__nv_bfloat16", "BF16")])
@pytest.mark.every(4)
def test_warpgroups_make_weights_while_values_are_added(dtype, told, head_dim, tmp_path):
    """In the loop come both products, the wait for the first, exponentials, and the second wait."""
    disassembler()
    name = f"warpgroup_attention<{dtype}, {head_dim}, false, false>"
    code = compiler.compile(PROGRAM.path, "sm_90a", [name], cache=tmp_path / "cache").code
    found = instructions(code, tmp_path)["warpgroup_attention"]
    suffix = ".F32" if told == "F16" else ".F32.BF16"
    kinds = {
        rf"HGMMA.64x128x16{suffix} R\d+, gdesc\[UR\d+\], ": "k",
        rf"HGMMA.64x{head_dim}x16{suffix} R\d+, R\d+, gdesc\[UR\d+\].tnspB, ": "v",
        "WARPGROUP.DEPBAR.LE gsb0, 0x": "",
        "MUFU.EX2": "e",
        "FENCE.VIEW.ASYNC": "f",
    }
    order = ""
    for instruction in found:
        for pattern, kind in kinds.items():
            if re.match(pattern, instruction):
                order += kind or instruction[-1]
        assert not instruction.startswith(("LDL", "STL"))
    k, v, e = f"k{{{head_dim // 16}}}", "v{8}", "e{66}"
    assert re.fullmatch(f"f{k}0{e}f{k}{v}1{e}0f{v}0", order), order
