"""`Kernels`: every op of the network in plain torch, the specification that overrides are held to.

It decides the formulas, the dtypes at each border, and the layout of a page. It knows nothing of
batches, pools or models: ops take plain tensors.

Letters: T packed tokens, R rows (sequences), H query heads, K KV heads (H is a multiple of K),
D head dimension, P blocks of the pool, B tokens per block. Rows are packed without padding: row r
owns the tokens `row_starts[r]:row_starts[r + 1]`, which are the last ones of its `kv_lengths[r]`
positions. Arithmetic is float32 inside an op, rounded once to the result's dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

LINEAR_TILE = 32
ALIGNMENT = 16

Ints = npt.NDArray[np.int32]


class AttentionShape(NamedTuple):
    """What the attention of all layers of a model has in common; `windows`: those there are;
    `fp8`: pages are of 8-bit floats.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...] = (None,)
    sink: int = 0
    fp8: bool = False


class Kernels:
    """The ops in torch. A subclass overrides what it does faster and inherits the rest.

    `deterministic`: what an op computes for a token is bitwise independent of the other tokens
    in the call. Without it the same formulas may round differently from batch to batch.
    """

    def __init__(self, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    def warm_up(self) -> None:
        """Compile or load now whatever the first calls would otherwise wait for."""

    def plan(
        self,
        shape: AttentionShape,
        row_starts: Ints,
        kv_lengths: Ints,
        num_context_rows: int,
        fixed: bool = False,
    ) -> tuple[Ints, ...]:
        """What the ops want to know of a step's rows besides: int32 arrays, for `begin`.

        The numbers are those of the batch, on the host, before anything runs. `fixed`: as many
        arrays, of the same sizes, for every batch of so many rows with at most one token each, so
        that what was recorded for one batch can be run for another.
        """
        return ()

    def begin(
        self,
        shape: AttentionShape,
        plan: Sequence[Tensor],
        row_starts: Tensor,
        kv_lengths: Tensor,
        slots: Tensor,
        block_tables: Tensor,
        num_tokens: int,
        tokens_per_block: int,
    ) -> Any:
        """Once a step, before the first layer, with the arrays of `plan` on the device.

        Returns what `rope_and_write` and `attention` of each layer take as `plan`.
        """
        return None

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x [T, I] @ weight [O, I]^T + bias [O]` -> `[T, O]`, in the weight's dtype."""
        x = x.to(weight.dtype)
        if not self.deterministic:
            return F.linear(x, weight, bias)
        # A BLAS picks its blocking, and with it the order of summation, by the number of rows and
        # by how rows are aligned: every product has the same number of aligned rows here.
        num_tokens, width = x.shape
        padded = F.pad(x, (0, -width % ALIGNMENT, 0, -num_tokens % LINEAR_TILE))
        if width % ALIGNMENT:
            weight = F.pad(weight, (0, -width % ALIGNMENT))
        result = x.new_empty(padded.shape[0], weight.shape[0])
        for start in range(0, num_tokens, LINEAR_TILE):
            stop = start + LINEAR_TILE
            result[start:stop] = F.linear(padded[start:stop], weight, bias)
        return result[:num_tokens]

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        """Rows `ids [T]` (int64) of `table [V, C]` -> `[T, C]`."""
        return F.embedding(ids, table)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x^2) + eps) * weight [C]` over the last dimension, in x's dtype."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale * weight.float()).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Adds `x [T, C]` to `residual [T, C]` in place; returns the residual's `rms_norm`."""
        residual += x
        return self.rms_norm(residual, weight, eps).to(x.dtype)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """`(x - mean) / sqrt(variance + eps) * weight [C] + bias [C]`, in x's dtype."""
        wide_bias = None if bias is None else bias.float()
        normalized = F.layer_norm(x.float(), weight.shape, weight.float(), wide_bias, eps)
        return normalized.to(x.dtype)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        """Adds `x [T, C]` to `residual [T, C]` in place; returns the residual's `layer_norm`."""
        residual += x
        return self.layer_norm(residual, weight, bias, eps).to(x.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` of `gate_up [T, 2F]` = gate, then up -> `[T, F]`."""
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (F.silu(gate) * up).to(gate_up.dtype)

    def gelu(self, x: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
        """`x * Phi(x)` by erf ("none", BERT and GPT-J) or by tanh ("tanh", GPT-2)."""
        return F.gelu(x.float(), approximate=approximate).to(x.dtype)

    def rope_and_write(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        keys: Tensor,
        values: Tensor,
        row_starts: Tensor,
        kv_lengths: Tensor,
        slots: Tensor,
        block_tables: Tensor,
        plan: Any = None,
        cache_scales: Tensor | None = None,
    ) -> Tensor:
        """Rotates queries and keys, writes keys and values to their pages, returns the queries.

        `qkv [T, (H + 2K) * D]`: all query heads, then key heads, then value heads.
        `cos_sin [max_pos, N]` float32, N <= D and even: cosines of the N / 2 frequencies, then
        their sines. Dimension i < N / 2 of a head turns with i + N / 2 (the "NeoX" form of HF's
        Llama); dimensions from N on stay. None: no rotation. `positions [T]` int64 index it.
        `q_norm [D]`, `k_norm [D]`: weights of an `rms_norm` of each head before rotation (Qwen3).
        `keys [P, K, D, B]`, `values [P, K, B, D]`: one layer's pages, written in place.
        `row_starts [R + 1]`, `kv_lengths [R]`, `slots [R]`, `block_tables [slots, blocks]`: int32.
        Pages may be float8_e4m3fn, with `cache_scales [2, K]` float32 (of keys, then of values): a
        value is element * scale; written is value / scale to the nearest, beyond 448 as 448.
        Returns `[T, H, D]` in the pages' dtype, beside float8 ones in qkv's (float32 on the CPU).
        """
        num_kv_heads, head_dim, tokens_per_block = keys.shape[1:]
        heads = qkv.float().reshape(qkv.shape[0], qkv.shape[1] // head_dim, head_dim)
        q, k, v = heads.tensor_split((-2 * num_kv_heads, -num_kv_heads), dim=1)
        if q_norm is not None:  # a subclass's may be for rows alone
            q = Kernels.rms_norm(self, q, q_norm, eps)
        if k_norm is not None:
            k = Kernels.rms_norm(self, k, k_norm, eps)
        if cos_sin is not None:
            turns = cos_sin[positions].unsqueeze(1)
            q, k = _rotate(q, turns), _rotate(k, turns)
        num_new = row_starts.diff().long()
        token = torch.arange(qkv.shape[0], device=qkv.device)
        first = kv_lengths.long() - num_new - row_starts[:-1]
        cache_positions = token + first.repeat_interleave(num_new)
        slot = slots.long().repeat_interleave(num_new)
        block = block_tables[slot, cache_positions // tokens_per_block].long()
        offset = cache_positions % tokens_per_block
        if cache_scales is not None:
            k, v = (_to_fp8(it, own) for it, own in zip((k, v), cache_scales, strict=True))
            keys, values = keys.view(torch.uint8), values.view(torch.uint8)  # as what torch moves
        keys[block, :, :, offset] = k.to(keys.dtype)
        values[block, :, offset, :] = v.to(values.dtype)
        return q.to(keys.dtype if cache_scales is None else qkv.dtype)

    def attention(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        row_starts: Tensor,
        kv_lengths: Tensor,
        slots: Tensor,
        block_tables: Tensor,
        *,
        scale: float,
        window: int | None = None,
        sink: int = 0,
        softcap: float = 0.0,
        cache_scales: Tensor | None = None,
        num_context_rows: int = 0,
        plan: Any = None,
    ) -> Tensor:
        """Causal attention of `q [T, H, D]` over the pages -> `[T, H * D]`, in q's dtype.

        Token i of a row with n new tokens and KV length m stands at position m - n + i and sees
        the positions 0 to there; with `window`, only the last `window` of them, its own included,
        and the first `sink`. With `softcap` a score is softcap * tanh(score / softcap).
        Pages and `cache_scales` as in `rope_and_write`; those that hold neither may be gone (their
        block ids are not read). The first `num_context_rows` rows may have several tokens, a
        hint. `plan`: what `begin` returned, or None.
        """
        result = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        tokens_per_block, starts = keys.shape[-1], row_starts.tolist()
        for row, (length, slot) in enumerate(zip(kv_lengths.tolist(), slots.tolist(), strict=True)):
            tokens = slice(starts[row], starts[row + 1])
            num_new = tokens.stop - tokens.start
            if num_new == 0:
                continue
            first = 0 if window is None else max(0, length - num_new + 1 - window)
            at = torch.arange(length, device=q.device)
            at = at[(at < sink) | (at >= first)]
            block = block_tables[slot, at // tokens_per_block].long()
            offset = at % tokens_per_block
            k, v = _take(keys.mT, block, offset), _take(values, block, offset)
            if cache_scales is not None:
                k, v = k.float() * cache_scales[0, :, None], v.float() * cache_scales[1, :, None]
            k, v = k.permute(1, 2, 0), v.transpose(0, 1)
            position = torch.arange(length - num_new, length, device=q.device).unsqueeze(1)
            hidden = at > position
            if window is not None:
                hidden |= (at <= position - window) & (at >= sink)
            result[tokens] = _attend(q[tokens], k, v, scale, softcap, hidden).to(q.dtype)
        return result


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, softcap: float, hidden: Tensor
) -> Tensor:
    """`q [n, H, D]` over `keys [K, D, N]` and `values [K, N, D]`, where not `hidden [n, N]`."""
    num_new, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[0]
    by_group = q.float().reshape(num_new, num_kv_heads, num_heads // num_kv_heads, head_dim)
    grouped = by_group.permute(1, 2, 0, 3)
    scores = grouped @ keys.unsqueeze(1).float() * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    mixed = weights @ values.unsqueeze(1).float()
    return mixed.permute(2, 0, 1, 3).flatten(1)


def _take(pages: Tensor, block: Tensor, offset: Tensor) -> Tensor:
    """`[N, K, D]` of `pages [P, K, B, D]`; torch moves float8 elements as bits."""
    if pages.dtype is not torch.float8_e4m3fn:
        return pages[block, :, offset]
    return pages.view(torch.uint8)[block, :, offset].view(pages.dtype)


def _to_fp8(heads: Tensor, scales: Tensor) -> Tensor:
    """The bits of `heads [T, K, D] / scales [K]` as float8_e4m3fn; torch would make 500 a NaN."""
    limit = torch.finfo(torch.float8_e4m3fn).max
    scaled = (heads / scales[:, None]).clamp(-limit, limit)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8)


def _rotate(heads: Tensor, cos_sin: Tensor) -> Tensor:
    """Half-rotation of `heads [T, *, D]` by `cos_sin [T, 1, N]`."""
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin[..., :half], cos_sin[..., half:]
    a, b, rest = heads.tensor_split((half, 2 * half), dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)
