"""`CpuExperts`: the experts of a layer on the CPU, the matmuls of all of them as one task.

Only experts that tokens have chosen are read. Matrices that are not packed use the reference.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gptmanager.kernels.cpu_delta import CpuDelta
from gptmanager.kernels.cpu_matmuls import SMALL_MATMUL
from gptmanager.kernels.experts.mixture import ExpertMatrices
from gptmanager.kernels.experts.routing import Routing
from gptmanager.kernels.gemm.grouped_matmul import GroupTask, multiply_group
from gptmanager.kernels.gemm.matmul import STREAMED_ROWS
from gptmanager.kernels.gemm.matmul_plan import Instructions, MatmulPlan, plan_matmul, registers
from gptmanager.kernels.gemm.matmul_task import CHUNK_ROWS, MATMUL_TASK
from gptmanager.kernels.gemm.packed_matrix import PANEL_ROWS, Matrix, PackedMatrix
from gptmanager.kernels.simd.dtypes import DTYPES
from gptmanager.kernels.simd.machine_code import compiled
from gptmanager.kernels.simd.threads import alike

Longs = npt.NDArray[np.int64]

_PARTS_PER_THREAD = 8  # of all matmuls that read their matrices once


class _Chosen(NamedTuple):
    """Rows sorted by expert: those of expert `numbers[i]` are `counts[i]` from `starts[i]` on."""

    numbers: Longs
    counts: Longs
    starts: Longs


class _GroupPlan(NamedTuple):
    """The plan of one expert's matmul, and the tasks of all experts, which a call completes."""

    plan: MatmulPlan
    tasks: npt.NDArray[Any]
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
        num_here = int(found.counts.sum())
        outputs[num_here:] = 0  # of experts of other ranks
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
        parts = matrix.parts(count)
        assert isinstance(parts[0], PackedMatrix)
        plan = plan_matmul(parts[0], silu=silu, deterministic=self.deterministic)
        tasks = np.frombuffer(bytes(plan.task) * count, MATMUL_TASK).copy()
        numbers, rows = np.arange(count), len(matrix) // count
        tasks["matrix"] += numbers * parts[0].values.nbytes
        if parts[0].scales is not None:
            field = "groups" if plan.task.groups else "scales"
            tasks[field] += numbers * parts[0].scales.nbytes
        return _GroupPlan(plan, tasks, rows, matrix.dtype)

    def _multiply_group(
        self, x: Tensor, group: _GroupPlan, found: _Chosen, bias: Tensor | None
    ) -> Tensor:
        plan = group.plan
        result = torch.empty(len(x), plan.columns, dtype=group.dtype)
        fewer = 0
        for instructions in plan.instructions:
            own = (found.counts > fewer) & (found.counts <= instructions.most_rows)
            fewer = instructions.most_rows
            if own.any():
                some = _Chosen(*(it[own] for it in found))
                self._run_group(x, group, some, bias, instructions, result)
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
        plan, counts = group.plan, found.counts
        body, scratch_bytes = instructions.body, instructions.scratch_bytes
        is_ready = x.dtype is instructions.dtype and x.is_contiguous()
        if instructions.quantize is not None or not is_ready or plan.depth != x.shape[1]:
            x = self._converted(x, instructions, plan.depth)
        tasks = group.tasks[found.numbers]
        size = 1 if int(counts.sum()) * plan.work < SMALL_MATMUL else self._team.max_size
        chunks = -(-counts // CHUNK_ROWS)
        streamed = plan.num_groups * len(counts) // (size * _PARTS_PER_THREAD)
        part_groups = np.where(counts <= STREAMED_ROWS, max(1, min(plan.num_groups, streamed)), 1)
        tasks["num_parts"] = chunks * -(-plan.num_groups // part_groups)
        tasks["x"] = x.data_ptr() + found.starts * (x.stride(0) * x.itemsize)
        row_bytes = result.stride(0) * result.itemsize
        tasks["result"] = result.data_ptr() + found.starts * row_bytes
        tasks["rows"], tasks["num_chunks"], tasks["part_groups"] = counts, chunks, part_groups
        tasks["full"] = registers(16)
        tasks["tail"] = [registers(tail) for tail in (counts % 16).tolist()]
        if bias is not None:
            (bias,) = alike(bias)
            bias_bytes = found.numbers * (group.rows * bias.itemsize)
            tasks["bias"], tasks["bias_dtype"] = bias.data_ptr() + bias_bytes, DTYPES[bias.dtype]
        copies = np.empty(size, MATMUL_TASK)
        task = GroupTask(
            body=body,
            tasks=tasks.ctypes.data,
            count=len(tasks),
            copies=copies.ctypes.data,
            scratch=self._team.scratch(size * scratch_bytes),
            scratch_bytes=scratch_bytes,
            num_parts=int(tasks["num_parts"].sum()),
        )
        self._team.run(compiled(multiply_group), task, size)


def _sorted(chosen: Tensor, experts: ExpertMatrices) -> tuple[_Chosen, Tensor, Tensor]:
    """Return the experts that are here, the choice of each sorted row, and the row of each choice.

    Choices are numbered token by token. Rows of experts that are not here are last.
    """
    numbers = chosen.numpy().ravel() - experts.first
    is_here = (numbers >= 0) & (numbers < experts.count)
    order = np.where(is_here, numbers, experts.count).argsort(kind="stable")
    counts = np.bincount(numbers[is_here], minlength=experts.count)
    touched = counts.nonzero()[0]
    starts = (counts.cumsum() - counts)[touched]
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    found = _Chosen(touched, counts[touched], starts)
    return found, torch.from_numpy(order), torch.from_numpy(places)
