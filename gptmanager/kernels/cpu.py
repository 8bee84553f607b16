"""`CpuKernels`: the ops that pay, by Numba, in torch's own threads; the rest is the reference's.

It decides which op is overridden, converts at the border (everything here is float32: bfloat16
and float16 tensors are widened and the result rounded once), and hands addresses to the compiled
bodies. Every op but `linear` is bitwise independent of the other tokens in the call, in both
modes, and of the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Literal
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from gptmanager.kernels import paged_attention, token_loops
from gptmanager.kernels.attention_arguments import AttentionShape, Pages, RowSpans
from gptmanager.kernels.attention_task import AttentionTask, page_of, scratch_floats
from gptmanager.kernels.machine_code import compiled
from gptmanager.kernels.matrix_product import CHUNK_ROWS, ProductTask
from gptmanager.kernels.packed_matrix import PANEL_ROWS, Matrix, PackedMatrix
from gptmanager.kernels.product_plan import (
    FEW_ROWS,
    ProductPlan,
    can_be_packed,
    plan_product,
    registers,
)
from gptmanager.kernels.reference import Kernels
from gptmanager.kernels.threads import Team
from gptmanager.kernels.token_loops import ActivationTask, NormTask, RopeTask

# Waking a second thread costs about as much as this many elements.
SMALL = 1 << 15
SMALL_PRODUCT = 1 << 18  # the same in products of two numbers
PARTS_PER_THREAD = 8


def _address(tensor: Tensor | None, dtype: torch.dtype = torch.float32) -> int:
    """Of the first element, 0 for None. The bodies trust it: TypeError for any other layout."""
    if tensor is None:
        return 0
    if tensor.dtype is not dtype or not tensor.is_contiguous():
        layout = "contiguous" if tensor.is_contiguous() else "strided"
        raise TypeError(f"expected a contiguous {dtype} tensor, got a {layout} {tensor.dtype} one")
    return tensor.data_ptr()


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float().contiguous()


def _wide_if_given(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _wide(tensor)


def _page_fields(pages: Pages) -> dict[str, int]:
    """Fields of a task.

    What one block holds must be contiguous, of keys perhaps as `[K, B, D]`; the blocks may lie
    apart, at equal distances for keys and values.
    """
    keys, values, _ = pages
    num_blocks, num_kv_heads, head_dim, tokens_per_block = keys.shape
    strides = keys.stride(0), values.stride(0)
    if num_blocks > 1 and strides[0] != strides[1]:
        raise TypeError(f"keys and values of equal strides expected, got {strides}")
    token_major = not keys[:1].is_contiguous()
    return {
        "keys": _address(keys[:1].mT if token_major else keys[:1]),
        "values": _address(values[:1]),
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "tokens_per_block": tokens_per_block,
        "block_stride": strides[0],
        "token_major": token_major,
    }


def _row_fields(rows: RowSpans) -> dict[str, int]:
    return {
        "row_starts": _address(rows.row_starts, torch.int32),
        "kv_lengths": _address(rows.kv_lengths, torch.int32),
        "slots": _address(rows.slots, torch.int32),
        "block_tables": _address(rows.block_tables, torch.int32),
        "table_width": rows.block_tables.shape[1],
    }


@functools.cache
def _page_sizes(
    group: int, head_dim: int, tokens_per_block: int, token_major: bool, blocks_per_sequence: int
) -> tuple[int, int]:
    """Positions that are read as one page, and floats that a thread works in."""
    page_tokens = page_of(tokens_per_block, token_major, blocks_per_sequence)
    return page_tokens, scratch_floats(group, head_dim, page_tokens, token_major)


class CpuKernels(Kernels):
    """The ops on the CPU. Pages are float32; `q` and the attention's result are as well.

    The first call of an op compiles it (seconds) or loads it from Numba's cache; `warm_up` does
    so for all of them. Two managers may use one object, or one each, from two threads.
    """

    def __init__(self, deterministic: bool = False) -> None:
        super().__init__(deterministic)
        self._team = Team()
        self._plans: WeakKeyDictionary[PackedMatrix, tuple[ProductPlan, ProductPlan]] = (
            WeakKeyDictionary()
        )

    def warm_up(self) -> None:
        """Compiles every body, about 6 s of CPU time once on a machine and 0.3 s from then on."""
        for body in (
            paged_attention.attention,
            token_loops.rope_and_write,
            token_loops.normalize,
            token_loops.activate,
        ):
            compiled(body)

    def new_matrix(
        self, rows: int, columns: int, dtype: torch.dtype, quantized: bool = False
    ) -> PackedMatrix | None:
        if not can_be_packed(dtype, quantized):
            return None
        matrix = PackedMatrix(rows, columns, dtype, quantized)
        self._plan(matrix)  # compiles what is not yet
        return matrix

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, PackedMatrix):
            return self._multiply(x, weight, bias, False)
        return super().linear(x, weight, bias)

    def linear_silu_mul(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, PackedMatrix) and weight.shape[0] % (2 * PANEL_ROWS) == 0:
            return self._multiply(x, weight, bias, True)
        return super().linear_silu_mul(x, weight, bias)

    def embedding(self, ids: Tensor, table: Matrix) -> Tensor:
        if not isinstance(table, PackedMatrix):
            return super().embedding(ids, table)
        rows = table.values[ids // PANEL_ROWS, :, ids % PANEL_ROWS].flatten(1)
        if table.scales is not None:
            rows = (rows * table.scales[ids].unsqueeze(1)).to(table.dtype)
        return rows[:, : table.shape[1]]

    def _plan(self, matrix: PackedMatrix) -> tuple[ProductPlan, ProductPlan]:
        plan_it = functools.partial(plan_product, matrix, deterministic=self.deterministic)
        plans = self._plans[matrix] = plan_it(silu=False), plan_it(silu=True)
        return plans

    def _multiply(self, x: Tensor, matrix: PackedMatrix, bias: Tensor | None, silu: bool) -> Tensor:
        plan, num_rows = (self._plans.get(matrix) or self._plan(matrix))[silu], x.shape[0]
        body, dtype, scratch_bytes = plan.for_few if num_rows <= FEW_ROWS else plan.for_many
        x = x.to(dtype).contiguous()
        if plan.task.depth > x.shape[1]:
            x = F.pad(x, (0, plan.task.depth - x.shape[1]))
        task = ProductTask.from_buffer_copy(plan.task)
        task.rows, task.num_chunks = num_rows, -(-num_rows // CHUNK_ROWS)
        task.num_parts = task.num_chunks * plan.num_groups
        is_small = num_rows * plan.work < SMALL_PRODUCT
        size = min(1 if is_small else self._team.max_size, task.num_parts)
        result = torch.empty(num_rows, plan.columns, dtype=matrix.dtype)
        scratch = torch.empty(size, scratch_bytes, dtype=torch.uint8)
        bias = _wide_if_given(bias)
        task.x, task.bias, task.result = x.data_ptr(), _address(bias), result.data_ptr()
        task.scratch, task.scratch_bytes = scratch.data_ptr(), scratch_bytes
        task.full, task.tail = registers(16), registers(num_rows % 16)
        self._team.run(body, task, size)
        return result

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._normalize(x, None, weight, None, eps, centered=False)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._normalize(x, residual, weight, None, eps, centered=False)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return self._normalize(x, None, weight, bias, eps, centered=True)

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
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
        dtype = x.dtype
        if residual is not None and residual.dtype is not torch.float32:
            residual += x
            x, residual = residual, None
        x, weight, bias = _wide(x), _wide(weight), _wide_if_given(bias)
        result = torch.empty_like(x)
        task = NormTask(
            x=_address(x),
            residual=_address(residual),
            weight=_address(weight),
            bias=_address(bias),
            result=result.data_ptr(),
            num_tokens=x.numel() // x.shape[-1],
            width=x.shape[-1],
            centered=centered,
            eps=eps,
        )
        self._run(token_loops.normalize, task, x.numel())
        return result.to(dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        wide, width = _wide(gate_up), gate_up.shape[-1] // 2
        result = wide.new_empty(*gate_up.shape[:-1], width)
        task = ActivationTask(
            x=_address(wide),
            factor=_address(wide) + 4 * width,
            result=result.data_ptr(),
            num_tokens=result.numel() // width,
            width=width,
            stride=2 * width,
            kind=token_loops.SILU_MUL,
        )
        self._run(token_loops.activate, task, result.numel())
        return result.to(gate_up.dtype)

    def gelu(self, x: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
        wide, width = _wide(x), x.shape[-1]
        result = torch.empty_like(wide)
        task = ActivationTask(
            x=_address(wide),
            result=result.data_ptr(),
            num_tokens=x.numel() // width,
            width=width,
            stride=width,
            kind=token_loops.GELU_TANH if approximate == "tanh" else token_loops.GELU_ERF,
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
        if pages.cache_scales is not None:
            return super().rope_and_write(qkv, positions, cos_sin, q_norm, k_norm, eps, pages, rows)
        num_kv_heads, head_dim = pages.keys.shape[1:3]
        num_tokens, num_heads = qkv.shape[0], qkv.shape[1] // head_dim - 2 * num_kv_heads
        qkv, q_norm, k_norm = _wide(qkv), _wide_if_given(q_norm), _wide_if_given(k_norm)
        q = qkv.new_empty(num_tokens * (num_heads + 1), head_dim)
        task = RopeTask(
            **_page_fields(pages),
            **_row_fields(rows),
            qkv=_address(qkv),
            q=q.data_ptr(),
            positions=_address(positions, torch.int64),
            cos_sin=_address(cos_sin),
            q_norm=_address(q_norm),
            k_norm=_address(k_norm),
            num_tokens=num_tokens,
            num_heads=num_heads,
            rotary_dim=0 if cos_sin is None else cos_sin.shape[1],
            eps=eps,
        )
        self._run(token_loops.rope_and_write, task, qkv.numel())
        return q[: num_tokens * num_heads].view(num_tokens, num_heads, head_dim)

    def attention(self, q: Tensor, pages: Pages, rows: RowSpans, shape: AttentionShape) -> Tensor:
        if shape.softcap or pages.cache_scales is not None:
            return super().attention(q, pages, rows, shape)
        num_tokens, num_heads, head_dim = q.shape
        wide, size, fields = _wide(q), self._team.max_size, _page_fields(pages)
        result = wide.new_empty(num_tokens, num_heads * head_dim)
        page_tokens, floats = _page_sizes(
            num_heads // fields["num_kv_heads"],
            head_dim,
            fields["tokens_per_block"],
            bool(fields["token_major"]),
            rows.block_tables.shape[1],
        )
        scratch = wide.new_empty(size, floats)
        task = AttentionTask(
            **fields,
            page_tokens=page_tokens,
            **_row_fields(rows),
            num_parts=PARTS_PER_THREAD * size if size > 1 else 1,
            q=_address(wide),
            result=result.data_ptr(),
            num_rows=rows.kv_lengths.shape[0],
            num_heads=num_heads,
            window=shape.window or 0,
            sink=shape.sink if shape.window else 0,
            scratch=scratch.data_ptr(),
            scratch_bytes=4 * floats,
            scale=shape.scale,
        )
        self._team.run(compiled(paged_attention.attention), task, size)
        return result.to(q.dtype)

    def _run(self, body: Callable[[int], None], task: ctypes.Structure, work: int) -> None:
        """`work`: elements. Little of it stays on the caller's thread."""
        size = self._team.max_size if work >= SMALL else 1
        task.num_parts = PARTS_PER_THREAD * size if size > 1 else 1
        self._team.run(compiled(body), task, size)
