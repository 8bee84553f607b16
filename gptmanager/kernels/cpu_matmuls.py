"""`CpuMatmuls`: matmuls with packed matrices on the CPU, in torch's own threads.

What is not packed uses the reference.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from gptmanager.kernels import token_loops
from gptmanager.kernels.gemm.int16_tiles import FEW_ROWS
from gptmanager.kernels.gemm.matmul import CHUNK_ROWS, STREAMED_ROWS
from gptmanager.kernels.gemm.matmul_plan import MatmulPlan, can_be_packed, plan_matmul, registers
from gptmanager.kernels.gemm.packed_matrix import PANEL_ROWS, Matrix, PackedMatrix
from gptmanager.kernels.gemm.quantized_activations import quantize_rows, row_bytes
from gptmanager.kernels.reference import Kernels
from gptmanager.kernels.simd.dtypes import DTYPES
from gptmanager.kernels.simd.machine_code import compiled
from gptmanager.kernels.simd.threads import Team, alike, with_first
from gptmanager.kernels.token_loops import ConversionTask

# Waking a second thread costs about as much as this many elements.
SMALL = 1 << 15
SMALL_MATMUL = 1 << 18  # the same in multiplications
SCATTERED = 8  # relative cost of an element that is written far from its neighbors
PARTS_PER_THREAD = 8
STREAMS_PER_THREAD = 4  # pieces of a matrix that is read at memory bandwidth


class CpuMatmuls(Kernels):
    """The matmuls of `CpuKernels`, and the threads that all its ops run in."""

    def __init__(self, deterministic: bool = False) -> None:
        super().__init__(deterministic)
        self._team = Team()

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

    def _run(self, body: Callable[[int], None], task: ctypes.Structure, work: int) -> None:
        """Run `body`, on the caller's thread alone if `work` (elements) is small."""
        size = self._team.max_size if work >= SMALL else 1
        task.num_parts = PARTS_PER_THREAD * size if size > 1 else 1
        self._team.run(compiled(body), task, size)
