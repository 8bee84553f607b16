"""`MatmulChoice`: which products of few rows run as kernels of ours, and which torch computes.

Without measurements the rule is: ours, up to 16 rows. At the start both are timed on the model's
own weights. It knows nothing of how a product is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from gptmanager.cuda.gemm.gemv import FEW_ROWS, covers
from gptmanager.cuda.gemm.own_matmuls import OwnMatmuls
from gptmanager.lifecycle.log import logger

Run = Callable[[], Tensor]
Seconds = Callable[[Run], float]
Key = tuple[torch.Size, torch.dtype]

_NUMBERS = (1, 2, 4, 8, FEW_ROWS, 32, 64, 128, 256)  # of rows; others are as the next one
_UNMEASURED = frozenset(number for number in _NUMBERS if number <= FEW_ROWS)
_MARGIN = 0.97  # less is noise
_AT_ONCE = 8  # weights of one size, one after the other: together larger than a cache
_known: dict[tuple[str, Key], frozenset[int]] = {}  # by device, for all managers of a process


class MatmulChoice:
    """The choice of matmul kernels for one model."""

    def __init__(self) -> None:
        self._ours: dict[Key, frozenset[int]] = {}  # numbers of rows at which torch is no faster

    def is_ours(self, num_rows: int, weight: Tensor) -> bool:
        """Whether a product of so many rows is for `OwnMatmuls`."""
        number = next((number for number in _NUMBERS if num_rows <= number), None)
        return number in self._ours.get((weight.shape, weight.dtype), _UNMEASURED)

    def measure(
        self,
        own: OwnMatmuls,
        weights: Iterable[Tensor],
        device: str,
        seconds: Seconds,
    ) -> None:
        """Time both on `weights`, and tell the log. `device`: what is known of one of that name is
        not timed again. `seconds` times a run. Where there is no memory the rule stays.
        """
        groups: dict[Key, list[Tensor]] = {}
        for weight in weights:
            groups.setdefault((weight.shape, weight.dtype), []).append(weight)
        for key, group in groups.items():
            if not covers(group[0][:1], group[0]):
                continue
            if (device, key) not in _known:
                try:
                    _known[device, key] = _compare(own, group[:_AT_ONCE], seconds)
                except torch.OutOfMemoryError:
                    logger.warning("no memory to time products: those of few rows are ours")
                    return
            self._ours[key] = _known[device, key]


def _compare(own: OwnMatmuls, weights: list[Tensor], seconds: Seconds) -> frozenset[int]:
    """At which numbers of rows ours are to be used."""
    width, depth = weights[0].shape
    numbers, better, ours_us, torch_us = [], set(), [], []
    for number in _NUMBERS:
        x = torch.randn(number, depth, device=weights[0].device).to(weights[0].dtype)
        if not own.covers(x, weights[0]):
            continue
        out = x.new_empty(number, width)

        def ours(x: Tensor = x, out: Tensor = out) -> Tensor:
            for weight in weights:
                own.multiply(out, x, weight, None)
            return out

        def by_torch(x: Tensor = x, out: Tensor = out) -> Tensor:
            for weight in weights:
                out = F.linear(x, weight)
            return out

        numbers.append(number)
        ours_us.append(seconds(ours) * 1e6 / len(weights))
        torch_us.append(seconds(by_torch) * 1e6 / len(weights))
        if torch_us[-1] >= _MARGIN * ours_us[-1]:
            better.add(number)
    told = (", ".join(f"{it:.1f}" for it in figures) for figures in (ours_us, torch_us))
    logger.info(
        "products with %d x %d %s at %s rows: %s us by our kernels, %s us by torch",
        *(width, depth, str(weights[0].dtype).removeprefix("torch.")),
        *(", ".join(map(str, numbers)), *told),
    )
    return frozenset(better)
