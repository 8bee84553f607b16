"""`MatmulChoice`: chooses between our matmul kernels and torch, by the number of rows.

Without measurements, our kernels are used for up to 16 rows, or with 8-bit and 4-bit weights for
as many rows as they support. When a model is loaded, our kernels and torch's are timed on its
weights. Where torch multiplies fp8 weights (`scaled_matmul`), its time includes rounding the
activations to fp8. With other quantized weights, it includes dequantizing the weight, which each of
its matmuls has to repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from gptmanager.cuda.gemm import scaled_matmul
from gptmanager.cuda.gemm.byte_rows import Fp8Rows
from gptmanager.cuda.gemm.device_matrices import DeviceMatrix, values_of
from gptmanager.cuda.gemm.gemv import FEW_ROWS
from gptmanager.cuda.gemm.own_matmuls import OwnMatmuls
from gptmanager.kernels.gemm.packed_matrix import plain
from gptmanager.lifecycle.log import logger

Run = Callable[[], Tensor]
Seconds = Callable[[Run], float]
Key = tuple[torch.Size, torch.dtype, torch.dtype]  # dtypes: of the matmul, of the stored weight

# Numbers of rows that are measured; others are rounded up to the next one.
_NUMBERS = (1, 2, 4, 8, FEW_ROWS, 32, 64, 128, 256)
_UNMEASURED = frozenset(number for number in _NUMBERS if number <= FEW_ROWS)
_MARGIN = 0.97  # smaller differences are noise
_AT_ONCE = 8  # weights of one size, timed in sequence, so that few are still in a cache
_known: dict[tuple[str, Key], frozenset[int]] = {}  # by device, for all managers of a process


class MatmulChoice:
    """The choice of matmul kernels for one model."""

    def __init__(self) -> None:
        # numbers of rows at which to use our kernels
        self._ours: dict[Key, frozenset[int]] = {}

    def is_ours(self, num_rows: int, weight: DeviceMatrix) -> bool:
        """Return whether to compute a matmul of `num_rows` rows with `weight` by `OwnMatmuls`."""
        number = next((number for number in _NUMBERS if num_rows <= number), None)
        unmeasured = _UNMEASURED if isinstance(weight, Tensor) else _NUMBERS
        return number in self._ours.get(_key(weight), unmeasured)

    def measure(
        self, own: OwnMatmuls, weights: Iterable[DeviceMatrix], device: str, seconds: Seconds
    ) -> None:
        """Time our kernels and torch's on `weights`, and log the results.

        Results are cached for all devices of the name `device`. `seconds` returns the time of a
        run. If memory runs out, the remaining weights keep the rule without measurements.
        """
        groups: dict[Key, list[DeviceMatrix]] = {}
        for weight in weights:
            groups.setdefault(_key(weight), []).append(weight)
        for key, group in groups.items():
            first = group[0]
            alone = values_of(first).new_empty(1, first.shape[1], dtype=first.dtype)
            if not own.covers(alone, first):
                continue
            if (device, key) not in _known:
                try:
                    _known[device, key] = _compare(own, group[:_AT_ONCE], seconds)
                except torch.OutOfMemoryError:
                    logger.warning(
                        "not enough memory to time matmuls: our kernels compute up to 16 rows, "
                        "and with 8-bit and 4-bit weights as many rows as they support"
                    )
                    return
            self._ours[key] = _known[device, key]


def multiply_by_torch(x: Tensor, weight: DeviceMatrix, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight^T + bias`, with `scaled_matmul` if it supports the tensors."""
    if isinstance(weight, Fp8Rows) and scaled_matmul.covers(x, weight):
        return scaled_matmul.multiply(x, weight, bias)
    return F.linear(x, plain(weight), bias)


def _key(weight: DeviceMatrix) -> Key:
    return weight.shape, weight.dtype, values_of(weight).dtype


def _compare(own: OwnMatmuls, weights: list[DeviceMatrix], seconds: Seconds) -> frozenset[int]:
    """Time both on `weights`; return the numbers of rows at which to use our kernels."""
    width, depth = weights[0].shape
    device = values_of(weights[0]).device
    numbers, better, ours_us, torch_us = [], set(), [], []
    for number in _NUMBERS:
        x = torch.randn(number, depth, device=device).to(weights[0].dtype)
        if not own.covers(x, weights[0]):
            continue
        out = x.new_empty(number, width)

        def ours(x: Tensor = x, out: Tensor = out) -> Tensor:
            for weight in weights:
                own.multiply(out, x, weight, None)
            return out

        def by_torch(x: Tensor = x, out: Tensor = out) -> Tensor:
            for weight in weights:
                out = multiply_by_torch(x, weight)
            return out

        numbers.append(number)
        ours_us.append(seconds(ours) * 1e6 / len(weights))
        torch_us.append(seconds(by_torch) * 1e6 / len(weights))
        if torch_us[-1] >= _MARGIN * ours_us[-1]:
            better.add(number)
    microseconds = (", ".join(f"{it:.1f}" for it in figures) for figures in (ours_us, torch_us))
    logger.info(
        "matmuls with %d x %d %s at %s rows: %s us by our kernels, %s us by torch",
        *(width, depth, str(values_of(weights[0]).dtype).removeprefix("torch.")),
        *(", ".join(map(str, numbers)), *microseconds),
    )
    return frozenset(better)
