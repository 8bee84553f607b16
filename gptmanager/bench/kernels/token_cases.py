"""Kernel benchmark cases for norms, activations, RoPE with KV cache writes, and block copies."""

from __future__ import annotations

import functools

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gptmanager.bench.kernels.attention_peers import flashinfer
from gptmanager.bench.kernels.cases import (
    Case,
    Contender,
    Prepared,
    Rig,
    Sizes,
    largest_error,
    tolerance,
)
from gptmanager.cuda.activations import activate_gated
from gptmanager.cuda.attention.block_copy import as_tensor, copy_blocks
from gptmanager.cuda.attention.cache_write import locate_tokens, rope_and_write
from gptmanager.cuda.norms import norm
from gptmanager.kernels.attention.attention_arguments import Pages, RowSpans

_EPS = 1e-5
_THETA = 500000.0


def token_cases(sizes: Sizes) -> list[Case]:
    """Return the cases for `sizes.rows` and `sizes.tokens` tokens, and one for block copies."""
    cases = (_norm_case, _activation_case, _write_case)
    counts = (sizes.rows, sizes.tokens)
    return [*(case(sizes, count) for case in cases for count in counts), _copy_case(sizes)]


def _norm_case(sizes: Sizes, num_tokens: int) -> Case:
    num_bytes = 4 * num_tokens * sizes.hidden * sizes.dtype.itemsize
    prepare = functools.partial(_prepare_norm, num_tokens, num_bytes)
    return Case("norms", f"add + RMSNorm, {num_tokens} x {sizes.hidden}", num_bytes, prepare)


def _prepare_norm(num_tokens: int, num_bytes: int, rig: Rig) -> Prepared:
    width = rig.sizes.hidden
    sets, residuals = (rig.sets(num_bytes, num_tokens, width) for _ in range(2))
    weight = 1 + rig.randn(width, scale=0.1)
    out, summed = torch.empty_like(sets[0]), (sets[0] + residuals[0]).float()
    expected = summed * torch.rsqrt(summed.square().mean(-1, keepdim=True) + _EPS) * weight.float()
    own = [it.clone() for it in residuals]

    def ours(number: int) -> Tensor:
        norm(rig.launcher, out, sets[number], weight, None, _EPS, own[number])
        return out

    def peer_flashinfer() -> Contender:
        library = flashinfer()
        inputs, sums = ([it.clone() for it in given] for given in (sets, residuals))

        def run(number: int) -> Tensor:  # the kernel overwrites both tensors
            library.norm.fused_add_rmsnorm(inputs[number], sums[number], weight, _EPS)
            return inputs[number]

        return run

    def peer_torch() -> Contender:
        sums = [it.clone() for it in residuals]
        return lambda number: F.rms_norm(sums[number].add_(sets[number]), (width,), weight, _EPS)

    peers = {"flashinfer": peer_flashinfer, "torch": peer_torch}
    error = largest_error(expected)
    return Prepared(len(sets), ours, error, tolerance(rig.sizes.dtype), peers)


def _activation_case(sizes: Sizes, num_tokens: int) -> Case:
    num_bytes = 3 * num_tokens * sizes.ffn * sizes.dtype.itemsize
    prepare = functools.partial(_prepare_activation, num_tokens, num_bytes)
    return Case("activations", f"SiLU * up, {num_tokens} x {sizes.ffn}", num_bytes, prepare)


def _prepare_activation(num_tokens: int, num_bytes: int, rig: Rig) -> Prepared:
    width = rig.sizes.ffn
    sets = rig.sets(num_bytes, num_tokens, 2 * width)
    gate, up = sets[0].float().chunk(2, dim=-1)
    out = torch.empty_like(sets[0][:, :width].contiguous())

    def ours(number: int) -> Tensor:
        activate_gated(rig.launcher, out, sets[number])
        return out

    def peer_flashinfer() -> Contender:
        library, result = flashinfer(), torch.empty_like(out)

        def run(number: int) -> Tensor:
            library.activation.silu_and_mul(sets[number], result)
            return result

        return run

    def peer_torch() -> Contender:
        return lambda number: F.silu(sets[number][:, :width]) * sets[number][:, width:]

    peers = {"flashinfer": peer_flashinfer, "torch": peer_torch}
    error = largest_error(F.silu(gate) * up)
    return Prepared(len(sets), ours, error, tolerance(rig.sizes.dtype), peers)


def _write_case(sizes: Sizes, num_tokens: int) -> Case:
    heads = sizes.num_heads + 2 * sizes.num_kv_heads
    num_bytes = 2 * num_tokens * heads * sizes.head_dim * sizes.dtype.itemsize
    prepare = functools.partial(_prepare_write, num_tokens, num_bytes)
    return Case("cache_write", f"RoPE + KV write, {num_tokens} tokens", num_bytes, prepare)


def _prepare_write(num_tokens: int, num_bytes: int, rig: Rig) -> Prepared:
    """Prepare a case in which all tokens belong to one sequence.

    The tokens' places in the KV cache are computed before the measurement, because a step computes
    the places once for all layers.
    """
    sizes = rig.sizes
    heads, kv_heads, head_dim = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
    block, num_blocks = sizes.tokens_per_block, -(-num_tokens // sizes.tokens_per_block)
    order = np.random.default_rng(0).permutation(num_blocks)
    cells = torch.empty(num_tokens, dtype=torch.int32, device=rig.device)
    given = [0, num_tokens], [num_tokens], [0], order[None]
    starts, lengths, slots, tables = map(rig.ints, given)
    rows = RowSpans(starts, lengths, slots, tables)
    locate_tokens(rig.launcher, cells, rows, block)
    positions = torch.arange(num_tokens, device=rig.device)
    frequencies = _THETA ** -(torch.arange(0, head_dim, 2, device=rig.device) / head_dim)
    angles = positions[:, None].float() * frequencies
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    pages = (num_blocks, kv_heads, block, head_dim)
    width = (heads + 2 * kv_heads) * head_dim
    sets = rig.sets(num_bytes, num_tokens, width)
    outs = [(rig.randn(num_tokens, heads, head_dim), *(torch.zeros(pages, dtype=sizes.dtype,
             device=rig.device) for _ in range(2))) for _ in sets]  # fmt: skip

    def ours(number: int) -> Tensor:
        queries, keys, values = outs[number]
        pages = Pages(keys.mT, values)
        rope_and_write(
            rig.launcher, queries, sets[number], positions, cells, pages, cos_sin=cos_sin
        )
        return queries

    fused = sets[0].float().view(num_tokens, -1, head_dim)
    unrotated, values = fused[:, : heads + kv_heads], fused[:, heads + kv_heads :]
    low, high = unrotated.chunk(2, dim=-1)
    cos, sin = (it[:, None] for it in cos_sin.chunk(2, dim=1))
    rotated = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
    expected = torch.cat([rotated, values], dim=1)

    def error(queries: Tensor) -> float:
        """Return the largest error of the queries, keys and values that were written for set 0."""
        blocks = torch.from_numpy(order).to(rig.device)
        written = [it[blocks].transpose(1, 2).flatten(0, 1)[:num_tokens] for it in outs[0][1:]]
        return largest_error(expected)(torch.cat([queries, *written], dim=1))

    return Prepared(len(sets), ours, error, tolerance(sizes.dtype))


def _copy_case(sizes: Sizes) -> Case:
    block = sizes.num_kv_heads * sizes.tokens_per_block * sizes.head_dim * sizes.dtype.itemsize
    num_bytes = 2 * sizes.copied_blocks * sizes.num_layers * block
    blocks = f"{sizes.copied_blocks} blocks of {sizes.tokens_per_block}"
    name = f"{blocks} in {sizes.num_layers} layers"
    return Case("block_copy", name, num_bytes, functools.partial(_prepare_copy, num_bytes))


def _prepare_copy(num_bytes: int, rig: Rig) -> Prepared:
    """Prepare pools of keys in which a free block, the target, follows each block to copy."""
    sizes, count = rig.sizes, rig.sizes.copied_blocks
    shape = (sizes.num_layers, 2 * count, sizes.num_kv_heads)
    pools = rig.sets(num_bytes, *shape, sizes.tokens_per_block, sizes.head_dim)
    pairs = [(2 * i, 2 * i + 1, sizes.tokens_per_block) for i in range(count)]
    copies = as_tensor(pairs, rig.device)
    expected = pools[0][:, ::2].clone()

    def ours(number: int) -> Tensor:
        copy_blocks(rig.launcher, pools[number], pools[number], copies)
        return pools[number][:, 1::2]

    def peer_torch() -> Contender:
        own = [pool.clone() for pool in pools]

        def run(number: int) -> Tensor:
            own[number][:, 1::2].copy_(own[number][:, ::2])
            return own[number][:, 1::2]

        return run

    return Prepared(len(pools), ours, largest_error(expected), 0.0, {"torch": peer_torch})
