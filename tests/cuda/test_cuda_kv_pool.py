"""Copies of blocks within a device, to pinned memory and back, in order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gptmanager.kv_cache.block import BlockCopy
from gptmanager.memory.cuda_kv_pool import CudaKvPool
from gptmanager.memory.kv_pool import KvPool

SIZES = (2, 5, 8, 3)  # layers, blocks, tokens of a block, KV heads


def pages(pool):
    host = pool._host_keys.mT, pool._host_values
    return [tensor.cpu() for tensor in (pool.keys.mT, pool.values, *host)]


@pytest.mark.parametrize("head_dim", [16, 6])  # 6: no whole vectors, so torch copies
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_copies_are_those_of_the_cpu(machine, head_dim, dtype):
    device = machine.tensor(torch.zeros(1)).device
    options = {"num_host_blocks": 4, "dtype": dtype}
    own = CudaKvPool(machine.launcher, *SIZES, head_dim, device=device, **options)
    other = KvPool(*SIZES, head_dim, token_major=True, **options)
    for start, (one, two) in enumerate(
        zip(
            (own.keys, own.values, own._host_keys, own._host_values),
            (other.keys, other.values, other._host_keys, other._host_values),
            strict=True,
        )
    ):
        numbers = torch.arange(two.numel()).view(two.shape) % 200 + 256 * start
        if dtype.itemsize == 1:  # each a number of its own
            numbers = ((numbers + 13 * start) % 126).to(torch.uint8).view(dtype)
        two.copy_(numbers)
        one.copy_(numbers)
    chance = np.random.default_rng(3)
    for _ in range(20):
        copies = [
            BlockCopy(*map(int, chance.choice(9, 2, replace=False)), int(chance.integers(0, 9)))
            for _ in range(chance.integers(0, 8))
        ]
        own.copy(copies)
        other.copy(copies)
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert all(map(torch.equal, pages(own), pages(other)))
