"""`CpuExperts`: the experts of a layer on the CPU. One task runs the matmuls of many experts.

Only the matrices of chosen experts are read. Compiled tasks choose the experts and add up their
outputs, so that a step with experts can be captured. If the matrices are not packed, or if a shape
or a dtype is not supported, the reference computes the experts.
"""

from __future__ import annotations

import ctypes
import functools
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gptmanager.kernels.cpu_matmuls import SMALL_MATMUL
from gptmanager.kernels.cpu_recurrent import CpuRecurrent
from gptmanager.kernels.experts import routing_loops
from gptmanager.kernels.experts.mixture import ExpertMatrices
from gptmanager.kernels.experts.routing import Routing
from gptmanager.kernels.experts.routing_loops import SCORES, SCRATCH_ROWS, MixingTask, RoutingTask
from gptmanager.kernels.gemm.grouped_matmul import (
    TASK_BYTES,
    GroupTask,
    SharedTask,
    multiply_group,
)
from gptmanager.kernels.gemm.matmul import STREAMED_ROWS
from gptmanager.kernels.gemm.matmul_plan import (
    Instructions,
    MatmulPlan,
    all_registers,
    plan_matmul,
    registers,
)
from gptmanager.kernels.gemm.packed_matrix import PANEL_ROWS, Matrix, PackedMatrix, Quantized
from gptmanager.kernels.simd.dtypes import DTYPES
from gptmanager.kernels.simd.machine_code import compiled
from gptmanager.kernels.simd.threads import address_of, alike, with_first

_PARTS_PER_THREAD = 8  # parts into which all matmuls of a group are divided, for each thread
_LONG_BYTES = 8
_ROWS = 2 * PANEL_ROWS  # the number of rows of an expert's matrix must be a multiple
_kept: list[Any] = []  # owns memory that tasks refer to by address


class _GroupPlan(NamedTuple):
    """The plan of the first expert's matmul. `task` has the strides between experts' matrices."""

    plan: MatmulPlan
    task: GroupTask
    rows: int  # rows of each expert's matrix
    dtype: torch.dtype  # the result's dtype

    def bounds(self, num_tokens: int) -> list[tuple[int, int]]:
        """Return bounds on the rows routed to an expert, for each used instruction of the plan.

        Instructions with bounds (a, b) are for experts to which more than a and at most b rows are
        routed. Instructions with a >= `num_tokens` are not used: no expert gets more rows.
        """
        most = [it.most_rows for it in self.plan.instructions]
        return [it for it in zip([0, *most], most, strict=False) if it[0] < num_tokens]


class _Plans(NamedTuple):
    """The plans of the two matmuls of experts. `is_silu`: the first one multiplies by the gate."""

    up: _GroupPlan
    down: _GroupPlan
    is_silu: bool

    def bounds(self, num_tokens: int) -> tuple[tuple[int, int], ...]:
        """Return the bounds of the first matmul, then those of the second."""
        return (*self.up.bounds(num_tokens), *self.down.bounds(num_tokens))


class _Routed(NamedTuple):
    """The inputs of experts, one row for each choice, and addresses of arrays in `memory`.

    The fields `choices` to `copies` are the addresses. `RoutingTask` describes `choices`, `places`,
    `weights` and `lists`; `GroupTask` describes `counters` and `copies`. If the inputs have already
    been multiplied by the weights, `weights` is 0. `count` is the number of this rank's experts.
    """

    rows: Tensor
    memory: Tensor
    choices: int
    places: int
    weights: int
    lists: int
    counters: int
    copies: int
    count: int  # type: ignore[assignment]  # not the method of tuples


class CpuExperts(CpuRecurrent):
    """The experts of `CpuKernels`."""

    def new_expert_matrix(
        self,
        count: int,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        quantized: Quantized | None = None,
        device: torch.device | str = "cpu",
    ) -> PackedMatrix | None:
        if rows % _ROWS:
            return None
        return self.new_matrix(count * rows, columns, dtype, quantized, device)

    def experts(
        self,
        x: Tensor,
        logits: Tensor,
        correction: Tensor | None,
        routing: Routing,
        experts: ExpertMatrices,
    ) -> Tensor:
        plans = self._plans(x, experts)
        wide = [it.dtype is torch.float32 for it in (correction, experts.factors) if it is not None]
        is_compiled = logits.dtype in DTYPES and all(wide) and routing.score in SCORES
        if plans is None or not is_compiled:
            return super().experts(x, logits, correction, routing, experts)
        given = x.contiguous(), logits.contiguous(), correction, routing, experts
        routed = self._route(*given, plans.bounds(len(x)))
        return self._mix(x, routed, plans, experts)

    def mix_experts(
        self, x: Tensor, chosen: Tensor, weights: Tensor, experts: ExpertMatrices
    ) -> Tensor:
        plans = self._plans(x, experts)
        if plans is None or len(x) != len(chosen):
            return super().mix_experts(x, chosen, weights, experts)
        routed = self._sort(x.contiguous(), chosen, weights, experts, plans.bounds(len(x)))
        return self._mix(x, routed, plans, experts)

    def _plans(self, x: Tensor, experts: ExpertMatrices) -> _Plans | None:
        """Return the plans of both matmuls, or None if the reference computes the experts."""
        is_silu = experts.gated and experts.activation == "silu"
        up = self._grouped(experts.up, experts.count, is_silu)
        down = self._grouped(experts.down, experts.count, False)
        if up is None or down is None or x.dtype not in DTYPES or not len(x):
            return None
        return _Plans(up, down, is_silu)

    def _mix(self, x: Tensor, routed: _Routed, plans: _Plans, experts: ExpertMatrices) -> Tensor:
        """Return the weighted sums of the experts' outputs, like `x` in shape and dtype."""
        split, end = (len(it.bounds(len(x))) for it in (plans.up, plans.down))
        lists = range(split), range(split, split + end)
        hidden = self._multiply_group(routed.rows, plans.up, routed, lists[0], experts.up_bias)
        if not plans.is_silu:
            hidden = self.activate(hidden, experts.activation, experts.gated)
        outputs = self._multiply_group(hidden, plans.down, routed, lists[1], experts.down_bias)
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
        if outputs.dtype is not x.dtype:
            outputs = outputs.to(x.dtype)
        per_token = len(routed.rows) // len(x)
        fixed = MixingTask(per_token=per_token, width=x.shape[1], dtype=DTYPES[x.dtype])
        addresses = outputs.data_ptr(), result.data_ptr(), routed.places, routed.weights
        task = with_first(fixed, 0, len(x), *addresses)
        self._run(routing_loops.mix, task, outputs.numel())
        return result

    def _grouped(self, matrix: Matrix, count: int, silu: bool) -> _GroupPlan | None:
        """Return the plan for a matrix of `count` experts, or None if the matrix is not supported.

        The matrix must be packed, and each expert must have a multiple of `_ROWS` rows.
        """
        if not isinstance(matrix, PackedMatrix) or len(matrix) // count % _ROWS:
            return None
        key = self.deterministic, count, silu
        if key not in matrix.plans:
            matrix.plans[key] = self._plan_group(matrix, count, silu)
        found: _GroupPlan = matrix.plans[key]
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

    def _route(
        self,
        x: Tensor,
        logits: Tensor,
        correction: Tensor | None,
        routing: Routing,
        experts: ExpertMatrices,
        bounds: tuple[tuple[int, int], ...],
    ) -> _Routed:
        """Choose the experts of the rows of `x`, list the experts by `bounds`, and gather inputs.

        For each pair of `bounds`, it lists the experts with a number of routed rows in that range.
        """
        fixed = self._fixed(x, logits, correction, routing, experts, bounds)
        task, routed = self._new_routed(x, logits, fixed)
        if routed.rows.numel() < SMALL_MATMUL:
            self._run(routing_loops.choose_and_gather, task, 0)
        else:
            for body, work in (
                (routing_loops.choose, routing.per_token * logits.numel()),
                (routing_loops.sort, 0),
                (routing_loops.gather, routed.rows.numel()),
            ):
                self._run(body, RoutingTask.from_buffer_copy(task), work)
        return routed

    def _sort(
        self,
        x: Tensor,
        chosen: Tensor,
        weights: Tensor,
        experts: ExpertMatrices,
        bounds: tuple[tuple[int, int], ...],
    ) -> _Routed:
        """Return the same as `_route`, for experts that are chosen and weighed already."""
        fixed = self._fixed(x, None, None, Routing(chosen.shape[1]), experts, bounds)
        task, routed = self._new_routed(x, None, fixed)
        size = chosen.numel()
        choices, _, floats = routed.memory[: 3 * size].view(3, size)
        choices.view_as(chosen).copy_(chosen)
        floats.view(torch.float32)[:size].view_as(weights).copy_(weights)
        self._run(routing_loops.sort, RoutingTask.from_buffer_copy(task), 0)
        self._run(routing_loops.gather, task, routed.rows.numel())
        return routed

    def _new_routed(
        self, x: Tensor, logits: Tensor | None, fixed: RoutingTask
    ) -> tuple[RoutingTask, _Routed]:
        """Allocate the results of routing; return also the task that writes them."""
        num_tokens, size, counters = len(x), self._team.max_size, fixed.num_zeros
        num_choices, lists = num_tokens * fixed.per_token, fixed.num_lists + 3 * counters
        copies = size * TASK_BYTES // _LONG_BYTES
        lengths = num_choices, num_choices, num_choices, fixed.count + 1, lists
        memory = torch.empty(sum(lengths) + counters + copies, dtype=torch.int64)
        rows = torch.empty(num_choices, x.shape[1], dtype=x.dtype)
        first = memory.data_ptr()
        at = [first + _LONG_BYTES * it for it in accumulate((*lengths, counters), initial=0)]
        task = with_first(
            fixed,
            *(0, num_tokens, 0 if logits is None else logits.data_ptr()),
            *(x.data_ptr(), rows.data_ptr(), *at[:-1]),
            self._team.scratch(size * 4 * SCRATCH_ROWS * fixed.num_experts),
        )
        choices, places, weights, _, lists, counters, copies = at
        weights, count = 0 if fixed.scales_inputs else weights, fixed.count
        routed = _Routed(rows, memory, choices, places, weights, lists, counters, copies, count)
        return task, routed

    def _fixed(
        self,
        x: Tensor,
        logits: Tensor | None,
        correction: Tensor | None,
        routing: Routing,
        experts: ExpertMatrices,
        bounds: tuple[tuple[int, int], ...],
    ) -> RoutingTask:
        """Return a cached task with the fields that are the same in each step.

        `logits` is None if the experts are chosen already.
        """
        vectors = correction, experts.factors
        addresses = tuple(address_of(it, torch.float32) for it in vectors)
        kinds = x.shape[1], x.dtype, None if logits is None else logits.dtype
        key = routing, addresses, bounds, kinds, experts.first
        assert isinstance(experts.up, PackedMatrix)
        plans = experts.up.plans
        if key not in plans:
            plans[key] = RoutingTask(
                correction=addresses[0],
                factors=addresses[1],
                bounds=_address_of(bounds),
                num_experts=experts.count if logits is None else logits.shape[1],
                count=experts.count,
                first=experts.first,
                per_token=routing.per_token,
                width=x.shape[1],
                num_lists=len(bounds),
                num_zeros=len(bounds) * experts.count,
                score=SCORES[routing.score],
                groups=routing.groups,
                top_groups=routing.top_groups,
                two_best=routing.group_score == "two_best",
                renormalize=routing.renormalize,
                scales_inputs=routing.scales_inputs,
                logits_dtype=0 if logits is None else DTYPES[logits.dtype],
                dtype=DTYPES[x.dtype],
                factor=routing.factor,
                sum_eps=routing.sum_eps,
            )
        found: RoutingTask = plans[key]
        return found

    def _multiply_group(
        self, x: Tensor, group: _GroupPlan, routed: _Routed, lists: range, bias: Tensor | None
    ) -> Tensor:
        """Run `group.plan.instructions[i]` for the rows of the experts in list `lists[i]`."""
        result = torch.empty(len(x), group.plan.columns, dtype=group.dtype)
        for number, instructions in zip(lists, group.plan.instructions, strict=False):
            self._run_group(x, group, routed, number, bias, instructions, result)
        return result

    def _run_group(
        self,
        x: Tensor,
        group: _GroupPlan,
        routed: _Routed,
        number: int,
        bias: Tensor | None,
        instructions: Instructions,
        result: Tensor,
    ) -> None:
        """Multiply the rows of the experts in list `number`, and write them to `result`."""
        plan, scratch_bytes = group.plan, instructions.scratch_bytes
        is_ready = x.dtype is instructions.dtype and x.is_contiguous()
        if instructions.quantize is not None or not is_ready or plan.depth != x.shape[1]:
            x = self._converted(x, instructions, plan.depth)
        size = 1 if len(x) * plan.work < SMALL_MATMUL else self._team.max_size
        bias_fields, bias_bytes = (0, 0), 0
        if bias is not None:
            (bias,) = alike(bias)
            bias_fields = bias.data_ptr(), DTYPES[bias.dtype]
            bias_bytes = group.rows * bias.itemsize
        task = with_first(
            group.task,
            *(0, instructions.body),
            routed.lists + _LONG_BYTES * (1 + 3 * routed.count) * number,
            routed.counters + _LONG_BYTES * routed.count * number,
            *(routed.copies, self._team.scratch(size * scratch_bytes), scratch_bytes),
            *(
                size * _PARTS_PER_THREAD,
                x.stride(0) * x.itemsize,
                result.stride(0) * result.itemsize,
            ),
            bias_bytes,
        )
        matmul = with_first(
            plan.task,
            *(0, x.data_ptr(), result.data_ptr(), *bias_fields, 0, scratch_bytes),
            *(0, 0, 0, registers(16)),
        )
        self._team.run(compiled(multiply_group), SharedTask(task, matmul), size)


@functools.cache
def _address_of(bounds: tuple[tuple[int, int], ...]) -> int:
    """Return the address of an int64 array with the numbers of `bounds`. It is never freed."""
    numbers = (ctypes.c_int64 * (2 * len(bounds)))(*chain(*bounds))
    _kept.append(numbers)
    return ctypes.addressof(numbers)
