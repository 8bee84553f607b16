"""Where keys and values lie in a `KvPool`, and what is read back of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from gptmanager.environment.machine import memory
from gptmanager.kv_cache.block import BlockCopy
from gptmanager.memory import KvPool, PageShape

LAYOUTS = {"paged": {}, "token-major": {"token_major": True}, "contiguous": {"contiguous": True}}


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS)
def pool(request):
    """2 layers, 3 blocks of 5 tokens, 4 KV heads of 6, each element another number."""
    pool = KvPool([PageShape(4, 6)] * 2, 3, 5, **request.param)
    for start, pages in ((0, pool.keys), (720, pool.values)):
        pages.copy_(torch.arange(start, start + 720.0).view(pages.shape))
    return pool


def test_contiguous_shows_a_layer_whatever_the_layout(pool):
    assert (pool.keys.shape, pool.values.shape) == ((2, 3, 4, 6, 5), (2, 3, 4, 5, 6))
    assert pool.nbytes == 2 * 720 * 4
    for layer in range(2):
        shown = pool.contiguous(layer)
        assert shown.shape == (3, 2, 4, 5, 6) and shown.is_contiguous()
        assert torch.equal(shown[:, 0], pool.keys[layer].mT)
        assert torch.equal(shown[:, 1], pool.values[layer])


def test_beginnings_are_copied_whatever_the_layout(pool):
    before = pool.contiguous(1).clone()
    pool.copy([BlockCopy(0, 2, 3)])
    after = pool.contiguous(1)
    assert torch.equal(after[2, :, :, :3], before[0, :, :, :3])
    assert torch.equal(after[2, :, :, 3:], before[2, :, :, 3:])
    assert torch.equal(after[:2], before[:2])


def test_layers_of_other_shapes_have_pages_of_their_own():
    shapes = [PageShape(4, 6), PageShape(1, 16, has_values=False), PageShape(2, 8), PageShape(4, 6)]
    pool = KvPool(shapes, 3, 5, num_host_blocks=2)
    assert pool.nbytes == 3 * KvPool.bytes_per_block(shapes, 5) == 3 * 5 * (48 + 16 + 32 + 48) * 4
    assert pool.host_nbytes == 2 * KvPool.bytes_per_block(shapes, 5)
    for number, (keys, values) in enumerate(pool.layers):
        keys.fill_(number)
        values[0].fill_(number + 10)
    for shape, (keys, values) in zip(shapes, pool.layers, strict=True):
        assert keys.shape == (3, shape.num_kv_heads, shape.head_dim, 5)
        assert torch.equal(keys.mT, values) is not shape.has_values
        assert keys.is_contiguous() is shape.has_values  # [head_dim, tokens] in memory
    pool.copy([BlockCopy(0, 4, 2), BlockCopy(4, 2, 2)])
    for number, (_, values) in enumerate(pool.layers):
        assert (values[2, :, :2] == number + 10).all()


def test_a_contiguous_pool_shows_its_own_memory():
    pool = KvPool([PageShape(4, 6)] * 2, 3, 5, contiguous=True)
    for layer in range(2):
        shown = pool.contiguous(layer)
        assert shown.data_ptr() == pool.keys[layer].data_ptr()
        assert shown[:, 1].data_ptr() == pool.values[layer].data_ptr()


def flags_at(address):
    """Return the flags of the memory mapping that has this address, such as {"rd", "wr"}."""
    found, flags = False, set()
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds:
            found = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif found and line.startswith("VmFlags:"):
            flags = set(line.split()[1:])
    return flags


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="this system has no huge pages that a program may ask for",
)
def test_a_pool_asks_for_huge_pages():
    pool = KvPool([PageShape(2, 64)] * 2, 256, 64)  # 16 MiB of keys, and of values
    for tensor in pool.memory:
        assert "hg" in flags_at(tensor.data_ptr() + tensor.nbytes // 2)
    small = KvPool([PageShape(1, 1)], 1, 1)  # less than a page
    assert all(tensor.nbytes < 4096 for tensor in small.memory)


def test_a_pool_needs_no_huge_pages(monkeypatch):
    monkeypatch.setattr(memory, "_HUGE_PAGES", None)
    assert KvPool([PageShape(2, 64)], 256, 64).nbytes == 2 * 256 * 2 * 64 * 64 * 4
    assert memory.zeroed_memory(5)[:] == bytes(5)  # for weights
