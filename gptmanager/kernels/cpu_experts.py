"""`CpuExperts`: the experts of a layer on the CPU, the matmuls of all of them as one task.

Only experts that tokens have chosen are read. Matrices that are not packed use the reference.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gptmanager.kernels.cpu_delta import CpuDelta
from gptmanager.kernels.cpu_matmuls import SMALL_MATMUL
from gptmanager.kernels.experts.mixture import ExpertMatrices
from gptmanager.kernels.experts.routing import Routing
from gptmanager.kernels.gemm.grouped_matmul import TASK_BYTES, GroupTask, multiply_group
from gptmanager.kernels.gemm.matmul import STREAMED_ROWS
from gptmanager.kernels.gemm.matmul_plan import (
    Instructions,
    MatmulPlan,
    all_registers,
    plan_matmul,
    registers,
)
from gptmanager.kernels.gemm.packed_matrix import PANEL_ROWS, Matrix, PackedMatrix
from gptmanager.kernels.simd.dtypes import DTYPES
from gptmanager.kernels.simd.machine_code import compiled
from gptmanager.kernels.simd.threads import alike, with_first

Longs = npt.NDArray[np.int64]

_PARTS_PER_THREAD = 8  # of all matmuls that read their matrices once


class _Chosen(NamedTuple):
    """Rows sorted by expert. `given` int64 `[3, n]`: an expert, its number of rows, its first row.

    `most`: the largest number of rows of an expert. `total`: the number of all rows.
    """

    given: Longs
    most: int
    total: int


class _GroupPlan(NamedTuple):
    """The plan of the first expert's matmul. `task` has the distances to the other experts."""

    plan: MatmulPlan
    task: GroupTask
    rows: int  # of each expert's matrix
    dtype: torch.dtype  # of the result


class CpuExperts(CpuDelta):
    """The experts of `CpuKernels`."""

    def experts(
        self,
        x: Tensor,
        logits: Tensor,
        bias: Tensor | None,
        routing: Routing,
        experts: ExpertMatrices,
    ) -> Tensor:
        gated = experts.gated and experts.activation == "silu"
        up, down = (self._grouped(it, experts.count) for it in (experts.up, experts.down))
        if up is None or down is None or not len(x):
            return super().experts(x, logits, bias, routing, experts)
        x, chosen, weights = experts.choose(x, logits, routing, bias)
        found, slots, places = _sorted(chosen, experts)
        rows = x.index_select(0, slots // (len(slots) // len(x)))
        hidden = self._multiply_group(rows, up[gated], found, experts.up_bias)
        if not gated:
            hidden = self.activate(hidden, experts.activation, experts.gated)
        outputs = self._multiply_group(hidden, down[False], found, experts.down_bias)
        outputs[found.total :] = 0  # of experts of other ranks
        by_token = outputs.index_select(0, places).view(*chosen.shape, -1)
        return (by_token * weights.unsqueeze(-1)).sum(1).to(x.dtype)

    def _grouped(self, matrix: Matrix, count: int) -> tuple[_GroupPlan, _GroupPlan] | None:
        """Return plans for a matrix of `count` experts, without and with SiLU; None if unsupported.

        Supported are packed matrices with whole panels for each expert.
        """
        if not isinstance(matrix, PackedMatrix) or len(matrix) // count % (2 * PANEL_ROWS):
            return None
        key = self.deterministic, count
        if key not in matrix.plans:
            matrix.plans[key] = tuple(self._plan_group(matrix, count, it) for it in (False, True))
        found: tuple[_GroupPlan, _GroupPlan] = matrix.plans[key]
        return found

    def _plan_group(self, matrix: PackedMatrix, count: int, silu: bool) -> _GroupPlan:
        first = matrix.parts(count)[0]
        assert isinstance(first, PackedMatrix)
        plan = plan_matmul(first, silu=silu, deterministic=self.deterministic)
        scales_bytes = 0 if first.scales is None else first.scales.nbytes
        task = GroupTask(
            num_groups=plan.num_groups,
            streamed_rows=STREAMED_ROWS,
            matrix_bytes=first.values.nbytes,
            scales_bytes=0 if plan.task.groups else scales_bytes,
            groups_bytes=scales_bytes if plan.task.groups else 0,
            tails=all_registers(),
        )
        return _GroupPlan(plan, task, len(matrix) // count, matrix.dtype)

    def _multiply_group(
        self, x: Tensor, group: _GroupPlan, found: _Chosen, bias: Tensor | None
    ) -> Tensor:
        plan = group.plan
        result = torch.empty(len(x), plan.columns, dtype=group.dtype)
        fewer = 0
        for instructions in plan.instructions:
            given, most = found.given, instructions.most_rows
            if fewer or found.most > most:
                given = given[:, (given[1] > fewer) & (given[1] <= most)]
            fewer = most
            if given.size:
                some = _Chosen(given, found.most, int(given[1].sum()))
                self._run_group(x, group, some, bias, instructions, result)
            if found.most <= most:
                break
        return result

    def _run_group(
        self,
        x: Tensor,
        group: _GroupPlan,
        found: _Chosen,
        bias: Tensor | None,
        instructions: Instructions,
        result: Tensor,
    ) -> None:
        """Multiply the rows of these experts, with the same instructions, into `result`."""
        plan, given = group.plan, np.ascontiguousarray(found.given)
        count, scratch_bytes = given.shape[1], instructions.scratch_bytes
        is_ready = x.dtype is instructions.dtype and x.is_contiguous()
        if instructions.quantize is not None or not is_ready or plan.depth != x.shape[1]:
            x = self._converted(x, instructions, plan.depth)
        size = 1 if found.total * plan.work < SMALL_MATMUL else self._team.max_size
        memory, bias_fields = np.zeros(count + size * (TASK_BYTES // 8), np.int64), (0, 0)
        task = GroupTask.from_buffer_copy(group.task)
        if bias is not None:
            (bias,) = alike(bias)
            bias_fields = bias.data_ptr(), DTYPES[bias.dtype]
            task.bias_bytes = group.rows * bias.itemsize
        own = with_first(
            plan.task,
            *(0, x.data_ptr(), result.data_ptr(), *bias_fields, 0, scratch_bytes),
            *(0, 0, 0, registers(16)),
        )
        task.body, task.task, task.count = instructions.body, ctypes.addressof(own), count
        task.given, task.counters = given.ctypes.data, memory.ctypes.data
        task.copies = task.counters + 8 * count
        task.scratch, task.scratch_bytes = self._team.scratch(size * scratch_bytes), scratch_bytes
        streamed = plan.num_groups * count // (size * _PARTS_PER_THREAD)
        task.streamed_groups = max(1, min(plan.num_groups, streamed))
        task.x_bytes = x.stride(0) * x.itemsize
        task.result_bytes = result.stride(0) * result.itemsize
        self._team.run(compiled(multiply_group), task, size)


def _sorted(chosen: Tensor, experts: ExpertMatrices) -> tuple[_Chosen, Tensor, Tensor]:
    """Return the experts that are here, the choice of each sorted row, and the row of each choice.

    Choices are numbered token by token. Rows of experts that are not here are last.
    """
    numbers = chosen.numpy().ravel() - experts.first
    # as unsigned integers the numbers of experts of ranks before this one are large
    numbers = np.minimum(numbers.view(np.uint64), experts.count).view(np.int64)
    order = numbers.argsort(kind="stable")
    counts = np.bincount(numbers, minlength=experts.count)[: experts.count]
    touched = counts.nonzero()[0]
    own = counts[touched]
    ends = own.cumsum()
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    found = _Chosen(
        np.stack((touched, own, ends - own)),
        int(own.max(initial=0)),
        int(ends[-1]) if len(ends) else 0,
    )
    return found, torch.from_numpy(order), torch.from_numpy(places)
