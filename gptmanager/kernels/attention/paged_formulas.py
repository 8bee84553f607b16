"""Attention over pages in torch: formulas to write, read and combine keys and values.

The module `reference` explains the letters for sizes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gptmanager.kernels.attention.attention_arguments import AttentionShape, Pages, RowSpans


def widened(x: Tensor) -> Tensor:
    """Return `x` in the dtype of arithmetic: float64 if `x` is float64, otherwise float32."""
    return x if x.dtype is torch.float64 else x.float()


def cells(rows: RowSpans, num_tokens: int, tokens_per_block: int) -> tuple[Tensor, Tensor]:
    """Return the block of each new token and its offset in that block, both int64 `[T]`."""
    num_new = rows.row_starts.diff().long()
    token = torch.arange(num_tokens, device=num_new.device)
    first = rows.kv_lengths.long() - num_new - rows.row_starts[:-1]
    position = token + first.repeat_interleave(num_new)
    slot = rows.slots.long().repeat_interleave(num_new)
    block = rows.block_tables[slot, position // tokens_per_block].long()
    return block, position % tokens_per_block


def write_heads(pages: Pages, block: Tensor, offset: Tensor, k: Tensor, v: Tensor) -> None:
    """Write the tokens' keys and values `[T, K, D]` at `block` and `offset` (see `cells`)."""
    keys, values, scales, is_once = pages
    if scales is not None:
        k, v = (to_fp8(it, own) for it, own in zip((k, v), scales, strict=True))
        # torch cannot index float8
        keys, values = (keys.view(torch.uint8), values.view(torch.uint8))
    keys[block, :, :, offset] = k.to(keys.dtype)
    if not is_once:
        values[block, :, offset, :] = v.to(values.dtype)


def read_positions(pages: Pages, blocks: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys `[K, D, N]` and values `[K, N, D]` of positions `at [N]` of a row's `blocks`."""
    tokens_per_block = pages.values.shape[2]
    block, offset = blocks[at // tokens_per_block].long(), at % tokens_per_block
    k, v = take(pages.keys.mT, block, offset), take(pages.values, block, offset)
    if pages.cache_scales is not None:
        k, v = (
            it.float() * own[:, None] for it, own in zip((k, v), pages.cache_scales, strict=True)
        )
    return k.permute(1, 2, 0), v.transpose(0, 1)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    shape: AttentionShape,
    hidden: Tensor,
    sinks: Tensor | None,
) -> Tensor:
    """Return the attention `[n, H * D]` of `q [n, H, D]` to `keys [K, D, N]`, `values [K, N, D]`.

    Positions are masked where `hidden [n, N]` is true. `sinks [H]`, if given, has for each head a
    score that is in the softmax but has no value. The result has the dtype of arithmetic.
    """
    num_new, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[0]
    by_group = widened(q).reshape(num_new, num_kv_heads, num_heads // num_kv_heads, head_dim)
    grouped = by_group.permute(1, 2, 0, 3)
    scores = grouped @ widened(keys.unsqueeze(1)) * shape.scale
    if shape.softcap:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        own = widened(sinks).view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, own.to(scores)), dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[-1]]
    mixed = weights @ widened(values.unsqueeze(1))
    return mixed.permute(2, 0, 1, 3).flatten(1)


def take(pages: Tensor, block: Tensor, offset: Tensor) -> Tensor:
    """Return the heads `[N, K, D]` at `offset [N]` of `block [N]` in `pages [P, K, B, D]`.

    Pages of float8 are indexed as bytes, because torch cannot index float8.
    """
    if pages.dtype is not torch.float8_e4m3fn:
        return pages[block, :, offset]
    return pages.view(torch.uint8)[block, :, offset].view(pages.dtype)


def to_fp8(heads: Tensor, scales: Tensor) -> Tensor:
    """Return `heads [T, K, D] / scales [K]` as the bytes of float8_e4m3fn.

    Values are clamped, because torch would convert values beyond the range of float8 to NaN.
    """
    limit = torch.finfo(torch.float8_e4m3fn).max
    scaled = (heads / scales[:, None]).clamp(-limit, limit)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8)


def rotate(heads: Tensor, cos_sin: Tensor) -> Tensor:
    """Return `heads [T, *, D]` rotated by `cos_sin [T, 1, N]`.

    Dimension i < N / 2 is rotated with dimension i + N / 2. Dimensions from N on are unchanged.
    """
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin[..., :half], cos_sin[..., half:]
    a, b, rest = heads.tensor_split((half, 2 * half), dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)
