"""What lies where in an `AdapterPool`, bit for bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from gptmanager.errors import AdapterError
from gptmanager.kernels import CpuKernels
from gptmanager.memory import AdapterPool, adapter_table
from gptmanager.peft_cache import AdapterRow, CacheSizes, PageCopy, PeftCacheManager
from gptmanager.peft_cache.layout import pack
from gptmanager.request.adapter_modules import LoraModule

SIZES = CacheSizes(64, 5, 3, 2, 8)
# Rank 2 of 6 in and 5 out, rank 3 of 5 and 6, rank 4 of 8 and 5: in that order.
ROWS = (AdapterRow(0, 1, 2, 22), AdapterRow(1, 4, 3, 33), AdapterRow(0, 5, 4, 52))
WIDTHS = {1: (6, 5), 4: (5, 6), 5: (8, 5)}
DTYPES = [torch.bfloat16, torch.float16]


def weights(seed, dtype=torch.bfloat16):
    """Any bits at all, NaN among them."""
    made = torch.Generator().manual_seed(seed)
    return [
        torch.randint(-(2**15), 2**15, (row.num_elements,), generator=made, dtype=torch.int16).view(
            dtype
        )
        for row in ROWS
    ]


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_come_to_their_places_and_the_table_says_where(dtype):
    packing = pack(ROWS, SIZES.page_size)
    assert packing.places == ((1, 40), (1, 0), (0, 0))
    pool = AdapterPool(SIZES, 2, dtype)
    pool.pages.fill_(1)
    pool.put((3, 0), ROWS, packing, weights(1, dtype))
    pool.copy([PageCopy(3, 2, packing.lengths[0]), PageCopy(0, 1, packing.lengths[1])])

    table = adapter_table(ROWS, packing, (2, 1), SIZES.page_size, range(2), {1: 0, 4: 1, 5: 2})
    assert table.dtype == torch.int64
    assert table.tolist() == [
        [[64 + 40, 2], [0, 0], [2 * 64, 4]],
        [[0, 0], [64, 3], [0, 0]],
    ]  # fmt: skip
    for row, right in zip(ROWS, weights(1, dtype), strict=True):
        start, rank = table[row.layer, {1: 0, 4: 1, 5: 2}[row.module_id]].tolist()
        inputs, outputs = WIDTHS[row.module_id]
        middle = start + rank * inputs
        assert same_bits(pool.pages[start:middle], right[: rank * inputs])  # A
        end = middle + outputs * rank
        assert same_bits(pool.pages[middle:end], right[rank * inputs :])  # B
    assert torch.equal(pool.pages[:64], torch.ones(64, dtype=dtype))
    assert torch.equal(pool.pages[2 * 64 + 56 :], torch.ones(8, dtype=dtype))


def test_a_rank_has_no_entries_for_the_layers_of_others():
    packing, modules = pack(ROWS, 64), {1: 0, 4: 1, 5: 2}
    whole = adapter_table(ROWS, packing, (2, 1), 64, range(2), modules)
    for layer in range(2):
        own = adapter_table(ROWS, packing, (2, 1), 64, range(layer, layer + 1), modules)
        assert torch.equal(own, whole[layer : layer + 1])


def test_sizes_in_bytes():
    pool = AdapterPool(SIZES, 2, torch.bfloat16)
    assert (pool.nbytes, pool.host_nbytes) == (3 * 64 * 2, 0)
    where = pool.pages.data_ptr()
    packing = pack(ROWS, 64)
    pool.put((0, 1), ROWS, packing, weights(1))
    assert pool.host_nbytes == 2 * 64 * 2
    pool.put((2, 4), ROWS, packing, weights(2))
    assert pool.host_nbytes == 5 * 64 * 2  # the last block has one page
    pool.release([0])
    assert pool.host_nbytes == 5 * 64 * 2
    pool.release([1, 4])
    assert pool.host_nbytes == 2 * 64 * 2
    pool.copy([PageCopy(2, 0, 56)])
    assert same_bits(pool.pages[:52], weights(2)[2])
    pool.release([2])
    assert pool.host_nbytes == 0 and pool.pages.data_ptr() == where


def test_what_does_not_fit_its_row_is_refused_before_anything_is_written():
    packing = pack(ROWS, 64)
    right = weights(1)
    wrong = {
        r"got 2 tensors for the 3 rows": right[:2],
        r"row 2 .* \[51\], not torch.bfloat16 \[52\]": [*right[:2], right[2][:51]],
        r"row 1 .* \[1, 33\], not": [right[0], right[1][None], right[2]],
        r"row 0 .*torch.float16 \[22\], not": [right[0].half(), *right[1:]],
    }
    pool = AdapterPool(SIZES, 2, torch.bfloat16)
    for text, given in wrong.items():
        with pytest.raises(AdapterError, match=text):
            pool.put((0, 1), ROWS, packing, given)
    assert pool.host_nbytes == 0


def test_threads_may_put_at_once():
    sizes = CacheSizes(64, 40, 40, 2, 8)
    packing = pack(ROWS, 64)
    pool = AdapterPool(sizes, 8, torch.bfloat16)
    with ThreadPoolExecutor(4) as workers:
        list(workers.map(lambda i: pool.put((i, i + 20), ROWS, packing, weights(i)), range(20)))
    pool.copy(PageCopy(page, page, 64) for page in range(40))
    for i in range(20):
        first, second = pool.pages[i * 64 :], pool.pages[(i + 20) * 64 :]
        for (page, offset), right in zip(packing.places, weights(i), strict=True):
            assert same_bits((first, second)[page][offset : offset + len(right)], right)


def test_accounts_and_pages_together():
    """Six adapters through two device pages at a time, each whole when its request runs."""
    cache = PeftCacheManager(SIZES)
    pool = AdapterPool(SIZES, 2, torch.bfloat16)
    for task in (0, 1, 0, 2, 3, 1, 4, 5, 0):
        if task in cache:
            cache.use(task, task)
            adapter = cache.adapter_of(task)
        else:
            cache.put(task, task, str(task), ROWS)
            pool.release(cache.take_freed())
            adapter = cache.adapter_of(task)
            pool.put(cache.host_pages(adapter), ROWS, adapter.packing, weights(task))
            cache.loaded(adapter)
        pool.copy(cache.ensure(task))
        cache.copied(adapter)
        device_pages = cache.device_pages(adapter)
        for (page, offset), right in zip(adapter.packing.places, weights(task), strict=True):
            start = device_pages[page] * 64 + offset
            assert same_bits(pool.pages[start : start + len(right)], right)
        cache.release(task)
        cache.check()
    assert cache.counts().host_evictions > 3


def test_steps_of_the_same_tokens_are_one_until_an_adapter_is_placed():
    modules = {1: LoraModule("qkv", 0, 24, 16)}
    row = AdapterRow(0, 1, 2, 2 * (modules[1].input_width + modules[1].num_columns))
    sizes = CacheSizes(row.num_elements, 2, 2, 2, 8)
    pool = AdapterPool(sizes, 2, torch.bfloat16, modules=modules, num_layers=1)
    packing = pack((row,), sizes.page_size)

    def step(*slots):
        return pool.step(torch.tensor(slots, dtype=torch.int32), np.array(slots, dtype=np.int32))

    pool.place(0, (row,), packing, (0,))
    first = step(0, -1)
    kernels = CpuKernels()
    assert kernels.begin_adapters(first) is first
    plan = first.plan
    assert step(0, -1) is first
    assert kernels.begin_adapters(first) is first and first.plan is plan
    assert replace(first).plan is None, "what is planned is of one step's tensors"
    assert step(-1, 0) is not first
    before = step(1, -1)
    assert kernels.begin_adapters(before) is None
    pool.place(1, (row,), packing, (1,))
    after = step(1, -1)
    assert after is not before
    assert kernels.begin_adapters(after) is after
    unknown = [pool.step(torch.tensor([0], dtype=torch.int32)) for _ in range(2)]
    assert unknown[0] is not unknown[1]
