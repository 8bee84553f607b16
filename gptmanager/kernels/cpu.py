"""`CpuKernels`: the ops that pay, by Numba, in torch's own threads; the rest is the reference's.

It decides which op is overridden and hands addresses to the compiled bodies, which widen what they
read to float32 and round a result once. Only tensors of several dtypes are converted before. Every
op but `linear` is bitwise independent of the other tokens in the call, in both modes, and of the
number of threads.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from gptmanager.kernels import paged_attention, token_loops
from gptmanager.kernels.attention_arguments import AttentionShape, Pages, RowSpans
from gptmanager.kernels.attention_task import AttentionTask, page_of, scratch_floats
from gptmanager.kernels.dtypes import DTYPES
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
SCATTERED = 8  # times as much as an element costs one that is written far from its neighbors
PARTS_PER_THREAD = 8


def _address(tensor: Tensor | None, dtype: torch.dtype) -> int:
    """Of the first element, 0 for None. The bodies trust it: TypeError for any other layout."""
    if tensor is None:
        return 0
    if tensor.dtype is not dtype or not tensor.is_contiguous():
        layout = "contiguous" if tensor.is_contiguous() else "strided"
        raise TypeError(f"expected a contiguous {dtype} tensor, got a {layout} {tensor.dtype} one")
    return tensor.data_ptr()


def _are_alike(*tensors: Tensor | None) -> bool:
    """Whether they have one dtype, which compiled code reads."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
    return len(dtypes) == 1 and dtypes <= DTYPES.keys()


def _alike(x: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    """Contiguous; widened to float32 if they are not alike."""
    dtype = x.dtype if _are_alike(x, *others) else torch.float32
    return tuple(None if it is None else it.to(dtype).contiguous() for it in (x, *others))


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
        "keys": _address(keys[:1].mT if token_major else keys[:1], values.dtype),
        "values": _address(values[:1], values.dtype),
        "page_dtype": DTYPES[values.dtype],
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
    """The ops on the CPU, for pages of any dtype of `DTYPES`; fp8 is the reference's.

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
        if bias is not None:
            bias = bias.float().contiguous()
            task.bias = bias.data_ptr()
        task.x, task.result = x.data_ptr(), result.data_ptr()
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
        if residual is not None and not _are_alike(x, residual, weight, bias):
            residual += x
            x, residual = residual, None
        own, weight, bias = _alike(x, weight, bias)
        result: Tensor = torch.empty_like(own)
        task = NormTask(
            x=_address(own, own.dtype),
            residual=_address(residual, own.dtype),
            weight=_address(weight, own.dtype),
            bias=_address(bias, own.dtype),
            result=result.data_ptr(),
            num_tokens=x.numel() // x.shape[-1],
            width=x.shape[-1],
            centered=centered,
            dtype=DTYPES[own.dtype],
            eps=eps,
        )
        self._run(token_loops.normalize, task, x.numel())
        return result.to(x.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        width = gate_up.shape[-1] // 2
        return self._activate(gate_up, width, token_loops.SILU_MUL)

    def gelu(self, x: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
        tanh = approximate == "tanh"
        kind = token_loops.GELU_TANH if tanh else token_loops.GELU_ERF
        return self._activate(x, x.shape[-1], kind)

    def _activate(self, x: Tensor, width: int, kind: int) -> Tensor:
        """`width`: of the result; what x has beyond it are factors."""
        (own,) = _alike(x)
        result: Tensor = own.new_empty(*x.shape[:-1], width)
        task = ActivationTask(
            x=_address(own, own.dtype),
            factor=_address(own, own.dtype) + own.itemsize * width,
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
        if pages.cache_scales is not None:
            return super().rope_and_write(qkv, positions, cos_sin, q_norm, k_norm, eps, pages, rows)
        num_kv_heads, head_dim = pages.keys.shape[1:3]
        num_tokens, num_heads = qkv.shape[0], qkv.shape[1] // head_dim - 2 * num_kv_heads
        qkv, q_norm, k_norm = _alike(qkv, q_norm, k_norm)
        q = pages.values.new_empty(num_tokens, num_heads, head_dim)
        turned = torch.empty(num_tokens, head_dim, dtype=torch.float32)
        task = RopeTask(
            **_page_fields(pages),
            **_row_fields(rows),
            qkv=_address(qkv, qkv.dtype),
            q=q.data_ptr(),
            turned=turned.data_ptr(),
            positions=_address(positions, torch.int64),
            cos_sin=_address(cos_sin, torch.float32),
            q_norm=_address(q_norm, qkv.dtype),
            k_norm=_address(k_norm, qkv.dtype),
            num_tokens=num_tokens,
            num_heads=num_heads,
            rotary_dim=0 if cos_sin is None else cos_sin.shape[1],
            dtype=DTYPES[qkv.dtype],
            eps=eps,
        )
        self._run(token_loops.rope_and_write, task, SCATTERED * qkv.numel())
        return q

    def attention(self, q: Tensor, pages: Pages, rows: RowSpans, shape: AttentionShape) -> Tensor:
        if shape.softcap or pages.cache_scales is not None:
            return super().attention(q, pages, rows, shape)
        num_tokens, num_heads, head_dim = q.shape
        (own,), size, fields = _alike(q), self._team.max_size, _page_fields(pages)
        result: Tensor = own.new_empty(num_tokens, num_heads * head_dim)
        page_tokens, floats = _page_sizes(
            num_heads // fields["num_kv_heads"],
            head_dim,
            fields["tokens_per_block"],
            bool(fields["token_major"]),
            rows.block_tables.shape[1],
        )
        scratch = torch.empty(size, floats, dtype=torch.float32)
        task = AttentionTask(
            **fields,
            page_tokens=page_tokens,
            **_row_fields(rows),
            num_parts=PARTS_PER_THREAD * size if size > 1 else 1,
            q=_address(own, own.dtype),
            result=result.data_ptr(),
            dtype=DTYPES[own.dtype],
            item_bytes=pages.values.itemsize,
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
