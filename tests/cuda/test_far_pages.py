"""Pools of more elements than an int can count: pages behind the 2^31st are found."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import test_context_attention as context
import test_generation_attention as generation
import torch
from kernel_values import randn
from paged_rows import PagedRows
from separate_device import DeviceTensor

from gptmanager.cuda.block_copy import as_tensor, copy_blocks
from gptmanager.cuda.cache_write import rope_and_write
from gptmanager.errors import ConfigError
from gptmanager.kernels.attention_arguments import Pages
from gptmanager.memory.device_kv_pool import DeviceKvPool

FAR = 2**31
HEAD_DIM, TOKENS = 256, 64
NUM_FAR = FAR // (HEAD_DIM * TOKENS)  # blocks of one KV head
_NORESERVE = 0x4000  # no memory for what is not written to; `mmap` names it from Python 3.13 on


def far_pages(machine, own, num_far=NUM_FAR):
    """`own` pages `[blocks, 1, TOKENS, HEAD_DIM]` behind so many others. Of these only a GPU has
    the memory.
    """
    shape = (num_far + len(own), *own.shape[1:])
    size = int(np.prod(shape)) * own.itemsize
    if machine.tensor(own).device.type == "cuda":
        if 2 * size > torch.cuda.mem_get_info()[0]:
            pytest.skip(f"this GPU has not twice {size} bytes")
        pages = torch.empty(shape, dtype=own.dtype, device="cuda")
        pages[num_far:] = own.cuda()
        return pages
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    memory = mmap.mmap(-1, size, flags=flags)
    pages = torch.frombuffer(memory, dtype=torch.uint8).view(own.dtype).view(shape)
    pages[num_far:] = own
    return DeviceTensor(pages)


class FarRows(PagedRows):
    def __post_init__(self):
        super().__post_init__()
        self.block_tables[self.block_tables >= 0] += NUM_FAR

    def pages_on(self, machine):
        return Pages(far_pages(machine, self.keys).mT, far_pages(machine, self.values), None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("attention", [generation, context], ids=["generation", "context"])
def test_attention(machine, attention, dtype):
    attention.check(machine, FarRows([(1, 130)], 2, 1, HEAD_DIM, TOKENS, dtype))


def test_writes(machine):
    own = torch.zeros(2, 1, TOKENS, HEAD_DIM, dtype=torch.bfloat16)
    keys, values = far_pages(machine, own), far_pages(machine, own)
    qkv = randn(1, 3 * HEAD_DIM, dtype=torch.bfloat16)
    cell = torch.tensor([(NUM_FAR + 1) * TOKENS + 5], dtype=torch.int32)
    given = [qkv, torch.zeros(1, dtype=torch.int64), cell]
    queries = machine.empty((1, 1, HEAD_DIM), torch.bfloat16)
    rope_and_write(machine.launcher, queries, *map(machine.tensor, given), Pages(keys.mT, values))
    for pages, new in ((keys, qkv[0, HEAD_DIM : 2 * HEAD_DIM]), (values, qkv[0, 2 * HEAD_DIM :])):
        expected = own.clone()
        expected[1, 0, 5] = new
        assert torch.equal(pages[NUM_FAR:].cpu(), expected)


def test_copies(machine):
    """Which are of 16 bytes: more than 2^31 of these."""
    own = randn(3, 1, TOKENS, HEAD_DIM, dtype=torch.bfloat16)
    far = 16 // own.itemsize * NUM_FAR
    pages = far_pages(machine, own, far)
    copies = machine.tensor(as_tensor([(far + 2, far, TOKENS)], "cpu"))
    copy_blocks(machine.launcher, pages[None], pages[None], copies)
    assert torch.equal(pages[far:].cpu(), own[[2, 1, 2]])


def test_a_pool_of_more_rows_than_kernels_count(machine):
    """A row is a token's key of one head. Nothing is allocated."""
    with pytest.raises(ConfigError, match=r"33554432 blocks .* 2147483648 rows of a layer"):
        DeviceKvPool(machine.launcher, 1, 2**25, 8, 8, 2**20, device=torch.device("meta"))
