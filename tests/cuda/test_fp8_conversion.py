"""8-bit floats, expanded in both ways: by a device's own instruction, and without it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gptmanager.cuda import emulator
from gptmanager.cuda.device import compiler

SOURCE = """
#include "attention/fp8.cuh"
template <class T> __global__ void expand_all(unsigned* expanded) {
    unsigned both = blockIdx.x * blockDim.x + threadIdx.x;
    expanded[both] = expand<T>(both | 0xABCD0000u);
}
"""
WAYS = {"own instruction": "-DDEVICE_CONVERTS_FP8=1", "bits": "-DDEVICE_CONVERTS_FP8=0"}
DTYPES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.every(3)
def test_every_pair(toolchain, dtype, way):
    name = f"expand_all<{DTYPES[dtype]}>"
    options = [WAYS[way], f"-I{compiler.FOLDER}"]
    module = emulator.Module(source=SOURCE, name_expressions=[name], options=options)
    expanded = emulator.empty(1 << 16, np.uint32)
    module.get_function(name)((64,), (1024,), (expanded,))
    pairs = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16)).view(torch.float8_e4m3fn)
    got = torch.from_numpy(emulator.asnumpy(expanded)).view(dtype)
    torch.testing.assert_close(got, pairs.to(dtype), rtol=0, atol=0, equal_nan=True)
    zeros = got == 0
    assert torch.equal(got[zeros].signbit(), pairs.to(dtype)[zeros].signbit())
