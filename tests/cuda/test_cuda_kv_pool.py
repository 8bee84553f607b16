"""Copies of blocks within a device, to pinned memory and back, in order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gptmanager.cuda.attention import block_copy
from gptmanager.kv_cache.block import BlockCopy
from gptmanager.memory import cuda_kv_pool
from gptmanager.memory.cuda_kv_pool import CudaKvPool
from gptmanager.memory.kv_pool import KvPool, PageShape

SIZES = (5, 8)  # blocks, tokens of a block


def pages(pool):
    return [it.cpu() for stack in (*pool.stacks, *pool.host_stacks) for it in stack.tokens]


@pytest.mark.parametrize("head_dim", [16, 6])  # 6: no whole vectors, so torch copies
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_copies_are_those_of_the_cpu(machine, head_dim, dtype, monkeypatch):
    launched = []

    def copy_blocks(*given):
        launched.append(given)
        block_copy.copy_blocks(*given)

    monkeypatch.setattr(cuda_kv_pool, "copy_blocks", copy_blocks)
    device = machine.tensor(torch.zeros(1)).device
    options = {"num_host_blocks": 4, "dtype": dtype}
    once = PageShape(1, 4 * head_dim, has_values=False)
    shapes = [PageShape(3, head_dim), once, PageShape(1, 2 * head_dim), PageShape(3, head_dim)]
    own = CudaKvPool(machine.launcher, shapes, *SIZES, device=device, **options)
    other = KvPool(shapes, *SIZES, token_major=True, **options)
    stacks = zip(*([*it.stacks, *it.host_stacks] for it in (own, other)), strict=True)
    both = [pair for one, two in stacks for pair in zip(one.tokens, two.tokens, strict=True)]
    for start, (one, two) in enumerate(both):
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
    assert bool(launched) == (head_dim == 16)
