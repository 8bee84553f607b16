"""`FlashInferAttention`: attention by the library FlashInfer on our pages, which are in the layout
that FlashInfer calls "HND".
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gptmanager.cuda.attention.flash_attention import why_special
from gptmanager.kernels.attention.attention_arguments import AttentionShape, Pages
from gptmanager.kernels.providers import AttentionRows

HEAD_DIMS = (64, 128, 256)
_WORKSPACE_BYTES = 128 << 20
_NUM_WRAPPERS = 2  # the number of steps that may be in flight


class _PageLists(NamedTuple):
    """The page indices of all R rows, in FlashInfer's form: int32 tensors.

    Row r has the pages `pages[starts[r]:starts[r + 1]]`, from the first page that it sees on. The
    last of these pages has `last_tokens[r]` tokens. `starts` and `last_tokens` are in CPU memory,
    where FlashInfer plans.
    """

    starts: Tensor
    pages: Tensor
    last_tokens: Tensor


class _Wrappers:
    """FlashInfer's wrappers for one phase and shape, each with pinned memory for its plan.

    The copy of a plan to the device is asynchronous, so the pinned memory must not be written again
    before the copy is done. Steps alternate between wrappers, so that a step seldom waits for the
    copy of an earlier plan.
    """

    def __init__(self, new_wrapper: Any, device: torch.device) -> None:
        new_event: Any = torch.cuda.Event
        self._all = [new_wrapper() for _ in range(_NUM_WRAPPERS)]
        self._copied: list[Any] = [
            new_event() if device.type == "cuda" else None for _ in self._all
        ]
        self._number = 0

    def planned(self, *arguments: Any, **options: Any) -> Any:
        """Return the next wrapper, after it has planned with these arguments."""
        self._number = (self._number + 1) % len(self._all)
        wrapper, copied = self._all[self._number], self._copied[self._number]
        if copied is not None:
            copied.synchronize()  # returns at once for an event that was never recorded
        wrapper.plan(*arguments, **options)
        if copied is not None:
            copied.record()
        return wrapper


class FlashInferAttention:
    """An `AttentionProvider` that calls `library`, the imported module `flashinfer`.

    Each step plans on the CPU, once per phase and shape, so steps are not captured in CUDA graphs.
    """

    name, capturable = "flashinfer", False

    def __init__(self, library: Any, device: torch.device) -> None:
        self._library, self._device = library, device
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[tuple[bool, AttentionShape], _Wrappers] = {}

    def refusal(
        self, shape: AttentionShape, dtype: torch.dtype, tokens_per_block: int
    ) -> str | None:
        if shape.head_dim not in HEAD_DIMS:
            return f"head_dim = {shape.head_dim} must be one of {HEAD_DIMS}"
        return why_special(shape, dtype)

    def attend_generation(
        self,
        queries: Tensor,
        pages: Pages,
        rows: AttentionRows,
        shape: AttentionShape,
        sinks: Tensor | None,
    ) -> Tensor:
        return self._attend(queries, pages, rows, shape, is_context=False)

    def attend_context(
        self,
        queries: Tensor,
        pages: Pages,
        rows: AttentionRows,
        shape: AttentionShape,
        sinks: Tensor | None,
    ) -> Tensor:
        return self._attend(queries, pages, rows, shape, is_context=True)

    def _attend(
        self,
        queries: Tensor,
        pages: Pages,
        rows: AttentionRows,
        shape: AttentionShape,
        *,
        is_context: bool,
    ) -> Tensor:
        wrapper = rows.memo.get(shape)
        if wrapper is None:
            wrapper = self._planned(pages, rows, shape, queries.dtype, is_context)
            rows.memo[shape] = wrapper
        found: Tensor = wrapper.run(queries, (pages.keys.mT, pages.values))
        return found

    def _planned(
        self,
        pages: Pages,
        rows: AttentionRows,
        shape: AttentionShape,
        dtype: torch.dtype,
        is_context: bool,
    ) -> Any:
        wrappers = self._wrappers.get((is_context, shape))
        if wrappers is None:
            new_wrapper = self._new_prefill if is_context else self._new_decode
            wrappers = self._wrappers[is_context, shape] = _Wrappers(new_wrapper, self._device)
        tokens_per_block = pages.values.shape[2]
        key = "page lists", shape.window
        lists = rows.memo.get(key)
        if lists is None:
            lists = rows.memo[key] = _page_lists(rows, shape, tokens_per_block)
        options: dict[str, Any] = {
            "sm_scale": shape.scale,
            "window_left": -1 if shape.window is None else shape.window - 1,
            "logits_soft_cap": shape.softcap or None,
            "q_data_type": dtype,
            "kv_data_type": pages.values.dtype,
        }
        arguments = (*lists, *shape[:3], tokens_per_block)
        if is_context:
            assert rows.lengths is not None
            arguments = torch.from_numpy(rows.lengths.row_starts), *arguments
            options["causal"] = True
        return wrappers.planned(*arguments, **options)

    def _new_prefill(self) -> Any:
        return self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND")

    def _new_decode(self) -> Any:
        wrap = self._library.BatchDecodeWithPagedKVCacheWrapper
        return wrap(self._workspace, "HND", use_tensor_cores=True)


def _page_lists(rows: AttentionRows, shape: AttentionShape, tokens_per_block: int) -> _PageLists:
    """Return the page lists of a layer, without the pages before each row's window.

    Those pages may belong to other rows, and hold NaN: FlashInfer may read all pages in its list.
    """
    assert rows.lengths is not None  # None only in captured steps
    lengths = rows.lengths.kv_lengths.astype(np.int64)
    seen_from = shape.first_seen(lengths - np.diff(rows.lengths.row_starts))
    skipped = np.maximum(seen_from, 0) // tokens_per_block
    counts = -(-lengths // tokens_per_block) - skipped
    ends = np.cumsum(counts)
    first = np.arange(len(counts)) * rows.block_tables.shape[1] + skipped
    places = np.arange(counts.sum()) + np.repeat(first - ends + counts, counts)
    index = torch.from_numpy(places).to(rows.block_tables.device, non_blocking=True)
    return _PageLists(
        torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32)),
        rows.block_tables.view(-1).index_select(0, index),
        torch.from_numpy(((lengths - 1) % tokens_per_block + 1).astype(np.int32)),
    )
