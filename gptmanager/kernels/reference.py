"""`Kernels`: every op of the network in plain torch, the specification of all overrides.

It defines the formulas, the dtypes of inputs and results, and the layout of a page. Ops take
tensors; batches, pools and models are unknown here.

Letters: T packed tokens, R rows (sequences), H query heads, K KV heads (H is a multiple of K),
D head dimension, P blocks of the pool, B tokens per block. Rows are packed without padding: row r
owns the tokens `row_starts[r]:row_starts[r + 1]`, which are the last ones of its `kv_lengths[r]`
positions. Arithmetic is float32 inside an op (float64 for float64 inputs), rounded once to the
result's dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from gptmanager.kernels.attention.attention_arguments import AttentionShape, Pages, RowSpans
from gptmanager.kernels.captured_step import StepCapture
from gptmanager.kernels.gemm.packed_matrix import Matrix, PackedMatrix, plain
from gptmanager.kernels.lora.adapter_arguments import StepAdapters

LINEAR_TILE = 32
ALIGNMENT = 16

Ints = npt.NDArray[np.int32]


class Kernels:
    """The ops in torch. A subclass overrides the ops that it computes faster.

    `deterministic`: what an op computes for a token is bitwise independent of the other tokens
    in the call. Without it the same formulas may round differently from batch to batch.
    `has_float64`: whether the ops take float64.
    """

    has_float64 = True

    def __init__(self, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    def warm_up(
        self,
        dtype: torch.dtype | None = None,
        quantized: bool = False,
        others: Sequence[Callable[[int], None]] = (),
        on_progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        """Compile or load now what the first calls would otherwise wait for.

        `dtype`: of matrices, `quantized` or not. `others`: more bodies for this processor.
        `on_progress`: as of `compile_all`.
        """

    def warm_up_adapters(self) -> None:
        """Compile or load what the first step with an adapter would otherwise wait for.

        Called on a thread of its own, while steps without adapters run.
        """

    def new_step_capture(self) -> StepCapture | None:
        """Return an object that captures steps, or None: each step runs op by op."""
        return None

    def plan(
        self,
        shapes: Sequence[AttentionShape],
        row_starts: Ints,
        kv_lengths: Ints,
        num_context_rows: int,
        fixed: bool = False,
    ) -> tuple[Ints, ...]:
        """Return further int32 arrays that the ops need about a step's rows, for `begin`.

        `shapes`: the attention shapes of all layers, each distinct one once. `row_starts` and
        `kv_lengths` are those of the batch, in NumPy, before anything runs. The first
        `num_context_rows` rows may have several tokens. With `fixed`, the number of arrays and
        their sizes depend on the number of rows alone, if each row has at most one token: what
        was captured for one batch can then run for another.
        """
        return ()

    def begin(
        self,
        shapes: Sequence[AttentionShape],
        rows: RowSpans,
        plan: Sequence[Tensor],
        num_tokens: int,
        tokens_per_block: int,
    ) -> RowSpans:
        """Return the rows as `rope_and_write` and `attention` of each layer take them.

        Called once a step, before the first layer, with the arrays of `plan` on the device.
        """
        return rows

    def new_matrix(
        self, rows: int, columns: int, dtype: torch.dtype, quantized: bool = False
    ) -> PackedMatrix | None:
        """Return storage for a weight of `linear` in these kernels' layout; None: use a tensor.

        `quantized`: stored in 8 bits; None then means that it is not supported.
        """
        return None

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        """`x [T, I] @ weight [O, I]^T + bias [O]` -> `[T, O]`, in the weight's dtype."""
        x, matrix = x.to(weight.dtype), plain(weight)
        if not self.deterministic:
            return F.linear(x, matrix, bias)
        # A BLAS picks its blocking, and with it the order of summation, by the number of rows and
        # by how rows are aligned: every matmul has the same number of aligned rows here.
        num_tokens, width = x.shape
        padded = F.pad(x, (0, -width % ALIGNMENT, 0, -num_tokens % LINEAR_TILE))
        if width % ALIGNMENT:
            matrix = F.pad(matrix, (0, -width % ALIGNMENT))
        result = x.new_empty(padded.shape[0], matrix.shape[0])
        for start in range(0, num_tokens, LINEAR_TILE):
            stop = start + LINEAR_TILE
            result[start:stop] = F.linear(padded[start:stop], matrix, bias)
        return result[:num_tokens]

    def linear_silu_mul(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        """`silu_mul(linear(x, weight, bias))`, in the weight's dtype."""
        return self.silu_mul(self.linear(x, weight, bias))

    def begin_adapters(self, adapters: StepAdapters | None) -> StepAdapters | None:
        """Return a step's adapters as the ops of each layer take them; None if no token has one.

        Called once a step, before the first layer. Ops also accept adapters without this call.
        """
        return adapters

    def linear_silu_mul_adapted(
        self,
        x: Tensor,
        weight: Matrix,
        bias: Tensor | None,
        adapters: StepAdapters,
        layer: int,
        matrix: str,
    ) -> Tensor:
        """`linear_silu_mul` with what `add_adapters` adds before the activation."""
        full = self.linear(x, weight, bias)
        self.add_adapters(full, x, adapters, layer, matrix)
        return self.silu_mul(full)

    def add_adapters(
        self, result: Tensor, x: Tensor, adapters: StepAdapters, layer: int, matrix: str
    ) -> None:
        """`result[t, columns] += B @ (A @ x[t])` for each module of `matrix` that t's adapter has.

        In place; `result [T, O]` is the matrix's output for `x [T, I]`. LoRA (Hu et al., 2021),
        its scale folded into B. Both matmuls and the sums are float32, or the pool's float64;
        each element is rounded once for any number of modules.
        """
        modules, slots = adapters.layout.get(matrix, ()), adapters.rows.tolist()
        for slot in sorted({*slots} - {-1}):
            tokens = (adapters.rows == slot).nonzero().squeeze(1)
            entries = adapters.table[slot, layer].tolist()
            own, total = _wide(x[tokens]), _wide(result[tokens])
            for index, first, columns, width in modules:
                offset, rank = entries[index]
                if rank:
                    middle, end = offset + rank * width, offset + rank * (width + columns)
                    a, b = _wide(adapters.pool[offset:middle]), _wide(adapters.pool[middle:end])
                    inner = Kernels.linear(self, own, a.view(rank, width))
                    total[:, first : first + columns] += Kernels.linear(
                        self, inner, b.view(-1, rank)
                    )
            result[tokens] = total.to(result.dtype)

    def embedding(self, ids: Tensor, table: Matrix) -> Tensor:
        """Rows `ids [T]` (int64) of `table [V, C]` -> `[T, C]`."""
        return F.embedding(ids, plain(table))

    def add_embedding(self, embedded: Tensor, ids: Tensor, table: Tensor) -> None:
        """`embedded [T, C] += embedding(ids, table)`, in place."""
        embedded += self.embedding(ids, table)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x^2) + eps) * weight [C]` over the last dimension, in x's dtype."""
        wide = _wide(x)
        mean = self._each(lambda own: own.square().mean(-1, keepdim=True), wide)
        return (wide * torch.rsqrt(mean + eps) * _wide(weight)).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add `x [T, C]` to `residual [T, C]` in place; return the residual's `rms_norm`."""
        residual += x
        return self.rms_norm(residual, weight, eps).to(x.dtype)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """`(x - mean) / sqrt(variance + eps) * weight [C] + bias [C]`, in x's dtype."""
        wide_bias = None if bias is None else _wide(bias)
        normalized = F.layer_norm(_wide(x), weight.shape, _wide(weight), wide_bias, eps)
        return normalized.to(x.dtype)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        """Add `x [T, C]` to `residual [T, C]` in place; return the residual's `layer_norm`."""
        residual += x
        return self.layer_norm(residual, weight, bias, eps).to(x.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` of `gate_up [T, 2F]` = gate, then up -> `[T, F]`."""
        gate, up = _wide(gate_up).chunk(2, dim=-1)
        return (self._each(F.silu, gate) * up).to(gate_up.dtype)

    def gelu(self, x: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
        """`x * Phi(x)` by erf ("none", BERT and GPT-J) or by tanh ("tanh", GPT-2)."""
        gelu = functools.partial(F.gelu, approximate=approximate)
        return self._each(gelu, _wide(x)).to(x.dtype)

    def rope_and_write(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        pages: Pages,
        rows: RowSpans,
    ) -> Tensor:
        """Rotate queries and keys, write keys and values to their pages, return the queries.

        `qkv [T, (H + 2K) * D]`: all query heads, then key heads, then value heads.
        `cos_sin [max_pos, N]` float32, N <= D and even: cosines of the N / 2 frequencies, then
        their sines. Dimension i < N / 2 of a head rotates with i + N / 2 (the "NeoX" form of HF's
        Llama); dimensions from N on stay. None: no rotation. `positions [T]` int64 index it.
        `q_norm [D]`, `k_norm [D]`: weights of an `rms_norm` of each head before rotation (Qwen3).
        Returns `[T, H, D]` in the pages' dtype, for float8 pages in qkv's (on the CPU: float32).
        """
        keys, values, cache_scales = pages
        num_kv_heads, head_dim, tokens_per_block = keys.shape[1:]
        heads = _wide(qkv).reshape(qkv.shape[0], qkv.shape[1] // head_dim, head_dim)
        q, k, v = heads.tensor_split((-2 * num_kv_heads, -num_kv_heads), dim=1)
        if q_norm is not None:  # a subclass may accept rows only
            q = Kernels.rms_norm(self, q, q_norm, eps)
        if k_norm is not None:
            k = Kernels.rms_norm(self, k, k_norm, eps)
        if cos_sin is not None:
            angles = cos_sin[positions].unsqueeze(1)
            q, k = _rotate(q, angles), _rotate(k, angles)
        block, offset = _cells(rows, qkv.shape[0], tokens_per_block)
        if cache_scales is not None:
            k, v = (_to_fp8(it, own) for it, own in zip((k, v), cache_scales, strict=True))
            keys, values = (keys.view(torch.uint8), values.view(torch.uint8))  # as what torch moves
        keys[block, :, :, offset] = k.to(keys.dtype)
        values[block, :, offset, :] = v.to(values.dtype)
        return q.to(keys.dtype if cache_scales is None else qkv.dtype)

    def attention(self, q: Tensor, pages: Pages, rows: RowSpans, shape: AttentionShape) -> Tensor:
        """Causal attention of `q [T, H, D]` over the pages -> `[T, H * D]`, in q's dtype.

        Pages of which no token of the row sees a position may be freed: their ids are not read.
        """
        result = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        for start, stop, length, slot in self._pieces(rows):
            tokens, first_position = slice(start, stop), length - (stop - start)
            first = 0 if shape.window is None else max(0, first_position + 1 - shape.window)
            at = torch.arange(length, device=q.device)
            at = at[(at < shape.sink) | (at >= first)]
            k, v = _read(pages, rows.block_tables[slot], at)
            position = torch.arange(first_position, length, device=q.device).unsqueeze(1)
            hidden = at > position
            if shape.window is not None:
                hidden |= (at <= position - shape.window) & (at >= shape.sink)
            result[tokens] = _attend(q[tokens].clone(), k, v, shape, hidden).to(q.dtype)
        return result

    def _pieces(self, rows: RowSpans) -> Iterator[tuple[int, int, int, int]]:
        """Yield start and stop of tokens that attend together, the length up to there, the slot.

        A matmul may round differently for each number of tokens.
        """
        starts, lengths, slots = (it.tolist() for it in rows[:3])
        for (first, end), length, slot in zip(pairwise(starts), lengths, slots, strict=True):
            size = 1 if self.deterministic else max(1, end - first)
            for start in range(first, end, size):
                yield start, start + size, length - end + start + size, slot

    def _each(self, op: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return `op(x [T, ...])`; token by token if deterministic."""
        if not self.deterministic or len(x) < 2:
            return op(x)
        return torch.cat([op(own) for own in torch.split(x, 1)])


def _wide(x: Tensor) -> Tensor:
    """Widen to the dtype of arithmetic: float64 stays, all others become float32."""
    return x if x.dtype is torch.float64 else x.float()


def _cells(rows: RowSpans, num_tokens: int, tokens_per_block: int) -> tuple[Tensor, Tensor]:
    """Block and offset within it of each new token, int64 `[T]`."""
    num_new = rows.row_starts.diff().long()
    token = torch.arange(num_tokens, device=num_new.device)
    first = rows.kv_lengths.long() - num_new - rows.row_starts[:-1]
    position = token + first.repeat_interleave(num_new)
    slot = rows.slots.long().repeat_interleave(num_new)
    block = rows.block_tables[slot, position // tokens_per_block].long()
    return block, position % tokens_per_block


def _read(pages: Pages, blocks: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Keys `[K, D, N]` and values `[K, N, D]` of the positions `at [N]` of a row's `blocks`."""
    tokens_per_block = pages.values.shape[2]
    block, offset = blocks[at // tokens_per_block].long(), at % tokens_per_block
    k, v = _take(pages.keys.mT, block, offset), _take(pages.values, block, offset)
    if pages.cache_scales is not None:
        k, v = (
            it.float() * own[:, None] for it, own in zip((k, v), pages.cache_scales, strict=True)
        )
    return k.permute(1, 2, 0), v.transpose(0, 1)


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, shape: AttentionShape, hidden: Tensor
) -> Tensor:
    """`q [n, H, D]` over `keys [K, D, N]` and `values [K, N, D]`, where not `hidden [n, N]`."""
    num_new, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[0]
    by_group = _wide(q).reshape(num_new, num_kv_heads, num_heads // num_kv_heads, head_dim)
    grouped = by_group.permute(1, 2, 0, 3)
    scores = grouped @ _wide(keys.unsqueeze(1)) * shape.scale
    if shape.softcap:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    mixed = weights @ _wide(values.unsqueeze(1))
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
