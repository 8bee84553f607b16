"""`CpuElementwise`: activations, and other ops on single elements on the CPU, compiled."""

from __future__ import annotations

import torch
from torch import Tensor

from gptmanager.kernels.activations import activation_loops
from gptmanager.kernels.activations.activation_kinds import Activation
from gptmanager.kernels.activations.activation_loops import KINDS, ActivationTask
from gptmanager.kernels.cpu_matmuls import CpuMatmuls
from gptmanager.kernels.simd.dtypes import DTYPES
from gptmanager.kernels.simd.threads import address_of, alike


class CpuElementwise(CpuMatmuls):
    """The ops of `CpuKernels` on single elements."""

    def activate(self, x: Tensor, activation: Activation, gated: bool) -> Tensor:
        if x.dtype is torch.float64:
            return super().activate(x, activation, gated)
        width = x.shape[-1] // 2 if gated else x.shape[-1]
        return self._activate(x, width, gated, KINDS[activation])

    def activate_times(self, x: Tensor, activation: Activation, factors: Tensor) -> Tensor:
        if x.dtype is torch.float64:
            return super().activate_times(x, activation, factors)
        return self._paired(x, factors, KINDS[activation])

    def xielu(self, x: Tensor, numbers: Tensor) -> Tensor:
        if x.dtype not in DTYPES or numbers.dtype not in DTYPES or not x.is_contiguous():
            return super().xielu(x, numbers)
        result = torch.empty_like(x)
        self._pair(x, numbers, result, activation_loops.XIELU)
        return result

    def scaled(self, x: Tensor, factor: float, softcap: float = 0.0) -> Tensor:
        if x.dtype is torch.float64:
            return super().scaled(x, factor, softcap)
        return self._activate(x, x.shape[-1], False, activation_loops.SCALE, factor, softcap)

    def scale_rows(self, x: Tensor, factors: Tensor) -> None:
        if x.dtype not in DTYPES or factors.dtype not in DTYPES or not x.is_contiguous():
            super().scale_rows(x, factors)
        else:
            self._pair(x, factors, x, activation_loops.SCALE_ROWS)

    def clamp(self, x: Tensor, limit: float) -> None:
        if x.dtype not in DTYPES or not x.is_contiguous():
            super().clamp(x, limit)
        else:
            self._pair(x, x, x, activation_loops.CLAMP, limit)

    def gated(self, x: Tensor, gates: Tensor) -> Tensor:
        if x.dtype is torch.float64:
            return super().gated(x, gates)
        is_whole = gates.shape[1] == x.shape[1]
        kind = activation_loops.GATE if is_whole else activation_loops.TOKEN_GATE
        return self._paired(x, gates, kind)

    def add_to(self, total: Tensor, x: Tensor) -> None:
        is_plain = total.dtype in DTYPES and total.is_contiguous()
        if not is_plain or x.dtype is not total.dtype:
            super().add_to(total, x)
            return
        (x,) = alike(x, strided=True)
        self._pair(total, x, total, activation_loops.ADD)

    def _paired(self, x: Tensor, other: Tensor, kind: int) -> Tensor:
        """Run `activate` on two matrices; return the result in x's dtype."""
        own, other = alike(x, other, strided=True)
        result: Tensor = own.new_empty(*x.shape)
        self._pair(own, other, result, kind)
        return result if result.dtype is x.dtype else result.to(x.dtype)

    def _pair(self, x: Tensor, other: Tensor, result: Tensor, kind: int, cap: float = 0.0) -> None:
        """Run `activate` on a matrix with a row for each token, and on another one or a vector."""
        task = ActivationTask(
            x=x.data_ptr(),
            factor=other.data_ptr(),
            result=result.data_ptr(),
            num_tokens=len(x),
            width=x.shape[1],
            stride=x.stride(0),
            factor_stride=other.stride(0) if other.dim() == 2 else 0,
            kind=kind,
            dtype=DTYPES[x.dtype],
            factor_dtype=DTYPES[other.dtype],
            cap=cap,
        )
        self._run(activation_loops.activate, task, result.numel())

    def _activate(
        self, x: Tensor, width: int, gated: bool, kind: int, scale: float = 1.0, cap: float = 0.0
    ) -> Tensor:
        """Activate the first `width` columns of x; if gated, multiply them by the next `width`."""
        (own,) = alike(x)
        result: Tensor = own.new_empty(*x.shape[:-1], width)
        address = address_of(own, own.dtype)
        task = ActivationTask(
            x=address,
            factor=address + own.itemsize * width if gated else 0,
            result=result.data_ptr(),
            num_tokens=result.numel() // width if width else 0,
            width=width,
            stride=x.shape[-1],
            factor_stride=x.shape[-1],
            kind=kind,
            dtype=DTYPES[own.dtype],
            scale=scale,
            cap=cap,
        )
        self._run(activation_loops.activate, task, result.numel())
        return result.to(x.dtype)
