"""`CpuKernels`: ops compiled by Numba that run in torch's own threads; other ops use the reference.

This class passes addresses to the compiled bodies. The bodies widen inputs to float32 and round
each result once. Ops in float64 use the reference, and so do some ops in other dtypes that are not
in `DTYPES`. Before a body is called, tensors are converted if their dtypes are mixed or not in
`DTYPES`, or if they are not contiguous. Matmuls may also pad or quantize their inputs.

The result for a token is bitwise independent of the other tokens in the call. For matmuls and ops
of the reference, this holds only with `deterministic`. The results of all compiled ops are bitwise
independent of the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import cast

import torch
from torch import Tensor

from gptmanager.kernels import per_token_kernels
from gptmanager.kernels.attention import paged_attention
from gptmanager.kernels.attention.attention_arguments import AttentionShape, Pages, RowSpans
from gptmanager.kernels.attention.attention_task import (
    AttentionTask,
    give_rows,
    on_pages,
    page_sizes,
)
from gptmanager.kernels.capture.captured_step import StepCapture
from gptmanager.kernels.compilation import compile_all
from gptmanager.kernels.compiled_bodies import (
    bodies_of_model,
    compile_for_adapters,
    compile_for_layers,
)
from gptmanager.kernels.cpu_experts import CpuExperts
from gptmanager.kernels.cpu_matmuls import PARTS_PER_THREAD, SCATTERED, SMALL_MATMUL
from gptmanager.kernels.embedding_lookup import EmbeddingTask, embed
from gptmanager.kernels.gemm.int4_groups import CODEBOOKS
from gptmanager.kernels.gemm.int4_matrix import Int4Matrix
from gptmanager.kernels.gemm.packed_matrix import PANEL_ROWS, Matrix, PackedMatrix, Quantized
from gptmanager.kernels.lora.adapter_arguments import StepAdapters
from gptmanager.kernels.lora.adapter_plan import AdapterPlan
from gptmanager.kernels.lora.adapters import add as adapters_body
from gptmanager.kernels.per_token_kernels import NormTask, RopeTask
from gptmanager.kernels.simd.dtypes import DTYPES
from gptmanager.kernels.simd.lanes import LANES
from gptmanager.kernels.simd.machine_code import compiled
from gptmanager.kernels.simd.threads import address_of, alike


class CpuKernels(CpuExperts):
    """The ops of the network on the CPU.

    The first call of an op compiles the op, which takes seconds, or loads it from Numba's cache.
    `warm_up` does this in advance for the ops that a model needs, and `warm_up_adapters` for the
    ops of adapters. Two managers in two threads may share an object, or have an object each.
    """

    def warm_up(
        self,
        dtype: torch.dtype | None = None,
        quantized: Collection[Quantized] = (),
        others: Sequence[Callable[[int], None]] = (),
        on_progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        """Compile or load the bodies that a model needs, and `others`.

        Bodies that are not in the cache on disk are compiled in several processes. This takes 13 s
        of CPU time, once on a machine.
        """
        bodies = bodies_of_model(dtype, quantized, self.deterministic)
        compile_all([*bodies[:1], *others, *bodies[1:]], on_progress)

    def warm_up_layers(self, kinds: Collection[str]) -> None:
        compile_for_layers(kinds)

    def warm_up_adapters(self) -> None:
        compile_for_adapters()

    def new_step_capture(self) -> StepCapture | None:
        """Return a new capture; None in a subclass, where ops may do more than run tasks."""
        return StepCapture(self._team) if type(self) is CpuKernels else None

    def begin_adapters(self, adapters: StepAdapters | None) -> StepAdapters | None:
        if adapters is None or adapters.pool.dtype not in DTYPES:
            return adapters
        return None if self._adapter_plan(adapters).is_empty else adapters

    def _adapter_plan(self, adapters: StepAdapters) -> AdapterPlan:
        """Return the plan of these adapters. The first call makes the plan, and keeps it."""
        if adapters.plan is None:
            adapters.plan = AdapterPlan(adapters, self._team)
        return cast(AdapterPlan, adapters.plan)

    def add_adapters(
        self, result: Tensor, x: Tensor, adapters: StepAdapters, layer: int, matrix: str
    ) -> None:
        dtype = result.dtype
        if adapters.pool.dtype not in DTYPES or dtype not in DTYPES or x.shape[1] < LANES:
            super().add_adapters(result, x, adapters, layer, matrix)
            return
        own = self._adapter_plan(adapters).of(matrix, layer)
        if own is None:
            return
        if x.dtype not in DTYPES or not x.is_contiguous():
            x = x.float().contiguous()
        size = min(self._team.max_size if own.work >= SMALL_MATMUL else 1, own.num_parts)
        address, scratch = address_of(result, dtype), self._team.scratch(size * own.scratch_bytes)
        kinds = DTYPES[dtype], DTYPES[x.dtype]
        task = own.begin(address, x.data_ptr(), scratch, layer, *kinds, result.shape[1])
        self._team.run(compiled(adapters_body), task, size)

    def linear_silu_mul_adapted(
        self,
        x: Tensor,
        weight: Matrix,
        bias: Tensor | None,
        adapters: StepAdapters,
        layer: int,
        matrix: str,
    ) -> Tensor:
        if adapters.pool.dtype not in DTYPES:
            return super().linear_silu_mul_adapted(x, weight, bias, adapters, layer, matrix)
        plan = self._adapter_plan(adapters)
        if plan.of(matrix, layer) is None:
            return self.linear_silu_mul(x, weight, bias)
        own = plan.tokens_of(matrix, layer)
        if len(own) == len(x):
            return super().linear_silu_mul_adapted(x, weight, bias, adapters, layer, matrix)
        others = sorted({*range(len(x))}.difference(own))
        full = torch.empty(len(x), weight.shape[0], dtype=weight.dtype)
        full[own] = self.linear(x[own], weight, bias)
        self.add_adapters(full, x, adapters, layer, matrix)
        result = torch.empty(len(x), weight.shape[0] // 2, dtype=weight.dtype)
        result[own] = self.silu_mul(full[own])
        result[others] = self.linear_silu_mul(x[others], weight, bias)
        return result

    def embedding(self, ids: Tensor, table: Matrix) -> Tensor:
        if table.dtype not in DTYPES:
            return super().embedding(ids, table)
        result = torch.empty(len(ids), table.shape[1], dtype=table.dtype)
        self._embed(result, ids, table, adds=False)
        return result

    def add_embedding(self, embedded: Tensor, ids: Tensor, table: Tensor) -> None:
        if table.dtype not in DTYPES or embedded.dtype is not table.dtype:
            super().add_embedding(embedded, ids, table)
        else:
            self._embed(embedded, ids, table, adds=True)

    def _embed(self, result: Tensor, ids: Tensor, table: Matrix, *, adds: bool) -> None:
        num_rows, width = table.shape
        groups = minima = codebook = None
        if isinstance(table, Int4Matrix):
            codebook = None if table.codebook is None else CODEBOOKS[table.codebook]
            values, scales, groups, minima = table.values, None, table.scales, table.minima
            lanes, positions, panel = PANEL_ROWS, 4, PANEL_ROWS * table.depth // 2
        elif isinstance(table, PackedMatrix):
            values, scales = table.values, table.scales
            lanes, positions, panel = PANEL_ROWS, values.shape[3], PANEL_ROWS * table.depth
        else:
            values, scales, lanes, positions, panel = table, None, 1, 1, width
        task = EmbeddingTask(
            ids=address_of(ids, torch.int64),
            table=address_of(values, values.dtype),
            scales=address_of(scales, torch.float32),
            groups=address_of(groups, torch.float16),
            minima=address_of(minima, torch.float16),
            codebook=address_of(codebook, torch.int8),
            wide=self._team.scratch(4 * width * self._team.max_size),
            result=address_of(result, table.dtype),
            num_tokens=len(ids),
            num_rows=num_rows,
            width=width,
            lanes=lanes,
            panel=panel,
            positions=positions,
            step=lanes * positions,
            dtype=DTYPES[table.dtype],
            adds=adds,
        )
        self._run(embed, task, SCATTERED * result.numel())

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
        if x.dtype is torch.float64:
            return super()._normalize(x, residual, weight, bias, eps, plus_one, centered=centered)
        dtype, (own, weight, bias) = x.dtype, alike(x, weight, bias)
        if residual is not None and residual.dtype is not own.dtype:
            residual += x
            x, residual = residual, None
            own, weight, bias = alike(x, weight, bias)
        result: Tensor = torch.empty_like(own)
        task = NormTask(
            x=address_of(own, own.dtype),
            residual=address_of(residual, own.dtype),
            weight=address_of(weight, own.dtype),
            bias=address_of(bias, own.dtype),
            result=result.data_ptr(),
            num_tokens=x.numel() // x.shape[-1],
            width=x.shape[-1],
            heads=1,
            stride=x.shape[-1],
            centered=centered,
            dtype=DTYPES[own.dtype],
            eps=eps,
            plus=plus_one,
        )
        self._run(per_token_kernels.normalize, task, x.numel())
        return result if result.dtype is x.dtype is dtype else result.to(x.dtype).to(dtype)

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
        if qkv.dtype not in DTYPES or weight.dtype is not qkv.dtype:
            kind = {"centered": centered, "plus_one": plus_one}
            super().norm_heads(qkv, columns, head_dim, weight, eps, **kind)
            return
        start = address_of(qkv, qkv.dtype) + qkv.itemsize * columns.start
        task = NormTask(
            x=start,
            weight=address_of(weight, qkv.dtype),
            result=start,
            num_tokens=len(qkv),
            width=head_dim,
            heads=len(columns) // head_dim,
            stride=qkv.shape[1],
            weight_stride=head_dim,
            centered=centered,
            dtype=DTYPES[qkv.dtype],
            eps=eps,
            plus=plus_one,
        )
        self._run(per_token_kernels.normalize, task, len(qkv) * len(columns))

    def layer_norm_heads(
        self,
        qkv: Tensor,
        columns: range,
        head_dim: int,
        weight: Tensor,
        bias: Tensor,
        eps: float,
    ) -> None:
        dtype = qkv.dtype
        if dtype not in DTYPES or weight.dtype is not dtype or bias.dtype is not dtype:
            super().layer_norm_heads(qkv, columns, head_dim, weight, bias, eps)
            return
        start = address_of(qkv, dtype) + qkv.itemsize * columns.start
        task = NormTask(
            x=start,
            weight=address_of(weight, dtype),
            bias=address_of(bias, dtype),
            result=start,
            num_tokens=len(qkv),
            width=head_dim,
            heads=len(columns) // head_dim,
            stride=qkv.shape[1],
            centered=True,
            dtype=DTYPES[dtype],
            eps=eps,
        )
        self._run(per_token_kernels.normalize, task, len(qkv) * len(columns))

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
        if pages.values.dtype not in DTYPES:
            given = positions, cos_sin, q_norm, k_norm, eps, pages, rows, norm_last, plus_one
            return super().rope_and_write(qkv, *given)
        num_kv_heads, head_dim = pages.keys.shape[1:3]
        num_tokens, kinds = qkv.shape[0], 1 if pages.is_once else 2
        num_heads = qkv.shape[1] // head_dim - kinds * num_kv_heads
        qkv, q_norm, k_norm = alike(qkv, q_norm, k_norm, strided=True)
        q = pages.values.new_empty(num_tokens, num_heads, head_dim)
        rotated = torch.empty(num_tokens, head_dim, dtype=torch.float32)
        task = on_pages(RopeTask, pages)
        if pages.is_once:
            task.values = 0
        give_rows(task, rows)
        task.qkv, task.stride, task.dtype = qkv.data_ptr(), qkv.stride(0), DTYPES[qkv.dtype]
        task.q, task.rotated = q.data_ptr(), rotated.data_ptr()
        task.positions = address_of(positions, torch.int64)
        if cos_sin is not None:
            task.cos_sin, task.rotary_dim = address_of(cos_sin, torch.float32), cos_sin.shape[1]
        task.q_norm, task.k_norm = address_of(q_norm, qkv.dtype), address_of(k_norm, qkv.dtype)
        task.num_tokens, task.num_heads, task.eps = num_tokens, num_heads, eps
        task.norm_last, task.norm_plus = norm_last, plus_one
        self._run(per_token_kernels.rope_and_write, task, SCATTERED * qkv.numel())
        return q

    def attention(
        self,
        q: Tensor,
        pages: Pages,
        rows: RowSpans,
        shape: AttentionShape,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if pages.values.dtype not in DTYPES:
            return super().attention(q, pages, rows, shape, sinks)
        num_tokens, num_heads, head_dim = q.shape
        (own,), size, task = alike(q), self._team.max_size, on_pages(AttentionTask, pages)
        give_rows(task, rows)
        result: Tensor = own.new_empty(num_tokens, num_heads * head_dim)
        task.page_tokens, scratch_bytes = page_sizes(
            num_heads // task.num_kv_heads,
            head_dim,
            task.tokens_per_block,
            bool(task.token_major),
            task.table_width,
        )
        task.scratch, task.scratch_bytes = self._team.scratch(size * scratch_bytes), scratch_bytes
        task.num_parts = PARTS_PER_THREAD * size if size > 1 else 1
        task.q, task.result, task.dtype = own.data_ptr(), result.data_ptr(), DTYPES[own.dtype]
        task.item_bytes = pages.values.itemsize
        task.num_rows, task.num_heads = rows.kv_lengths.shape[0], num_heads
        task.window, task.sink = shape.window or 0, shape.sink if shape.window else 0
        task.chunked = shape.chunked
        task.scale, task.softcap = shape.scale, shape.softcap
        if sinks is not None:
            (sinks,) = alike(sinks)
            task.sinks, task.sink_dtype = address_of(sinks, sinks.dtype), DTYPES[sinks.dtype]
        self._team.run(compiled(paged_attention.attention), task, size)
        return result if result.dtype is q.dtype else result.to(q.dtype)
