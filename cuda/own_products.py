"""`OwnProducts`: a product by the kernel that is made for its number of rows."""

from __future__ import annotations

from torch import Tensor

from gptmanager.cuda import products, tiled_products
from gptmanager.cuda.launch import Launcher
from gptmanager.cuda.products import FEW_ROWS


class OwnProducts:
    """Products by our kernels, as many rows as there are: those of few rows, or those of tiles."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._arrived: Tensor | None = None  # where the first product of tiles is

    def covers(self, x: Tensor, weight: Tensor) -> bool:
        if len(x) <= FEW_ROWS:
            return products.covers(x, weight)
        return self._launcher.features.tiled and tiled_products.covers(self._launcher, x, weight)

    def multiply(
        self, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool = False
    ) -> None:
        """Run `products.multiply`, or `multiply_silu`, on tensors that `covers` accepts."""
        if len(x) <= FEW_ROWS:
            few = products.multiply_silu if silu else products.multiply
            few(self._launcher, out, x, weight, bias)
            return
        if self._arrived is None:
            self._arrived = tiled_products.new_counters(self._launcher, x.device)
        tiled_products.multiply_tiles(
            self._launcher, out, x, weight, bias, arrived=self._arrived, silu=silu
        )
