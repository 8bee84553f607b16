"""`OwnMatmuls`: runs the gemv or the gemm kernel, by the number of rows.

With a weight in 8 bits, the rows are divided among several gemms if one gemm supports fewer rows.
"""

from __future__ import annotations

import functools

from torch import Tensor

from gptmanager.cuda.device.launch import Launcher
from gptmanager.cuda.features import Features
from gptmanager.cuda.gemm import gemm, gemv, gemv_int4
from gptmanager.cuda.gemm.byte_rows import ByteRows
from gptmanager.cuda.gemm.device_matrices import DeviceMatrix
from gptmanager.cuda.gemm.gemv import FEW_ROWS
from gptmanager.kernels.gemm.int4_matrix import Int4Matrix


class OwnMatmuls:
    """Matmuls by our kernels: gemv for few rows and for 4 bits, otherwise gemm."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._most_rows = gemm.most_rows(launcher.max_shared_mem, in_bytes=True)  # per gemm
        self._arrived: Tensor | None = None  # allocated at the first gemm

    @property
    def features(self) -> Features:
        """The switches of the launcher."""
        return self._launcher.features

    def covers(self, x: Tensor, weight: DeviceMatrix, *, silu: bool = False) -> bool:
        if isinstance(weight, Int4Matrix):
            few = len(x) <= gemv_int4.MOST_ROWS
            return few and not silu and gemv_int4.covers(x, weight)
        if len(x) <= FEW_ROWS:
            return gemv.covers(x, weight)
        first = x[: self._most_rows] if self._is_divided(x, weight) else x
        return self._launcher.features.tiled and gemm.covers(self._launcher, first, weight)

    def multiply(
        self,
        out: Tensor,
        x: Tensor,
        weight: DeviceMatrix,
        bias: Tensor | None,
        *,
        silu: bool = False,
    ) -> None:
        """Compute a matmul, as `gemv.multiply` does, of tensors that `covers` accepts."""
        if isinstance(weight, Int4Matrix):
            gemv_int4.multiply(self._launcher, out, x, weight, bias)
            return
        if len(x) <= FEW_ROWS:
            gemv.multiply(self._launcher, out, x, weight, bias, silu=silu)
            return
        if self._arrived is None:
            self._arrived = gemm.new_counters(self._launcher, x.device)
        multiply = functools.partial(gemm.gemm, self._launcher, arrived=self._arrived, silu=silu)
        if not self._is_divided(x, weight):
            multiply(out, x, weight, bias)
            return
        for first in range(0, len(x), self._most_rows):
            rows = slice(first, first + self._most_rows)
            multiply(out[rows], x[rows], weight, bias)

    def _is_divided(self, x: Tensor, weight: Tensor | ByteRows) -> bool:
        return isinstance(weight, ByteRows) and len(x) > self._most_rows
