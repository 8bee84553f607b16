"""`CpuKernels`: ops compiled by Numba that run in torch's own threads; other ops use the reference.

This class passes addresses to the compiled bodies, which widen inputs to float32 and round a result
once. float64 uses the reference. Only tensors of mixed dtypes are converted first. Every op except
a matmul is bitwise independent of the other tokens in the call, in both modes; float64 is if
deterministic. All ops are bitwise independent of the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Literal, cast

import torch
from torch import Tensor

from gptmanager.kernels import token_loops
from gptmanager.kernels.attention import paged_attention
from gptmanager.kernels.attention.attention_arguments import AttentionShape, Pages, RowSpans
from gptmanager.kernels.attention.attention_task import (
    AttentionTask,
    give_rows,
    on_pages,
    page_sizes,
)
from gptmanager.kernels.captured_step import StepCapture
from gptmanager.kernels.compilation import compile_all
from gptmanager.kernels.compiled_bodies import bodies_of_model, compile_for_adapters
from gptmanager.kernels.gemm.int16_tiles import FEW_ROWS
from gptmanager.kernels.gemm.matmul import CHUNK_ROWS, STREAMED_ROWS
from gptmanager.kernels.gemm.matmul_plan import MatmulPlan, can_be_packed, plan_matmul, registers
from gptmanager.kernels.gemm.packed_matrix import PANEL_ROWS, Matrix, PackedMatrix
from gptmanager.kernels.gemm.quantized_activations import quantize_rows, row_bytes
from gptmanager.kernels.lora.adapter_arguments import StepAdapters
from gptmanager.kernels.lora.adapter_plan import AdapterPlan
from gptmanager.kernels.lora.adapters import add as adapters_body
from gptmanager.kernels.reference import Kernels
from gptmanager.kernels.simd.dtypes import DTYPES
from gptmanager.kernels.simd.lanes import LANES
from gptmanager.kernels.simd.machine_code import compiled
from gptmanager.kernels.simd.threads import Team, address_of, alike, with_first
from gptmanager.kernels.token_loops import (
    ActivationTask,
    ConversionTask,
    EmbeddingTask,
    NormTask,
    RopeTask,
)

# Waking a second thread costs about as much as this many elements.
SMALL = 1 << 15
SMALL_MATMUL = 1 << 18  # the same in multiplications
SCATTERED = 8  # relative cost of an element that is written far from its neighbors
PARTS_PER_THREAD = 8
STREAMS_PER_THREAD = 4  # pieces of a matrix that is read at memory bandwidth


class CpuKernels(Kernels):
    """The ops on the CPU, for pages of any dtype of `DTYPES`; others use the reference.

    The first call of an op compiles it (seconds) or loads it from Numba's cache; `warm_up` does
    that for all ops. Two managers may use one object, or one each, from two threads.
    """

    def __init__(self, deterministic: bool = False) -> None:
        super().__init__(deterministic)
        self._team = Team()

    def warm_up(
        self,
        dtype: torch.dtype | None = None,
        quantized: bool = False,
        others: Sequence[Callable[[int], None]] = (),
        on_progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        """Compile bodies that are not on disk, on all cores: 13 s of CPU time once on a machine."""
        bodies = bodies_of_model(dtype, quantized, self.deterministic)
        compile_all([*bodies[:1], *others, *bodies[1:]], on_progress)

    def warm_up_adapters(self) -> None:
        compile_for_adapters()

    def new_step_capture(self) -> StepCapture | None:
        """Return None for a subclass: its ops may do more than run tasks."""
        return StepCapture(self._team) if type(self) is CpuKernels else None

    def new_matrix(
        self, rows: int, columns: int, dtype: torch.dtype, quantized: bool = False
    ) -> PackedMatrix | None:
        if not can_be_packed(dtype, quantized):
            return None
        matrix = PackedMatrix(rows, columns, dtype, quantized)
        self._plan(matrix)  # compiles missing bodies
        return matrix

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, PackedMatrix):
            return self._multiply(x, weight, bias, False)
        return super().linear(x, weight, bias)

    def linear_silu_mul(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, PackedMatrix) and weight.shape[0] % (2 * PANEL_ROWS) == 0:
            return self._multiply(x, weight, bias, True)
        return super().linear_silu_mul(x, weight, bias)

    def begin_adapters(self, adapters: StepAdapters | None) -> StepAdapters | None:
        if adapters is None or adapters.pool.dtype not in DTYPES:
            return adapters
        return None if self._adapter_plan(adapters).is_empty else adapters

    def _adapter_plan(self, adapters: StepAdapters) -> AdapterPlan:
        """Return the plan of these adapters, which is created once for any number of steps."""
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
        if isinstance(table, PackedMatrix):
            values, scales = table.values, table.scales
            lanes, positions, panel = PANEL_ROWS, values.shape[3], PANEL_ROWS * table.depth
        else:
            values, scales, lanes, positions, panel = table, None, 1, 1, width
        task = EmbeddingTask(
            ids=address_of(ids, torch.int64),
            table=address_of(values, values.dtype),
            scales=address_of(scales, torch.float32),
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
        self._run(token_loops.embed, task, SCATTERED * result.numel())

    def _plan(self, matrix: PackedMatrix) -> tuple[MatmulPlan, MatmulPlan]:
        plans = matrix.plans.get(self.deterministic)
        if plans is None:
            plan_it = functools.partial(plan_matmul, matrix, deterministic=self.deterministic)
            plans = matrix.plans[self.deterministic] = plan_it(silu=False), plan_it(silu=True)
        return plans

    def _multiply(self, x: Tensor, matrix: PackedMatrix, bias: Tensor | None, silu: bool) -> Tensor:
        plan, num_rows = self._plan(matrix)[silu], x.shape[0]
        result = torch.empty(num_rows, plan.columns, dtype=matrix.dtype)
        if not result.numel():
            return result
        body, dtype, scratch_bytes = plan.for_few if num_rows <= FEW_ROWS else plan.for_many
        is_ready = x.dtype is dtype and x.is_contiguous() and plan.depth == x.shape[1]
        if dtype is torch.int8 or not is_ready:
            x = self._converted(x, dtype, plan.depth)
        num_chunks = -(-num_rows // CHUNK_ROWS)
        is_small = num_rows * plan.work < SMALL_MATMUL
        size = min(1 if is_small else self._team.max_size, num_chunks * plan.num_groups)
        part_groups = 1
        if num_rows <= STREAMED_ROWS:
            part_groups = max(1, plan.num_groups // (size * STREAMS_PER_THREAD))
        num_parts = num_chunks * -(-plan.num_groups // part_groups)
        bias_address = bias_dtype = 0
        if bias is not None:
            (bias,) = alike(bias)
            bias_address, bias_dtype = bias.data_ptr(), DTYPES[bias.dtype]
        task = with_first(
            plan.task,
            *(num_parts, x.data_ptr(), result.data_ptr(), bias_address, bias_dtype),
            *(self._team.scratch(size * scratch_bytes), scratch_bytes, num_rows, num_chunks),
            *(part_groups, registers(16), registers(num_rows % 16)),
        )
        self._team.run(body, task, size)
        return result

    def _converted(self, x: Tensor, dtype: torch.dtype, width: int) -> Tensor:
        """Return x as contiguous `[T, width]` of that dtype, padded with zeros.

        int8: as quantized rows, which are longer.
        """
        (x,) = alike(x)
        is_quantized = dtype is torch.int8
        size = row_bytes(width) if is_quantized else width
        result = torch.empty(x.shape[0], size, dtype=dtype)
        task = ConversionTask(
            x=x.data_ptr(),
            result=result.data_ptr(),
            num_tokens=x.shape[0],
            given=x.shape[1],
            width=width,
            x_dtype=DTYPES[x.dtype],
            dtype=DTYPES.get(dtype, 0),
        )
        body = quantize_rows if is_quantized else token_loops.convert
        self._run(body, task, result.numel())
        return result

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype is torch.float64:
            return super().rms_norm(x, weight, eps)
        return self._normalize(x, None, weight, None, eps, centered=False)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype is torch.float64:
            return super().add_rms_norm(x, residual, weight, eps)
        return self._normalize(x, residual, weight, None, eps, centered=False)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        if x.dtype is torch.float64:
            return super().layer_norm(x, weight, bias, eps)
        return self._normalize(x, None, weight, bias, eps, centered=True)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        if x.dtype is torch.float64:
            return super().add_layer_norm(x, residual, weight, bias, eps)
        return self._normalize(x, residual, weight, bias, eps, centered=True)

    def _normalize(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        *,
        centered: bool,
    ) -> Tensor:
        own, weight, bias = alike(x, weight, bias)
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
            centered=centered,
            dtype=DTYPES[own.dtype],
            eps=eps,
        )
        self._run(token_loops.normalize, task, x.numel())
        return result if result.dtype is x.dtype else result.to(x.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        if gate_up.dtype is torch.float64:
            return super().silu_mul(gate_up)
        width = gate_up.shape[-1] // 2
        return self._activate(gate_up, width, token_loops.SILU_MUL)

    def gelu(self, x: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
        if x.dtype is torch.float64:
            return super().gelu(x, approximate)
        tanh = approximate == "tanh"
        kind = token_loops.GELU_TANH if tanh else token_loops.GELU_ERF
        return self._activate(x, x.shape[-1], kind)

    def _activate(self, x: Tensor, width: int, kind: int) -> Tensor:
        """Activate x; `width` is that of the result, and further columns of x are factors."""
        (own,) = alike(x)
        result: Tensor = own.new_empty(*x.shape[:-1], width)
        task = ActivationTask(
            x=address_of(own, own.dtype),
            factor=address_of(own, own.dtype) + own.itemsize * width,
            result=result.data_ptr(),
            num_tokens=result.numel() // width,
            width=width,
            stride=x.shape[-1],
            kind=kind,
            dtype=DTYPES[own.dtype],
        )
        self._run(token_loops.activate, task, result.numel())
        return result.to(x.dtype)

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
        if pages.values.dtype not in DTYPES:
            return super().rope_and_write(qkv, positions, cos_sin, q_norm, k_norm, eps, pages, rows)
        num_kv_heads, head_dim = pages.keys.shape[1:3]
        num_tokens, num_heads = qkv.shape[0], qkv.shape[1] // head_dim - 2 * num_kv_heads
        qkv, q_norm, k_norm = alike(qkv, q_norm, k_norm)
        q = pages.values.new_empty(num_tokens, num_heads, head_dim)
        rotated = torch.empty(num_tokens, head_dim, dtype=torch.float32)
        task = on_pages(RopeTask, pages)
        give_rows(task, rows)
        task.qkv, task.dtype = qkv.data_ptr(), DTYPES[qkv.dtype]
        task.q, task.rotated = q.data_ptr(), rotated.data_ptr()
        task.positions = address_of(positions, torch.int64)
        if cos_sin is not None:
            task.cos_sin, task.rotary_dim = address_of(cos_sin, torch.float32), cos_sin.shape[1]
        task.q_norm, task.k_norm = address_of(q_norm, qkv.dtype), address_of(k_norm, qkv.dtype)
        task.num_tokens, task.num_heads, task.eps = num_tokens, num_heads, eps
        self._run(token_loops.rope_and_write, task, SCATTERED * qkv.numel())
        return q

    def attention(self, q: Tensor, pages: Pages, rows: RowSpans, shape: AttentionShape) -> Tensor:
        if shape.softcap or pages.values.dtype not in DTYPES:
            return super().attention(q, pages, rows, shape)
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
        task.scale = shape.scale
        self._team.run(compiled(paged_attention.attention), task, size)
        return result if result.dtype is q.dtype else result.to(q.dtype)

    def _run(self, body: Callable[[int], None], task: ctypes.Structure, work: int) -> None:
        """Run `body`, on the caller's thread alone if `work` (elements) is small."""
        size = self._team.max_size if work >= SMALL else 1
        task.num_parts = PARTS_PER_THREAD * size if size > 1 else 1
        self._team.run(compiled(body), task, size)
