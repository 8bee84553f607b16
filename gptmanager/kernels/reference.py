"""`Kernels`: every op of the network in plain torch, the specification of all overrides.

`Kernels` defines the formulas, the dtypes of inputs and results, and the layout of a page.

Letters: T packed tokens, R rows (sequences), H query heads, K KV heads (H is a multiple of K),
D head dimension, P blocks of the pool, B tokens per block. Rows are packed without padding: row r
owns the tokens `row_starts[r]:row_starts[r + 1]`, which are the last of its `kv_lengths[r]`
positions. Arithmetic is float32 inside an op (float64 for float64 inputs), rounded once to the
result's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from gptmanager.kernels.attention.attention_arguments import AttentionShape, Pages, RowSpans
from gptmanager.kernels.attention.head_ops import HeadOps
from gptmanager.kernels.attention.paged_formulas import (
    attend,
    cells,
    read_positions,
    rotate,
    widened,
    write_heads,
)
from gptmanager.kernels.capture.captured_step import StepCapture
from gptmanager.kernels.experts.mixture import MixtureOps
from gptmanager.kernels.experts.routing import Routing
from gptmanager.kernels.gemm.packed_matrix import Matrix, PackedMatrix, Quantized, plain
from gptmanager.kernels.lora.adapter_arguments import StepAdapters
from gptmanager.kernels.lora.adapter_formulas import add_outputs
from gptmanager.kernels.recurrent.recurrent_ops import RecurrentOps

LINEAR_TILE = 32
ALIGNMENT = 16

Ints = npt.NDArray[np.int32]


class Kernels(RecurrentOps, MixtureOps, HeadOps):
    """The ops in torch. A subclass overrides the ops that it can compute faster.

    With `deterministic`, the result of an op for a token is bitwise independent of the other tokens
    in the call. Without it, the same formulas may round differently from batch to batch. Some ops
    return their result in the memory of an input: callers must not read again the `x` of `activate`
    and of norms that add it to a residual, nor the `gates` of `gated_delta` and the `projected` of
    `short_convolution`.
    `has_float64` is True if the ops accept float64. `plans_experts` is True if `experts` never
    waits for the device; if it is False, steps of models with experts cannot be captured.
    `quantized_kinds` are the supported formats of quantized matrices, and `expert_kinds` those of
    the matrices of experts. `group_kinds` are the formats of 4-bit groups that can be kept as a
    checkpoint has them.
    """

    has_float64, plans_experts = True, False
    quantized_kinds: tuple[Quantized, ...] = ()
    expert_kinds: tuple[Quantized, ...] = ()
    group_kinds: tuple[Quantized, ...] = ("int4",)

    def __init__(self, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    def warm_up(
        self,
        dtype: torch.dtype | None = None,
        quantized: Collection[Quantized] = (),
        others: Sequence[Callable[[int], None]] = (),
        on_progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        """Compile or load the ops now, so that the first calls do not wait for this.

        `dtype` is the dtype of plain matrices. `quantized` are the formats of quantized matrices.
        `others` are further CPU functions to compile. `compile_all` explains `on_progress`.
        """

    def warm_up_adapters(self) -> None:
        """Compile or load what the first step with an adapter needs; may run in any thread."""

    def warm_up_layers(self, kinds: Collection[str]) -> None:
        """Compile or load the ops of layers: "experts", "latents", and kinds of recurrent ones."""

    def check_routing(self, num_experts: int, routing: Routing) -> None:
        """Raise ConfigError for more experts than the kernels support, in all or per token."""

    def new_step_capture(self) -> StepCapture | None:
        """Return an object that captures steps, or None if each step runs op by op."""
        return None

    def plan(
        self,
        shapes: Sequence[AttentionShape],
        row_starts: Ints,
        kv_lengths: Ints,
        num_context_rows: int,
        fixed: int = 0,
    ) -> tuple[Ints, ...]:
        """Return further int32 arrays about a step's rows that `begin` needs.

        `shapes` are the distinct attention shapes of all layers. `row_starts` and `kv_lengths` are
        those of `RowSpans`, in NumPy. The first `num_context_rows` rows may have several tokens.
        `fixed` is the number of tokens of a captured step, including padding, or 0 for other steps.
        The other rows have one token each, or none if they pad a captured step. For such a step,
        number and sizes of the arrays depend only on `fixed`, `num_context_rows` and the number of
        rows, so that a step captured for one batch can run for another.
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
        """Return the rows for the ops of all layers. Called once a step, before the first layer.

        `plan` has the arrays that `Kernels.plan` returned, as tensors on the device.
        """
        return rows

    def padded_head_dim(self, head_dim: int) -> int:
        """Return the size to which a caller should pad heads, with zeros, before `attention`."""
        return head_dim

    def new_matrix(
        self,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        quantized: Quantized | None = None,
        device: torch.device | str = "cpu",
    ) -> PackedMatrix | None:
        """Return storage for a weight of `linear`, or None if the weight stays a plain tensor.

        With `quantized`, the weight is stored in 8 or 4 bits. The result is then None if this
        format is not supported.
        """
        return None

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        """`x [T, I] @ weight [O, I]^T + bias [O]` -> `[T, O]`, in the weight's dtype."""
        x, matrix = x.to(weight.dtype), plain(weight)
        if not self.deterministic:
            return F.linear(x, matrix, bias)
        # A BLAS chooses its blocking, and so the order of summation, by the number of rows and by
        # their alignment. So every matmul here has the same number of aligned rows.
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
        """Return a step's adapters for the ops of each layer.

        The result may be None if no token has an adapter. Called once per step, before the first
        layer. Ops also accept adapters without this call.
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
        """Compute `linear_silu_mul`, with the outputs of adapters added before the activation."""
        full = self.linear(x, weight, bias)
        self.add_adapters(full, x, adapters, layer, matrix)
        return self.silu_mul(full)

    def add_adapters(
        self, result: Tensor, x: Tensor, adapters: StepAdapters, layer: int, matrix: str
    ) -> None:
        """`result[t, columns] += B @ (A @ x[t])` for each module of `matrix` that t's adapter has.

        `result [T, O]`, the matrix's output for `x [T, I]`, is changed in place. This is LoRA (Hu
        et al., 2021) with its scale multiplied into B. Matmuls and sums are float32, or float64 if
        `adapters.pool` is. An element is rounded once in total, not once for each module.
        """
        add_outputs(partial(Kernels.linear, self), result, x, adapters, layer, matrix)

    def embedding(self, ids: Tensor, table: Matrix) -> Tensor:
        """Rows `ids [T]` (int64) of `table [V, C]` -> `[T, C]`."""
        return F.embedding(ids, plain(table))

    def add_embedding(self, embedded: Tensor, ids: Tensor, table: Tensor) -> None:
        """`embedded [T, C] += embedding(ids, table)`, in place."""
        embedded += self.embedding(ids, table)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, plus_one: bool = False) -> Tensor:
        """`x / sqrt(mean(x^2) + eps) * weight [C]` over the last dimension, in x's dtype.

        In all norms, `plus_one` replaces `weight` by `weight + 1`, which is not rounded.
        """
        return self._normalize(x, None, weight, None, eps, plus_one, centered=False)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, plus_one: bool = False
    ) -> Tensor:
        """Add `x [T, C]` to `residual [T, C]` in place; return the residual's `rms_norm`."""
        return self._normalize(x, residual, weight, None, eps, plus_one, centered=False)

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, plus_one: bool = False
    ) -> Tensor:
        """`(x - mean) / sqrt(variance + eps) * weight [C] + bias [C]`, in x's dtype."""
        return self._normalize(x, None, weight, bias, eps, plus_one, centered=True)

    def add_layer_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        plus_one: bool = False,
    ) -> Tensor:
        """Add `x [T, C]` to `residual [T, C]` in place; return the residual's `layer_norm`."""
        return self._normalize(x, residual, weight, bias, eps, plus_one, centered=True)

    def _normalize(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        plus_one: bool,
        *,
        centered: bool,
    ) -> Tensor:
        """Return `layer_norm` if `centered`, else `rms_norm`, of x, or of `residual` += x."""
        own = x if residual is None else residual.add_(x)
        wide, by = widened(own), widened(weight) + plus_one
        if centered:
            wide_bias = None if bias is None else widened(bias)
            result = F.layer_norm(wide, weight.shape, by, wide_bias, eps)
        else:
            mean = self._each(lambda it: it.square().mean(-1, keepdim=True), wide)
            result = wide * torch.rsqrt(mean + eps) * by
        return result.to(own.dtype).to(x.dtype)

    def norm_heads(
        self,
        qkv: Tensor,
        columns: range,
        head_dim: int,
        weight: Tensor,
        eps: float,
        *,
        centered: bool,
        plus_one: bool,
    ) -> None:
        """Normalize each head (`head_dim` columns) in `columns` of `qkv [T, N]`, in place.

        The norm is an RMS norm, or a LayerNorm without bias if `centered`. `weight` has an element
        for each of `columns`.
        """
        own = qkv[:, columns.start : columns.stop]
        heads = widened(own).reshape(len(own), -1, head_dim)
        if centered:
            heads = heads - self._each(lambda it: it.mean(-1, keepdim=True), heads)
        mean = self._each(lambda it: it.square().mean(-1, keepdim=True), heads)
        normed = (heads * torch.rsqrt(mean + eps)).flatten(1) * (widened(weight) + plus_one)
        own.copy_(normed)

    def layer_norm_heads(
        self,
        qkv: Tensor,
        columns: range,
        head_dim: int,
        weight: Tensor,
        bias: Tensor,
        eps: float,
    ) -> None:
        """Apply one `layer_norm` to each head (`head_dim` columns) in `columns`, in place.

        All heads have the same `weight [head_dim]` and `bias [head_dim]`.
        """
        own = qkv[:, columns.start : columns.stop]
        heads = own.reshape(-1, head_dim).contiguous()
        own.copy_(self.layer_norm(heads, weight, bias, eps).view_as(own))

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
        norm_last: bool = False,
        plus_one: bool = False,
    ) -> Tensor:
        """Rotate queries and keys, write keys and values to pages, and return the queries.

        `qkv [T, (H + 2K) * D]` has all query heads, then key heads, then value heads. If
        `pages.is_once`, value heads are missing. `cos_sin [max_pos, N]` float32, with N <= D and
        even, has the cosines of N / 2 angles, then their sines. Dimension i < N / 2 of a head
        rotates with i + N / 2 (the "NeoX" form of HF's Llama); dimensions from N on are unchanged.
        `positions [T]` int64 are rows of `cos_sin`; without `cos_sin` nothing rotates. `q_norm [D]`
        and `k_norm [D]`, if given, are the weights of an `rms_norm` of each head before the
        rotation (Qwen3), or after it if `norm_last` (HunYuan). Returns `[T, H, D]` in the pages'
        dtype; for float8 pages, in the dtype of `qkv`.
        """
        num_kv_heads, head_dim, tokens_per_block = pages.keys.shape[1:]
        heads = widened(qkv).reshape(qkv.shape[0], qkv.shape[1] // head_dim, head_dim)
        num_heads = heads.shape[1] - (1 if pages.is_once else 2) * num_kv_heads
        q, k, v = heads.tensor_split((num_heads, num_heads + num_kv_heads), dim=1)
        angles = None if cos_sin is None else cos_sin[positions].unsqueeze(1)

        def normed(x: Tensor, weight: Tensor) -> Tensor:  # a subclass's `_normalize` needs `[T, C]`
            return Kernels._normalize(self, x, None, weight, None, eps, plus_one, centered=False)

        def rotated(heads: Tensor, weight: Tensor | None) -> Tensor:
            if weight is not None and not norm_last:
                heads = normed(heads, weight)
            if angles is not None:
                heads = rotate(heads, angles)
            if weight is not None and norm_last:
                heads = normed(heads, weight)
            return heads

        q, k = rotated(q, q_norm), rotated(k, k_norm)
        block, offset = cells(rows, qkv.shape[0], tokens_per_block)
        write_heads(pages, block, offset, k, v)
        return q.to(pages.keys.dtype if pages.cache_scales is None else qkv.dtype)

    def attention(
        self,
        q: Tensor,
        pages: Pages,
        rows: RowSpans,
        shape: AttentionShape,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of `q [T, H, D]` over the pages -> `[T, H * D]`, in q's dtype.

        `sinks [H]`, if given, has for each head a score that is in the softmax but has no value.
        Ids of blocks that no token of the row sees are not read: such blocks may be freed already.
        """
        result = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        for start, stop, length, slot in self._pieces(rows):
            tokens, first_position = slice(start, stop), length - (stop - start)
            first = max(0, shape.first_seen(first_position))
            at = torch.arange(length, device=q.device)
            at = at[(at < shape.sink) | (at >= first)]
            k, v = read_positions(pages, rows.block_tables[slot], at)
            position = torch.arange(first_position, length, device=q.device).unsqueeze(1)
            hidden = at > position
            hidden |= (at < shape.first_seen(position)) & (at >= shape.sink)
            result[tokens] = attend(q[tokens].clone(), k, v, shape, hidden, sinks).to(q.dtype)
        return result

    def _pieces(self, rows: RowSpans) -> Iterator[tuple[int, int, int, int]]:
        """Yield `(start, stop, KV length at stop, slot)` for tokens that attend together.

        If `deterministic`, each token attends alone: matmuls of other sizes may round differently.
        """
        starts, lengths, slots = (it.tolist() for it in rows[:3])
        for (first, end), length, slot in zip(pairwise(starts), lengths, slots, strict=True):
            size = 1 if self.deterministic else max(1, end - first)
            for start in range(first, end, size):
                yield start, start + size, length - end + start + size, slot
