"""Attention of other libraries on the same keys and values: FlashInfer, if installed, and torch.

Inputs are converted to a peer's layout before the clock starts. Plans that are made once per step
are timed separately.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptmanager.bench.kernels.cases import Absent, Contender, Planned
from gptmanager.bench.kernels.paged_rows import PagedRows

_WORKSPACE = 128 << 20


def flashinfer() -> Any:
    """Return the module `flashinfer`. Raise Absent if the module is not installed."""
    try:
        import flashinfer
    except ImportError as error:
        raise Absent("not installed") from error
    return flashinfer


def flashinfer_generation(sets: Sequence[PagedRows]) -> Contender:
    """Return FlashInfer's paged decode kernel, with tensor cores."""
    wrap, workspace = flashinfer().BatchDecodeWithPagedKVCacheWrapper, _workspace(sets)
    wrappers = [wrap(workspace, kv_layout="HND", use_tensor_cores=True) for _ in sets]
    return _planned(sets, wrappers, [_page_lists(rows) for rows in sets])


def flashinfer_context(sets: Sequence[PagedRows], backend: str) -> Contender:
    """Return FlashInfer's paged prefill kernel. `backend`: `fa2` or `fa3`."""
    wrap, workspace = flashinfer().BatchPrefillWithPagedKVCacheWrapper, _workspace(sets)
    wrappers = [wrap(workspace, "HND", backend=backend) for _ in sets]
    lists = [(rows.spans.row_starts.cpu(), *_page_lists(rows)) for rows in sets]
    return _planned(sets, wrappers, lists, causal=True)


def _planned(
    sets: Sequence[PagedRows], wrappers: Sequence[Any], lists: Sequence[Any], **options: Any
) -> Planned:
    """Plan each wrapper with its page lists, and return the wrappers as one contender.

    The first plan compiles the kernel.
    """
    plans = []
    for rows, wrapper, own in zip(sets, wrappers, lists, strict=True):
        options |= {"q_data_type": rows.queries.dtype, "kv_data_type": rows.pages.keys.dtype}
        arguments = (*own, *rows.shape[:3], rows.tokens_per_block)
        plans.append(functools.partial(wrapper.plan, *arguments, **options))
        plans[-1]()

    def run(number: int) -> Any:
        rows = sets[number]
        return wrappers[number].run(rows.queries, rows.token_major)

    return Planned(run, plans[0])


def torch_sdpa(sets: Sequence[PagedRows]) -> Contender:
    """Return `scaled_dot_product_attention` over dense keys and values.

    Raise Absent unless all rows have the same length, and each has one new token or only new ones.
    """
    first = sets[0]
    new, length = int(first.num_new[0]), int(first.lengths[0])
    alike = (first.num_new == new).all() and (first.lengths == length).all()
    if not alike or new not in (1, length):
        raise Absent("requires rows of one length, each with one new token or only new ones")
    dense = []
    for rows in sets:
        queries = rows.queries.view(-1, new, *rows.queries.shape[1:]).transpose(1, 2).contiguous()
        pairs = [rows.history(row) for row in range(len(rows.lengths))]
        keys, values = (
            torch.stack(it).transpose(1, 2).contiguous() for it in zip(*pairs, strict=True)
        )
        dense.append((queries, keys, values))

    def run(number: int) -> Tensor:
        attended = F.scaled_dot_product_attention(
            *dense[number], is_causal=new > 1, scale=first.shape.scale, enable_gqa=True
        )
        return attended.transpose(1, 2).flatten(0, 1)

    return run


def torch_varlen(sets: Sequence[PagedRows]) -> Contender:
    """Return `varlen_attn` over packed keys and values: torch's FlashAttention, for any lengths.

    Raise Absent if torch has no `varlen_attn`, or if that function lacks a parameter used here.
    """
    attend = _find_varlen()
    names = inspect.signature(attend).parameters
    missing = {"scale", "window_size"} - names.keys()
    if missing:
        raise Absent(f"torch {torch.__version__}'s varlen_attn has no {', '.join(sorted(missing))}")
    packed = []
    for rows in sets:
        pairs = [rows.history(row) for row in range(len(rows.lengths))]
        keys, values = (torch.cat(it) for it in zip(*pairs, strict=True))
        starts = F.pad(rows.spans.kv_lengths.cumsum(0, dtype=torch.int32), (1, 0))
        longest = (int(rows.num_new.max()), int(rows.lengths.max()))
        packed.append((rows.queries, keys, values, rows.spans.row_starts, starts, *longest))

    # a version without this parameter always supports grouped queries
    grouped = {"enable_gqa": True} if "enable_gqa" in names else {}

    def run(number: int) -> Any:
        options = {"window_size": (-1, 0), "scale": sets[number].shape.scale, **grouped}
        return attend(*packed[number], **options)

    return run


def _find_varlen() -> Any:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise Absent(f"torch {torch.__version__} has no varlen_attn") from error
    return varlen_attn


def _workspace(sets: Sequence[PagedRows]) -> Tensor:
    """Return a workspace for all sets, which run one at a time."""
    return torch.zeros(_WORKSPACE, dtype=torch.uint8, device=sets[0].queries.device)


def _page_lists(rows: PagedRows) -> tuple[Tensor, Tensor, Tensor]:
    """Return the row starts in a list of pages, the list, and the token count of each last page.

    The first and the third tensor are in CPU memory, because FlashInfer plans on the host, and a
    server has these numbers there. If they were on the device, each plan would wait for a copy.
    """
    lengths, tables = rows.spans.kv_lengths, rows.spans.block_tables
    counts = -(-lengths // rows.tokens_per_block)
    starts = F.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    pages = torch.cat([tables[row, :count] for row, count in enumerate(counts.tolist())])
    last = (lengths - 1) % rows.tokens_per_block + 1
    return starts.cpu(), pages, last.cpu()
