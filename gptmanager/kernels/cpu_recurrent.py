"""`CpuRecurrent`: recurrent layers on the CPU, compiled.

Memories of heads are float32. Inputs of float64 use the reference implementation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gptmanager.kernels.attention.attention_arguments import RowSpans
from gptmanager.kernels.cpu_elementwise import CpuElementwise
from gptmanager.kernels.recurrent import convolution_loops, delta_loops, state_space_loops
from gptmanager.kernels.recurrent.convolution import Filter
from gptmanager.kernels.recurrent.convolution_loops import ConvolutionTask
from gptmanager.kernels.recurrent.delta_formulas import DeltaShape, DeltaState, DeltaTensors
from gptmanager.kernels.recurrent.delta_loops import DeltaTask, scratch_bytes
from gptmanager.kernels.recurrent.state_space_formulas import (
    StateSpaceShape,
    StateSpaceState,
    StateSpaceTensors,
)
from gptmanager.kernels.recurrent.state_space_loops import StateSpaceTask
from gptmanager.kernels.recurrent.state_space_loops import scratch_bytes as scratch_bytes_of_state
from gptmanager.kernels.simd.dtypes import DTYPES
from gptmanager.kernels.simd.threads import address_of


class CpuRecurrent(CpuElementwise):
    """The recurrent layers of `CpuKernels`."""

    def short_convolution(
        self, projected: Tensor, own: Filter, inputs: Tensor, rows: RowSpans
    ) -> Tensor:
        dtype, (width, channels) = projected.dtype, own.weight.shape
        if dtype not in DTYPES:
            return super().short_convolution(projected, own, inputs, rows)
        result = torch.empty(len(projected), channels, dtype=dtype)
        start, part = address_of(projected, dtype), channels * projected.itemsize
        task = ConvolutionTask(
            before=start,
            after=start + part,
            projected=start + 2 * part,
            conv=address_of(own.weight, dtype),
            bias=address_of(own.bias, dtype),
            inputs=address_of(inputs, dtype),
            result=result.data_ptr(),
            row_starts=address_of(rows.row_starts, torch.int32),
            slots=address_of(rows.slots, torch.int32),
            num_rows=len(rows.slots),
            stride=3 * channels,
            channels=channels,
            width=width,
            dtype=DTYPES[dtype],
        )
        self._run(convolution_loops.convolve_gated, task, width * result.numel())
        return result

    def state_space(
        self,
        projected: Tensor,
        shape: StateSpaceShape,
        tensors: StateSpaceTensors,
        eps: float,
        state: StateSpaceState,
        rows: RowSpans,
    ) -> Tensor:
        dtype, wide = projected.dtype, torch.float32
        if dtype not in DTYPES:
            return super().state_space(projected, shape, tensors, eps, state, rows)
        num_tokens, size = len(projected), self._team.max_size
        rates = torch.empty(num_tokens, 2 * shape.heads, dtype=wide)
        mixed = torch.empty(num_tokens, shape.channels, dtype=wide)
        read = torch.empty(num_tokens, shape.inner, dtype=wide)
        result = torch.empty(num_tokens, shape.inner, dtype=dtype)
        start, each = address_of(projected, dtype), scratch_bytes_of_state(shape.state)
        inputs = start + projected.itemsize * shape.inner

        def task() -> StateSpaceTask:
            return StateSpaceTask(
                gates=start,
                projected=inputs,
                steps=inputs + projected.itemsize * shape.channels,
                conv=address_of(tensors.conv.weight, dtype),
                bias=address_of(tensors.conv.bias, dtype),
                decay=address_of(tensors.decay, wide),
                step=address_of(tensors.step, wide),
                skip=address_of(tensors.skip, wide),
                norm=address_of(tensors.norm, dtype),
                inputs=address_of(state.inputs, dtype),
                memory=address_of(state.memory, wide),
                rates=rates.data_ptr(),
                mixed=mixed.data_ptr(),
                read=read.data_ptr(),
                result=result.data_ptr(),
                row_starts=address_of(rows.row_starts, torch.int32),
                slots=address_of(rows.slots, torch.int32),
                num_tokens=num_tokens,
                num_rows=len(rows.slots),
                stride=shape.projected,
                channels=shape.channels,
                heads=shape.heads,
                head_dim=shape.head_dim,
                state=shape.state,
                groups=shape.groups,
                norm_groups=shape.norm_groups,
                width=shape.width,
                scratch=self._team.scratch(size * each),
                scratch_bytes=each,
                dtype=DTYPES[dtype],
                eps=eps,
            )

        self._run(state_space_loops.activate_steps, task(), 8 * rates.numel())
        self._run(state_space_loops.convolve_channels, task(), shape.width * mixed.numel())
        self._run(state_space_loops.scan_heads, task(), result.numel() * shape.state)
        self._run(state_space_loops.norm_gated, task(), 8 * result.numel())
        return result

    def gated_delta(
        self,
        projected: Tensor,
        gates: Tensor,
        shape: DeltaShape,
        tensors: DeltaTensors,
        eps: float,
        state: DeltaState,
        rows: RowSpans,
    ) -> Tensor:
        dtype, wide = projected.dtype, torch.float32
        if dtype not in DTYPES:
            return super().gated_delta(projected, gates, shape, tensors, eps, state, rows)
        num_tokens, size = len(projected), self._team.max_size
        mixed = torch.empty(num_tokens, shape.channels, dtype=wide)
        result = torch.empty(num_tokens, shape.values, dtype=dtype)
        each = scratch_bytes(shape.key_dim, shape.value_dim)

        def task() -> DeltaTask:
            return DeltaTask(
                projected=address_of(projected, dtype),
                gates=address_of(gates, wide),
                conv=address_of(tensors.conv, dtype),
                decay=address_of(tensors.decay, wide),
                step=address_of(tensors.step, wide),
                norm=address_of(tensors.norm, dtype),
                inputs=address_of(state.inputs, dtype),
                memory=address_of(state.memory, wide),
                mixed=mixed.data_ptr(),
                result=result.data_ptr(),
                row_starts=address_of(rows.row_starts, torch.int32),
                slots=address_of(rows.slots, torch.int32),
                num_tokens=num_tokens,
                num_rows=len(rows.slots),
                stride=projected.shape[1],
                channels=shape.channels,
                key_heads=shape.key_heads,
                value_heads=shape.value_heads,
                key_dim=shape.key_dim,
                value_dim=shape.value_dim,
                width=shape.width,
                scratch=self._team.scratch(size * each),
                scratch_bytes=each,
                dtype=DTYPES[dtype],
                eps=eps,
            )

        self._run(delta_loops.activate_gates, task(), 8 * gates.numel())
        self._run(delta_loops.convolve, task(), shape.width * mixed.numel())
        self._run(delta_loops.run_memories, task(), result.numel() * shape.key_dim)
        return result
