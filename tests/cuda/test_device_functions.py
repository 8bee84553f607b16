"""Functions that CUDA C++ has and C++ has not, on the emulator and on a card: what a user's kernel
may call is there, and is what NVIDIA's guide says, whether our own kernels call it or not.
"""

from __future__ import annotations

import numpy as np
import pytest
from devices import GPU, there_is

from gptmanager.cuda import emulator

VALUES = {  # of an expression, the 32 bits of its result
    "__clz(0)": 32,
    "__clz(1)": 31,
    "__clz(-1)": 0,
    "__clzll(0)": 64,
    "__clzll(1ll << 40)": 23,
    "__popc(0xF0F1u)": 9,
    "__popcll(~0ull)": 64,
    "__ffs(0)": 0,
    "__ffs(24)": 4,
    "__ffsll(1ll << 40)": 41,
    "__brev(0xF1)": 0x8F000000,
    "__umulhi(0x80000000u, 6u)": 3,
    "__mulhi(-2147483647 - 1, 6)": -3,
    "unsigned(__umul64hi(1ull << 63, 6ull))": 3,
    "__funnelshift_l(0x80000000u, 1u, 4u)": 0x18,
    "__funnelshift_l(0x80000000u, 1u, 36u)": 0x18,
    "__funnelshift_r(0x10u, 3u, 4u)": 0x30000001,
    "__byte_perm(0x33221100u, 0x77665544u, 0x7610u)": 0x77661100,
    "__byte_perm(0x33221100u, 0x77665544u, 0x2354u)": 0x22335544,
    "__byte_perm(0x7F0080FFu, 0u, 0xBA98u)": 0x0000FFFF,  # the sign of each byte
    "min(-1, 1)": -1,
    "max(-1, 1)": 1,
    "min(4000000000u, 3u)": 3,
    "max(4000000000u, 3u)": 4000000000,
    "__float2int_rn(2.5f)": 2,
    "__float2int_rz(-2.7f)": -2,
    "__float2int_rd(-2.2f)": -3,
    "__float2int_ru(2.2f)": 3,
    "__float2uint_rn(3.5f)": 4,
    "__float_as_uint(1.0f)": 0x3F800000,
    "__float_as_int(__int_as_float(-7))": -7,
    "__float_as_uint(__uint_as_float(0x40490FDBu))": 0x40490FDB,
    "int(__double_as_longlong(2.0) >> 32)": 0x40000000,
    "int(__longlong_as_double(0x4008000000000000ll))": 3,
    "dim3(5).x * 100 + dim3(5).y * 10 + dim3(5).z": 511,
    "dim3(5, 6).x * 100 + dim3(5, 6).y * 10 + dim3(5, 6).z": 561,
}
FLOATS = {
    "__saturatef(1.5f)": 1,
    "__saturatef(-1.5f)": 0,
    "__saturatef(0.25f)": 0.25,
    "__saturatef(__int_as_float(0x7FC00000))": 0,
    "__fadd_rn(5.0f, 3.0f)": 8,
    "__fsub_rn(5.0f, 3.0f)": 2,
    "__fmul_rn(5.0f, 3.0f)": 15,
    "__fdiv_rn(5.0f, 4.0f)": 1.25,
    "__fmaf_rn(2.0f, 3.0f, 4.0f)": 10,
    "__frcp_rn(8.0f)": 0.125,
    "__fsqrt_rn(9.0f)": 3,
    "__frsqrt_rn(4.0f)": 0.5,
    "normcdff(0.0f)": 0.5,
    "min(1.0f, __int_as_float(0x7FC00000))": 1,  # of NaN and a number the number
    "max(__int_as_float(0x7FC00000), -2.0f)": -2,
    "__int2float_rn(-3)": -3,
    "__uint2float_rn(4000000000u)": 4e9,
}
ATOMICS = {  # on a cell of 10: what it has then; each gives 10
    "atomicAdd(cell, 3u)": 13,
    "atomicSub(cell, 3u)": 7,
    "atomicExch(cell, 3u)": 3,
    "atomicMin(cell, 3u)": 3,
    "atomicMin(cell, 20u)": 10,
    "atomicMax(cell, 3u)": 10,
    "atomicMax(cell, 20u)": 20,
    "atomicAnd(cell, 6u)": 2,
    "atomicOr(cell, 5u)": 15,
    "atomicXor(cell, 3u)": 9,
    "atomicInc(cell, 11u)": 11,
    "atomicInc(cell, 10u)": 0,
    "atomicDec(cell, 10u)": 9,
    "atomicDec(cell, 9u)": 9,
    "atomicCAS(cell, 10u, 4u)": 4,
    "atomicCAS(cell, 9u, 4u)": 10,
}
REDUCTIONS = {
    **{"add": sum, "min": min, "max": max},
    **{name: getattr(np, f"bitwise_{name}").reduce for name in ("and", "or", "xor")},
}


def run(device, body, size, threads=1, check=False):
    """What a kernel leaves in `out`, uint32 of `size` elements, ten each before."""
    source = f'extern "C" __global__ void kernel(unsigned* out) {{\n{body}\n}}'
    values = np.full(size, 10, np.uint32)
    if there_is(device) == "cuda":
        import cupy

        out = cupy.asarray(values)
        cupy.RawModule(code=source).get_function("kernel")((1,), (threads,), (out,))
        return out.get()
    out = emulator.asarray(values)
    module = emulator.Module(source=source, name_expressions=["kernel"], check=check)
    module.get_function("kernel")((1,), (threads,), (out,))
    return emulator.asnumpy(out)


@pytest.fixture(params=["emulator", GPU])
def device(request):
    return request.param


def test_integers(device):
    body = "\n".join(f"out[{i}] = unsigned({it});" for i, it in enumerate(VALUES))
    found = run(device, body, len(VALUES)).tolist()
    assert dict(zip(VALUES, found, strict=True)) == {
        it: value % 2**32 for it, value in VALUES.items()
    }


def test_floats(device):
    body = "\n".join(f"out[{i}] = __float_as_uint({it});" for i, it in enumerate(FLOATS))
    found = run(device, body, len(FLOATS)).view(np.float32).tolist()
    assert dict(zip(FLOATS, found, strict=True)) == FLOATS


def test_atomics(device):
    calls = {  # one kernel for all, because to compile it takes longest
        call.replace("(", f"{suffix}("): value
        for suffix in ("", "_block", "_system")
        for call, value in ATOMICS.items()
        if not (suffix and "CAS" in call)
    }
    body = "\n".join(
        f"{{ unsigned* cell = out + {2 * i}; cell[1] = {it}; }}" for i, it in enumerate(calls)
    )
    found = run(device, body, 2 * len(calls), check=True).reshape(-1, 2)
    assert dict(zip(calls, found[:, 0].tolist(), strict=True)) == calls
    assert set(found[:, 1].tolist()) == {10}


def test_the_smallest_of_negative_numbers(device):
    body = "int* cell = (int*)out; atomicMin(cell, -3); atomicMax(cell + 1, -3);"
    assert run(device, body, 2).view(np.int32).tolist() == [-3, 10]


def test_reductions_of_a_warp(device):
    """Reduce all lanes, and the upper half of them with negative numbers."""
    signed = ("add", "min", "max")
    parts = [
        f"""
        out[{64 * i} + lane] = __reduce_{name}_sync(~0u, lane * 7 + 3);
        if (lane >= 16) {{
            {"int own = int(lane) - 20;" if name in signed else "unsigned own = lane | 64;"}
            out[{64 * i + 32} + lane] = __reduce_{name}_sync(0xFFFF0000u, own);
        }}"""
        for i, name in enumerate(REDUCTIONS)
    ]
    body = "unsigned lane = threadIdx.x;" + "".join(parts)
    found = run(device, body, 64 * len(parts), threads=32, check=True).reshape(-1, 64)
    lanes = np.arange(32)
    for (name, reduce), own in zip(REDUCTIONS.items(), found, strict=True):
        upper = [int(lane) - 20 if name in signed else int(lane) | 64 for lane in lanes[16:]]
        assert set(own[:32].tolist()) == {int(reduce(lanes * 7 + 3))}, name
        assert set(own[48:].view(np.int32).tolist()) == {int(reduce(upper))}, name
