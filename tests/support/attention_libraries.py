"""FlashInfer and flash-attn in torch: the calls that we make, as their documentation defines them.

Also a provider of a host's own.
"""

from __future__ import annotations

from itertools import pairwise

import torch


def dense(queries, keys, values, scale, left=-1, cap=0.0):
    """Causal attention of `[n, H, D]` to `[N, K, D]`, in float64; a query sees `left` before it."""
    num_new, num_heads, _ = queries.shape
    group = num_heads // keys.shape[1]
    keys, values = (it.double().repeat_interleave(group, 1) for it in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries.double(), keys) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    own = torch.arange(len(keys) - num_new, len(keys))[:, None]
    at = torch.arange(len(keys))
    hidden = (at > own) | ((at < own - left) if left >= 0 else False)
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    values[hidden.all(0)] = 0  # they may be NaN
    return torch.einsum("hqk,khd->qhd", weights, values).to(queries.dtype)


class _Wrapper:
    def __init__(self, workspace, kv_layout="NHD", use_tensor_cores=False):
        assert workspace.dtype is torch.uint8 and kv_layout == "HND"
        assert workspace.numel() >= 128 << 20, "what its documentation recommends"
        self.is_planned = False

    def _plan(self, starts, indptr, indices, last_page_len, *sizes, causal=False, **options):
        for host in (starts, indptr, indices, last_page_len):
            assert host.dtype is torch.int32
        self.rows = starts.tolist(), indptr.tolist(), indices, last_page_len.tolist()
        self.sizes, self.causal, self.options = sizes, causal, options
        self.is_planned = True

    def run(self, queries, cache):
        assert self.is_planned
        *heads, page_size = self.sizes
        assert [queries.shape[1], cache[0].shape[1], cache[0].shape[3]] == heads
        assert all(it.is_contiguous() and it.shape[2] == page_size for it in cache)
        options = self.options
        assert queries.dtype is options["q_data_type"] and cache[0].dtype is options["kv_data_type"]
        found = torch.empty_like(queries)
        starts, indptr, indices, last = self.rows
        for row, (first, end) in enumerate(pairwise(starts)):
            own = indices[indptr[row] : indptr[row + 1]].long()
            length = (len(own) - 1) * page_size + last[row]
            keys, values = (it[own].transpose(1, 2).flatten(0, 1)[:length] for it in cache)
            assert self.causal or end - first == 1
            given = options["sm_scale"], options["window_left"], options["logits_soft_cap"] or 0.0
            found[first:end] = dense(queries[first:end], keys, values, *given)
        return found


class FlashInfer:
    """The module `flashinfer`."""

    class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
        def plan(self, indptr, *others, **options):
            self._plan(torch.arange(len(indptr), dtype=torch.int32), indptr, *others, **options)

    class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
        def plan(self, starts, *others, **options):
            self._plan(starts, *others, **options)


class FlashAttn:
    """The module `flash_attn`."""

    def flash_attn_with_kvcache(
        self, q, k_cache, v_cache, *, cache_seqlens, block_table, **options
    ):
        starts = torch.arange(len(q) + 1, dtype=torch.int32)
        given = starts, cache_seqlens.tolist(), block_table
        return self._attend(q.squeeze(1), k_cache, v_cache, *given, **options).unsqueeze(1)

    def flash_attn_varlen_func(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, block_table, **own
    ):
        assert cu_seqlens_q.dtype is cu_seqlens_k.dtype is torch.int32
        lengths = cu_seqlens_k.diff()
        assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == lengths.max()
        return self._attend(q, k, v, cu_seqlens_q, lengths.tolist(), block_table, **own)

    def _attend(
        self, q, k, v, starts, lengths, block_table, *, softmax_scale, causal, window_size, softcap
    ):
        assert causal and k.shape[1] % 256 == 0 and k.stride(-1) == v.stride(-1) == 1
        assert block_table.dtype is torch.int32 and window_size[1] == (-1, 0)[window_size[0] >= 0]
        found = torch.zeros_like(q)
        for row, (first, end) in enumerate(pairwise(starts.tolist())):
            if not lengths[row]:
                continue
            blocks = block_table[row, : -(-lengths[row] // k.shape[1])].long()
            keys, values = (it[blocks].flatten(0, 1)[: lengths[row]] for it in (k, v))
            given = softmax_scale, window_size[0], softcap
            found[first:end] = dense(q[first:end], keys, values, *given)
        return found


class HostAttention:
    """A host's own provider; counts its calls. `refused`: what `refusal` returns."""

    name = "the host's"

    def __init__(self, refused=None, capturable=False):
        self.refused, self.capturable = refused, capturable
        self.calls = {"context": 0, "generation": 0}
        self.asked = []

    def refusal(self, shape, dtype, tokens_per_block):
        self.asked.append((shape, dtype, tokens_per_block))
        return self.refused

    def attend_context(self, queries, pages, rows, shape, sinks):
        self.calls["context"] += 1
        starts, lengths = rows.lengths
        assert starts.tolist() == rows.query_starts.tolist()
        assert lengths.tolist() == rows.kv_lengths.tolist()
        return self._attend(queries, pages, rows, shape, starts.tolist())

    def attend_generation(self, queries, pages, rows, shape, sinks):
        self.calls["generation"] += 1
        assert len(queries) == len(rows.kv_lengths)
        if rows.lengths is not None:  # a captured step has none
            assert rows.lengths.row_starts.tolist() == [*range(len(queries) + 1)]
            assert rows.lengths.kv_lengths.tolist() == rows.kv_lengths.tolist()
        count = int(rows.kv_lengths.count_nonzero())  # the rest is padding of a captured step
        assert rows.query_starts[: count + 1].tolist() == [*range(count + 1)]
        return self._attend(queries, pages, rows, shape, range(len(queries) + 1))

    def _attend(self, queries, pages, rows, shape, starts):
        found = torch.zeros_like(queries)
        block = pages.values.shape[2]
        for row, (first, end) in enumerate(pairwise(starts)):
            length = int(rows.kv_lengths[row])
            if not length:  # padding of a captured step
                continue
            own = rows.block_tables[row, : -(-length // block)].long()
            keys, values = (
                it[own].transpose(1, 2).flatten(0, 1)[:length]
                for it in (pages.keys.mT, pages.values)
            )
            left = -1 if shape.window is None else shape.window - 1
            found[first:end] = dense(queries[first:end], keys, values, shape.scale, left)
        return found
