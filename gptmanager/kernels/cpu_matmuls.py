"""`CpuMatmuls`: matmuls with packed matrices on the CPU, in torch's own threads.

Matrices that are not packed use the reference.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from gptmanager.kernels import per_token_kernels
from gptmanager.kernels.attention.head_matmul import (
    HeadMatmulTask,
    multiply_heads,
    scratch_bytes,
)
from gptmanager.kernels.gemm.int4_groups import codebook_of
from gptmanager.kernels.gemm.int4_matrix import Int4Matrix
from gptmanager.kernels.gemm.matmul import STREAMED_ROWS
from gptmanager.kernels.gemm.matmul_plan import (
    Instructions,
    MatmulPlan,
    can_be_packed,
    plan_matmul,
    registers,
)
from gptmanager.kernels.gemm.matmul_task import CHUNK_ROWS
from gptmanager.kernels.gemm.packed_matrix import PANEL_ROWS, Matrix, PackedMatrix, Quantized
from gptmanager.kernels.per_token_kernels import ConversionTask
from gptmanager.kernels.reference import Kernels
from gptmanager.kernels.simd.dtypes import DTYPES
from gptmanager.kernels.simd.machine_code import compiled
from gptmanager.kernels.simd.threads import Team, address_of, alike, with_first

# Waking a second thread costs about as much as computing this many elements.
SMALL = 1 << 15
SMALL_MATMUL = 1 << 18  # the same cost, counted in multiplications of a matmul
SCATTERED = 8  # relative cost of an element that is written far from its neighbors
PARTS_PER_THREAD = 8
# With more tokens in bfloat16, torch is faster at `linear_heads`: it multiplies pairs of numbers.
MOST_PAIRED = 32
STREAMS_PER_THREAD = 4  # parts per thread if memory bandwidth limits the matmul (few rows of x)


class CpuMatmuls(Kernels):
    """The matmuls of `CpuKernels`, and the threads that all its ops run in."""

    quantized_kinds: tuple[Quantized, ...] = ("int8", "int4")
    expert_kinds: tuple[Quantized, ...] = ("int8", "int4")
    group_kinds: tuple[Quantized, ...] = ("int4", "e2m1", "iq4")

    def __init__(self, deterministic: bool = False) -> None:
        super().__init__(deterministic)
        if not can_be_packed(torch.float32, "int4"):
            self.group_kinds = ()  # then 8 bits take less memory than the floats of each group
        self._team = Team()

    def new_matrix(
        self,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        quantized: Quantized | None = None,
        device: torch.device | str = "cpu",
    ) -> PackedMatrix | None:
        if not can_be_packed(dtype, quantized):
            return None
        codebook = codebook_of(quantized)
        if quantized == "int4" or codebook is not None:
            matrix: PackedMatrix = Int4Matrix(rows, columns, dtype, codebook=codebook)
        else:
            matrix = PackedMatrix(rows, columns, dtype, quantized == "int8")
        self._plan(matrix)  # compiles the machine code that is still missing
        return matrix

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, PackedMatrix):
            return self._multiply(x, weight, bias, False)
        return super().linear(x, weight, bias)

    def linear_silu_mul(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        if isinstance(weight, PackedMatrix) and weight.shape[0] % (2 * PANEL_ROWS) == 0:
            return self._multiply(x, weight, bias, True)
        return super().linear_silu_mul(x, weight, bias)

    def linear_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        (num_tokens, num_heads, depth), columns, dtype = x.shape, weight.shape[2], x.dtype
        pays = dtype is not torch.bfloat16 or num_tokens <= MOST_PAIRED or self.deterministic
        if dtype not in DTYPES or weight.dtype is not dtype or not pays:
            return super().linear_heads(x, weight)
        if x.stride(2) != 1:
            x = x.contiguous()
        result = torch.empty(num_tokens, num_heads, columns, dtype=dtype)
        size = scratch_bytes(depth, columns)
        task = HeadMatmulTask(
            x=x.data_ptr(),
            matrices=address_of(weight, dtype),
            result=result.data_ptr(),
            scratch=self._team.scratch(size * self._team.max_size),
            scratch_bytes=size,
            num_tokens=num_tokens,
            num_heads=num_heads,
            stride=x.stride(0),
            head_stride=x.stride(1),
            depth=depth,
            columns=columns,
            dtype=DTYPES[dtype],
            item_bytes=x.itemsize,
        )
        self._run(multiply_heads, task, x.numel() * columns * SMALL // SMALL_MATMUL)
        return result

    def joined(self, *parts: Tensor) -> Tensor:
        shape, dtype = parts[0].shape[:-1], parts[0].dtype
        if dtype not in DTYPES or any(it.dtype is not dtype for it in parts):
            return super().joined(*parts)
        width, first = sum(it.shape[-1] for it in parts), 0
        result = torch.empty(*shape, width, dtype=dtype)
        for part in parts:
            (x,) = alike(part.flatten(0, -2), strided=True)
            task = ConversionTask(
                x=x.data_ptr(),
                result=result.data_ptr() + first * result.itemsize,
                num_tokens=len(x),
                given=x.shape[1],
                width=x.shape[1],
                stride=x.stride(0),
                result_stride=width,
                x_dtype=DTYPES[dtype],
                dtype=DTYPES[dtype],
            )
            self._run(per_token_kernels.convert, task, x.numel())
            first += x.shape[1]
        return result

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
        own = plan.for_rows(num_rows)
        body, scratch_bytes = own.body, own.scratch_bytes
        is_ready = x.dtype is own.dtype and x.is_contiguous() and plan.depth == x.shape[1]
        if own.quantize is not None or not is_ready:
            x = self._converted(x, own, plan.depth)
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

    def _converted(self, x: Tensor, own: Instructions, width: int) -> Tensor:
        """Return x as the contiguous rows that these instructions read: padded with zeros to
        `width` elements, and quantized if the instructions need that.
        """
        dtype, size = own.dtype, own.row_bytes or width
        if own.quantize is not None:  # few rows are converted to this dtype, too
            x, dtype = x.to(dtype), torch.int8
        (x,) = alike(x)
        result = torch.empty(x.shape[0], size, dtype=dtype)
        task = ConversionTask(
            x=x.data_ptr(),
            result=result.data_ptr(),
            num_tokens=x.shape[0],
            given=x.shape[1],
            width=width,
            stride=x.shape[1],
            result_stride=width,
            x_dtype=DTYPES[x.dtype],
            dtype=DTYPES.get(dtype, 0),
        )
        self._run(own.quantize or per_token_kernels.convert, task, result.numel())
        return result

    def _run(self, body: Callable[[int], None], task: ctypes.Structure, work: int) -> None:
        """Run `body`, on the caller's thread alone if `work` (elements) is small."""
        size = self._team.max_size if work >= SMALL else 1
        task.num_parts = PARTS_PER_THREAD * size if size > 1 else 1
        self._team.run(compiled(body), task, size)
