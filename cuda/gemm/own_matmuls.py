"""`OwnMatmuls`: a product by the kernel that is made for its number of rows."""

from __future__ import annotations

from torch import Tensor

from gptmanager.cuda.device.launch import Launcher
from gptmanager.cuda.gemm import gemm, gemv
from gptmanager.cuda.gemm.gemv import FEW_ROWS


class OwnMatmuls:
    """Products by our kernels, as many rows as there are: those of few rows, or those of tiles."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._arrived: Tensor | None = None  # where the first product of tiles is

    def covers(self, x: Tensor, weight: Tensor) -> bool:
        if len(x) <= FEW_ROWS:
            return gemv.covers(x, weight)
        return self._launcher.features.tiled and gemm.covers(self._launcher, x, weight)

    def multiply(
        self, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool = False
    ) -> None:
        """Run `gemv.multiply`, or `multiply_silu`, on tensors that `covers` accepts."""
        if len(x) <= FEW_ROWS:
            few = gemv.multiply_silu if silu else gemv.multiply
            few(self._launcher, out, x, weight, bias)
            return
        if self._arrived is None:
            self._arrived = gemm.new_counters(self._launcher, x.device)
        gemm.multiply_tiles(self._launcher, out, x, weight, bias, arrived=self._arrived, silu=silu)
