"""Pools of more elements than an int can count: pages behind the 2^31st are found."""

from __future__ import annotations

import context_cases as context
import generation_cases as generation
import pytest
import torch
from far_pages import FAR, far_pages
from kernel_values import randn
from paged_rows import PagedRows

from gptmanager.cuda.attention.block_copy import as_tensor, copy_blocks
from gptmanager.cuda.attention.cache_write import rope_and_write
from gptmanager.errors import ConfigError
from gptmanager.kernels.attention.attention_arguments import Pages
from gptmanager.memory.cuda_kv_pool import CudaKvPool
from gptmanager.memory.kv_pool import PageShape

HEAD_DIM, TOKENS = 256, 64
NUM_FAR = {dim: FAR // (dim * TOKENS) for dim in (64, 128, HEAD_DIM)}  # blocks of one KV head


class FarRows(PagedRows):
    def __post_init__(self):
        super().__post_init__()
        self.num_far = NUM_FAR[self.head_dim]
        self.block_tables[self.block_tables >= 0] += self.num_far

    def pages_on(self, machine):
        keys, values = (far_pages(machine, own, self.num_far) for own in (self.keys, self.values))
        return Pages(keys.mT, values, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("attention", [generation, context], ids=["generation", "context"])
def test_attention(machine, attention, dtype):
    attention.check(machine, FarRows([(1, 130)], 2, 1, 64, TOKENS, dtype))


def test_attention_by_warpgroups(machine, monkeypatch):
    context.choosing(machine, "warpgroups", monkeypatch)
    context.check(machine, FarRows([(1, 130)], 2, 1, 128, TOKENS))


def test_writes(machine):
    own = torch.zeros(2, 1, TOKENS, HEAD_DIM, dtype=torch.bfloat16)
    num_far = NUM_FAR[HEAD_DIM]
    keys, values = (far_pages(machine, own, num_far) for _ in range(2))
    qkv = randn(1, 3 * HEAD_DIM, dtype=torch.bfloat16)
    cell = torch.tensor([(num_far + 1) * TOKENS + 5], dtype=torch.int32)
    given = [qkv, torch.zeros(1, dtype=torch.int64), cell]
    queries = machine.empty((1, 1, HEAD_DIM), torch.bfloat16)
    rope_and_write(machine.launcher, queries, *map(machine.tensor, given), Pages(keys.mT, values))
    for pages, new in ((keys, qkv[0, HEAD_DIM : 2 * HEAD_DIM]), (values, qkv[0, 2 * HEAD_DIM :])):
        expected = own.clone()
        expected[1, 0, 5] = new
        assert torch.equal(pages[num_far:].cpu(), expected)


def test_copies(machine):
    """Blocks of 16 bytes, of two layers: more than 2^31 of them."""
    own = randn(3, 1, 1, 8, dtype=torch.bfloat16)
    pages = far_pages(machine, own, FAR + 1)
    last = (FAR + 4) // 2 - 1  # the last block of each layer
    layers = pages.view(2, last + 1, 1, 1, 8)
    copies = machine.tensor(as_tensor([(last, last - 2, 1)], "cpu"))
    copy_blocks(machine.launcher, layers, layers, copies)
    assert torch.equal(pages[FAR + 1 :].cpu(), own[[2, 1, 2]])


def test_a_pool_of_more_rows_than_kernels_count(machine):
    """A row is a token's key of one head. Nothing is allocated."""
    with pytest.raises(ConfigError, match=r"33554432 blocks .* 2147483648 rows per layer"):
        CudaKvPool(machine.launcher, [PageShape(8, 2**20)], 2**25, 8, device=torch.device("meta"))
