"""The layout of adapters in pages: page size, number of pages, and the place of each row.

A row has the weights of an adapter for one module in one layer. Sizes are in elements of the
model's dtype. This module does not know which adapters are cached.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gptmanager.config import PeftCacheManagerConfig
from gptmanager.errors import AdapterError

# Rows begin at multiples of this number of elements, so that kernels can read 16 bytes at a time.
ALIGNMENT = 8

_ATTN_QKV, _ITS_PARTS = 0, {1, 2, 3}  # module ids; the parts are attn_q, attn_k and attn_v


class AdapterRow(NamedTuple):
    """The shape of one module's row in one layer: A `[rank, inputs]`, then B `[outputs, rank]`."""

    layer: int
    module_id: int
    rank: int
    num_elements: int


class RowPlace(NamedTuple):
    """The place of a row: the index of a page of the adapter, and the element where A begins."""

    page: int
    offset: int


class Packing(NamedTuple):
    """The place of each row of an adapter, and the number of elements used in each page."""

    places: tuple[RowPlace, ...]
    lengths: tuple[int, ...]


class CacheSizes(NamedTuple):
    """The sizes of an adapter cache.

    `page_size` is the number of elements of a page, and `itemsize` the bytes of an element.
    `max_adapter_size` is the highest LoRA rank. `first_layers` holds the index of the first layer
    of each pipeline stage except the first stage.
    """

    page_size: int
    num_host_pages: int
    num_device_pages: int
    itemsize: int
    max_adapter_size: int
    first_layers: tuple[int, ...] = ()


def cache_sizes(
    config: PeftCacheManagerConfig,
    widths: Mapping[int, int],
    num_layers: int,
    itemsize: int,
    free_device_bytes: int,
    first_layers: tuple[int, ...] = (),
) -> CacheSizes:
    """Return the sizes of a cache for a model with `num_layers` layers.

    `widths` maps a module id to the module's number of inputs plus outputs. All pipeline stages
    get the sizes that the stage with the most layers needs.

    A page is large enough for an adapter of rank `optimal_adapter_size` in all layers of a stage
    and all modules (without attn_qkv if the model has attn_q, attn_k and attn_v), and for a single
    row of rank `max_adapter_size` of any module. `num_host_module_layer` is a number of rows: the
    host pages of all stages together have space for that many rows of rank 1 of the widest module.
    `num_device_module_layer` is the same for the device pages. If `num_host_module_layer` is 0, the
    host pages fill `host_cache_size` bytes. If `num_device_module_layer` is 0, the device pages
    fill the fraction `device_cache_percent` of `free_device_bytes`. Both numbers of bytes are
    rounded down to whole pages.
    """
    borders = 0, *first_layers, num_layers
    most = max(end - first for first, end in itertools.pairwise(borders))
    whole = set(widths) - ({_ATTN_QKV} if _ITS_PARTS <= set(widths) else set())
    rank, highest = config.optimal_adapter_size, config.max_adapter_size
    page_size = max(
        most * sum(_aligned(rank * widths[module_id]) for module_id in whole),
        max(_aligned(highest * width) for width in widths.values()),
    )

    def num_pages(num_rows: int, num_bytes: int) -> int:
        if num_rows:
            own_rows = -(-num_rows * most // num_layers)
            return -(-own_rows * max(widths.values()) // page_size)
        return num_bytes // (page_size * itemsize)

    device_bytes = int(config.device_cache_percent * free_device_bytes)
    return CacheSizes(
        page_size,
        num_pages(config.num_host_module_layer, config.host_cache_size),
        num_pages(config.num_device_module_layer, device_bytes),
        itemsize,
        highest,
        first_layers,
    )


def pack(rows: Sequence[AdapterRow], page_size: int, first_layers: Sequence[int] = ()) -> Packing:
    """Pack rows into pages by first-fit decreasing (Johnson 1973).

    The longest row is placed first. Each row is put into the first page with enough space. The
    result has at most 11/9 of the fewest possible pages, plus one. Each pipeline stage puts the
    rows of its layers into its own pages. So that all stages make the same decisions, every stage
    takes as many pages as the stage that needs the most. Raise AdapterError if a row is longer than
    a page.
    """
    places = [RowPlace(0, 0)] * len(rows)
    by_stage: list[list[int]] = [[] for _ in range(len(first_layers) + 1)]
    for index in sorted(range(len(rows)), key=lambda index: -rows[index].num_elements):
        size = _aligned(rows[index].num_elements)
        if size > page_size:
            raise AdapterError(
                f"row {index} of the adapter (layer {rows[index].layer}, module "
                f"{rows[index].module_id}, adapter_size {rows[index].rank}) has "
                f"{rows[index].num_elements} elements; a page holds at most {page_size}"
            )
        lengths = by_stage[bisect.bisect_right(first_layers, rows[index].layer)]
        page = next((p for p, used in enumerate(lengths) if used + size <= page_size), None)
        if page is None:
            page = len(lengths)
            lengths.append(0)
        places[index] = RowPlace(page, lengths[page])
        lengths[page] += size
    lengths = [max(used) for used in itertools.zip_longest(*by_stage, fillvalue=0)]
    return Packing(tuple(places), tuple(lengths))


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
