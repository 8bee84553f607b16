"""`AdapterPool`: the pages of adapters, on the host and on the device, as flat tensors.

`peft_cache` decides which pages an adapter gets; this module writes and copies them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Lock
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gptmanager.errors import AdapterError
from gptmanager.kernels.lora.adapter_arguments import AdapterModule, StepAdapters
from gptmanager.peft_cache.layout import AdapterRow, CacheSizes, Packing
from gptmanager.peft_cache.manager import PageCopy
from gptmanager.request.adapter import Adapter
from gptmanager.request.adapter_modules import AdapterShare, LoraModule
from gptmanager.request.pieces import PIECE, Pieces, whole

Layout = dict[str, tuple[AdapterModule, ...]]


class AdapterPool:
    """Pages of adapters on the device and on the host.

    `pages [num_device_pages * page_size]` has the device's pages in one tensor that never moves,
    because captured steps contain its address. On a CPU, the system allocates the memory of
    `pages` only where pages are written. The kernels' table has a slot for each device page, which
    is enough because each adapter uses at least one page. An adapter's slot has the places of its
    matrices in `pages`. `modules` are the modules of a layer of the model, by id. `share` is the
    part of an adapter that this rank keeps, or None if the rank keeps whole adapters.

    Host pages are in blocks of `pages_per_block` pages. A block is allocated when a page of the
    block is first written, and freed when no page of the block is in use. Blocks are pinned unless
    the device is the CPU. `warm_up` must be called before the first adapter is read, and may take
    seconds. `put` may run in any thread, `copy` on any stream. Callers must order accesses to the
    same page.
    """

    def __init__(
        self,
        sizes: CacheSizes,
        pages_per_block: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        modules: Mapping[int, LoraModule] = MappingProxyType({}),
        num_layers: int = 0,
        share: AdapterShare | None = None,
        warm_up: Callable[[], None] = lambda: None,
    ) -> None:
        assert dtype.itemsize == sizes.itemsize  # both are of the model's dtype
        self.sizes = sizes
        num_elements = sizes.num_device_pages * sizes.page_size
        self.pages = torch.empty(num_elements, dtype=dtype, device=device)
        self.warm_up = warm_up
        self._pages_per_block = pages_per_block
        self._pinned = self.pages.device.type != "cpu"
        self._modules = {module_id: number for number, module_id in enumerate(modules)}
        self._share = share
        self._layers = range(num_layers) if share is None else share.layers
        self._layout = _layout(modules if share is None else share.modules)
        self._layouts: dict[bytes, Layout] = {}  # by the set of modules that a step uses
        # `[slots, modules]`: whether the adapter in a slot has a module in any layer
        self._has_modules = np.zeros((sizes.num_device_pages, len(modules)), dtype=bool)
        shape = sizes.num_device_pages, len(self._layers), len(modules), 2
        self._table = torch.zeros(shape, dtype=torch.int64, device=device)
        self._num_placed = 0  # calls of `place` so far
        self._last_key: tuple[bytes, int] | None = None
        self._last: StepAdapters | None = None  # the last step's adapters, including kernels' plans
        self._blocks: dict[int, Tensor] = {}
        self._written: set[int] = set()  # host pages that hold adapters
        self._lock = Lock()  # guards `_blocks` and `_written`

    def kept(self, adapter: Adapter) -> list[Tensor]:
        """Return the part of each row that `put` writes; it is empty for layers of other ranks."""
        rows, share = adapter.rows.values(), self._share
        if share is None:
            return [row.values for row in rows]
        return [
            share.cuts[row.layer, row.module_id].of(row)
            if row.layer in share.layers
            else row.values[:0]
            for row in rows
        ]

    def put(
        self,
        host_pages: Sequence[int],
        rows: Sequence[AdapterRow],
        packing: Packing,
        weights: Sequence[Tensor],
    ) -> None:
        """Write an adapter's rows in one call; see `put_in_pieces`."""
        whole(self.put_in_pieces(host_pages, rows, packing, weights))

    def put_in_pieces(
        self,
        host_pages: Sequence[int],
        rows: Sequence[AdapterRow],
        packing: Packing,
        weights: Sequence[Tensor],
    ) -> Pieces[None]:
        """Write an adapter to its host pages.

        `weights[i]` is the `kept` part of `rows[i]`: first A, then B, flattened, in the pool's
        dtype. Raises AdapterError for weights of other shapes or dtypes, before anything is
        written.
        """
        if len(weights) != len(rows):
            raise AdapterError(f"got {len(weights)} tensors for the {len(rows)} rows of an adapter")
        for index, (row, weight) in enumerate(zip(rows, weights, strict=True)):
            is_kept = self._share is None or row.layer in self._share.layers
            size = row.num_elements if is_kept else 0
            if weight.shape != (size,) or weight.dtype != self.pages.dtype:
                raise AdapterError(
                    f"row {index} of an adapter is {weight.dtype} {[*weight.shape]}, "
                    f"not {self.pages.dtype} [{size}]"
                )
        pages = self._allocate(host_pages)
        for weight, (page, offset) in zip(weights, packing.places, strict=True):
            yield from _copy(pages[page][offset : offset + len(weight)], weight)

    def copy(self, copies: Iterable[PageCopy]) -> None:
        """Copy pages in one call; see `copy_in_pieces`."""
        whole(self.copy_in_pieces(copies))

    def copy_in_pieces(self, copies: Iterable[PageCopy]) -> Pieces[None]:
        """Copy the used parts of host pages to the device, on its current stream."""
        for host_page, device_page, num_elements in copies:
            start = device_page * self.sizes.page_size
            source = self._host_page(host_page)[:num_elements]
            yield from _copy(self.pages[start : start + num_elements], source)

    def place(
        self, slot: int, rows: Sequence[AdapterRow], packing: Packing, device_pages: Sequence[int]
    ) -> None:
        """Write an adapter to `slot` of the kernels' table, on the same stream as `copy`."""
        size = self.sizes.page_size
        table = adapter_table(rows, packing, device_pages, size, self._layers, self._modules)
        self._table[slot].copy_(table)
        self._has_modules[slot] = table[..., 1].any(0).numpy()
        self._num_placed += 1

    def step(self, rows: Tensor, slots: npt.NDArray[np.int32] | None = None) -> StepAdapters:
        """Return the adapters of a step's tokens.

        `rows` int32 `[T]` has the slot of each token's adapter, or -1 for a token without one.
        `slots` is a copy of `rows` on the CPU. If `slots` is None, the result has all modules,
        otherwise only the modules of the adapters in these slots. If the device is the CPU, and
        neither `slots` nor the table has changed since the last step, the last step's object is
        returned, because it holds the kernels' plan.
        """
        key = None if slots is None or self._pinned else (slots.tobytes(), self._num_placed)
        if key is not None and key == self._last_key and self._last is not None:
            return self._last
        layout = self._layout if slots is None else self._layout_for(slots)
        step = StepAdapters(self.pages, rows, self._table, layout, self.sizes.max_adapter_size)
        self._last_key, self._last = key, step
        return step

    def _layout_for(self, slots: npt.NDArray[np.int32]) -> Layout:
        """Return the layout without the modules that no adapter in these slots has."""
        needed: npt.NDArray[np.bool_] = np.logical_or.reduce(
            self._has_modules[np.unique(slots[slots >= 0])], axis=0
        )
        key = needed.tobytes()
        if key not in self._layouts:
            self._layouts[key] = {
                matrix: tuple(it for it in modules if needed[it.number])
                for matrix, modules in self._layout.items()
            }
        return self._layouts[key]

    def release(self, host_pages: Iterable[int]) -> None:
        """Release host pages, and free the blocks that have no pages in use."""
        with self._lock:
            self._written.difference_update(host_pages)
            needed = {page // self._pages_per_block for page in self._written}
            for block in self._blocks.keys() - needed:
                del self._blocks[block]

    @property
    def page_nbytes(self) -> int:
        """The number of bytes of a page, on the host or on the device."""
        return self.sizes.page_size * self.sizes.itemsize

    @property
    def nbytes(self) -> int:
        """The number of bytes of the pages and the kernels' table on the device."""
        return self.pages.nbytes + self._table.nbytes

    @property
    def host_nbytes(self) -> int:
        """The number of bytes of all blocks that are currently allocated."""
        with self._lock:
            return sum(block.nbytes for block in self._blocks.values())

    def _allocate(self, host_pages: Sequence[int]) -> list[Tensor]:
        per_block, sizes = self._pages_per_block, self.sizes
        with self._lock:
            self._written.update(host_pages)  # `release` must not free their blocks
            missing = {page // per_block for page in host_pages} - self._blocks.keys()
        for number in missing:  # pinning takes long, so it is done without the lock
            num_pages = min(per_block, sizes.num_host_pages - number * per_block)
            block = torch.empty(
                (num_pages, sizes.page_size), dtype=self.pages.dtype, pin_memory=self._pinned
            )
            with self._lock:
                self._blocks.setdefault(number, block)  # keep the block of a faster thread
        return [self._host_page(page) for page in host_pages]

    def _host_page(self, page: int) -> Tensor:
        block, index = divmod(page, self._pages_per_block)
        return self._blocks[block][index]


def _copy(target: Tensor, source: Tensor) -> Pieces[None]:
    for first in range(0, len(source), PIECE):
        target[first : first + PIECE].copy_(source[first : first + PIECE], non_blocking=True)
        yield


def _layout(modules: Mapping[int, LoraModule]) -> Layout:
    layout: Layout = {}
    for number, module in enumerate(modules.values()):
        for it in module.all_variants:
            own = AdapterModule(number, it.first_column, it.num_columns, it.input_width)
            layout[it.matrix] = (*layout.get(it.matrix, ()), own)
    return layout


def adapter_table(
    rows: Sequence[AdapterRow],
    packing: Packing,
    device_pages: Sequence[int],
    page_size: int,
    layers: range,
    modules: Mapping[int, int],
) -> Tensor:
    """Return an adapter's slot of the kernels' table: int64 `[layers, modules, 2]`, on the CPU.

    The two values are the index of A's first element in `AdapterPool.pages`, and the LoRA rank,
    which is 0 if the adapter does not have the module in the layer. `modules` maps each module id
    to the module's index in the table.
    """
    table = torch.zeros((len(layers), len(modules), 2), dtype=torch.int64)
    found = table.numpy()
    for row, (page, offset) in zip(rows, packing.places, strict=True):
        if row.layer in layers:
            start = device_pages[page] * page_size + offset
            found[row.layer - layers.start, modules[row.module_id]] = start, row.rank
    return table
