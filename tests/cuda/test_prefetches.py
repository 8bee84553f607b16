"""What kernels prefetch into L2 while the kernel before them still runs."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch

from gptmanager.cuda import emulator
from gptmanager.cuda.device import compiler
from gptmanager.cuda.device.launch import EmulatorLauncher
from gptmanager.cuda.gemm import gemm, gemv, gemv_int4
from gptmanager.kernels.gemm.int4_groups import Groups
from gptmanager.kernels.gemm.int4_matrix import Int4Matrix

# Notes which addresses a thread prefetches, and which ones it then loads.
NOTING = """
#include "intrinsics.cuh"
using Number = unsigned long long;
struct Note { Number is_load, thread, address; };
__device__ Note notes[1 << 17];
__device__ unsigned num_notes;
__device__ inline void note(bool is_load, const void* address, bool valid = true) {
    Number thread = blockIdx.x * blockDim.x + threadIdx.x;
    if (!valid || num_notes == 1 << 17) return;
    notes[num_notes++] = {is_load, thread, reinterpret_cast<Number>(address)};
}
__global__ void take_notes(Note* to, unsigned* count) {
    for (unsigned i = 0; i < num_notes; i++) to[i] = notes[i];
    *count = num_notes, num_notes = 0;
}
#define prefetch_l2(from) prefetch_l2((::note(false, from), from))
#define load_once_16(from, valid) load_once_16((::note(true, from, valid), from), valid)
#define cp_async_16(to, from, valid) cp_async_16(to, (::note(true, from, valid), from), valid)
#include "%s"
#undef prefetch_l2
#undef load_once_16
#undef cp_async_16
"""


class NotingLauncher(EmulatorLauncher):
    def kernel(self, program, name, shared_mem=0):
        names, options = ["take_notes", name], [f"-I{compiler.FOLDER}"]
        source = NOTING % program.file
        self.made = emulator.Module(source=source, name_expressions=names, options=options)
        kernel = self.made.get_function(name)
        kernel.max_dynamic_shared_size_bytes = max(shared_mem, 48 << 10)
        return lambda grid, block, args, shared_mem=0: kernel(
            grid, block, [np.uint64(0) if it is None else it for it in args], shared_mem=shared_mem
        )

    def notes(self, tensors):
        """Thread -> its prefetches and its loads from `tensors`, as addresses in order."""
        found, count = np.zeros((1 << 17, 3), np.uint64), np.zeros(1, np.uint32)
        self.made.get_function("take_notes")((1,), (1,), (found, count))
        assert count[0] < len(found)
        by_thread = collections.defaultdict(lambda: ([], []))
        for is_load, thread, address in found[: count[0]].tolist():
            if any(0 <= address - it.data_ptr() < it.nbytes for it in tensors):
                by_thread[thread][is_load].append(address)
        return by_thread


@pytest.mark.parametrize(("kernel", "most"), [("gemv", 1536), ("gemv_int4", 1536), ("gemm", 192)])
@pytest.mark.every(3)
def test_what_a_thread_prefetches_is_what_it_loads_first(kernel, most, toolchain):
    """And it is all of a small weight, whose rows have `most` elements or fewer."""
    for rows, width, depth, is_all in ((17, 32, most, True), (2, 72, 2 * most + 32, False)):
        launcher, dtype = NotingLauncher(), torch.bfloat16
        x, out = torch.ones(rows, depth, dtype=dtype), torch.empty(rows, width, dtype=dtype)
        silu = kernel != "gemv_int4"
        weight = torch.ones((1 + silu) * width, depth, dtype=dtype)
        if kernel == "gemv":
            gemv.multiply(launcher, out, x, weight, silu=True)
        elif kernel == "gemm":
            arrived = gemm.new_counters(launcher, x.device)
            gemm.gemm(launcher, out, x, weight, arrived=arrived, silu=True)
        else:
            packed = Int4Matrix(width, depth, dtype)
            values = torch.ones(width, depth, dtype=torch.uint8)
            scales = torch.ones(width, depth // 32, dtype=torch.float16)
            packed.copy_(Groups(values, scales, -scales))
            gemv_int4.multiply(launcher, out, x, packed)
        noted = launcher.notes([weight] if silu else packed.panels[:3])
        assert noted
        for early, loaded in noted.values():
            assert early and early == (loaded if is_all else loaded[: len(early)])
