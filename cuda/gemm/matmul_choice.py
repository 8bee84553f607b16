"""`MatmulChoice`: chooses between our matmul kernels and torch's, by the number of rows.

When a model is loaded, up to three engines are timed for each size and dtype of its weights: our
kernels, torch's matmul, and for fp8 weights `scaled_matmul`. The time of `scaled_matmul` includes
rounding the activations to fp8. The time of torch's matmul includes dequantizing a quantized
weight, which each matmul has to repeat.

Without measurements, our kernels compute up to 16 rows, or up to 256 rows with 8-bit and 4-bit
weights. More rows, and what our kernels do not support, are computed by `scaled_matmul` for fp8
weights if it supports them, else by torch.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from gptmanager.cuda.features import Features
from gptmanager.cuda.gemm import scaled_matmul
from gptmanager.cuda.gemm.byte_rows import Fp8Rows
from gptmanager.cuda.gemm.device_matrices import DeviceMatrix, values_of
from gptmanager.cuda.gemm.gemv import FEW_ROWS
from gptmanager.cuda.gemm.own_matmuls import OwnMatmuls
from gptmanager.kernels.gemm.packed_matrix import plain, stored
from gptmanager.lifecycle.log import logger

Run = Callable[[], Tensor]
Timer = Callable[[Run], Callable[[], float]]  # the result measures one run, in seconds
Engine = Literal["own", "scaled", "torch"]
Key = tuple[torch.Size, torch.dtype, torch.dtype]  # shape, dtype of the matmul, stored dtype
Table = Mapping[str, Sequence[tuple[int, Engine]]]  # str(key) -> pairs (number of rows, engine)
Agree = Callable[[Table], Table]

OWN: Engine = "own"
SCALED: Engine = "scaled"  # `scaled_matmul`
TORCH: Engine = "torch"  # `F.linear`, with the dequantized weight if the weight is quantized
# The numbers of rows that are measured. Others are rounded up to the next, or down to the last.
_NUMBERS = (1, 2, 4, 8, FEW_ROWS, 32, 64, 128, 256, 1024, 4096)
_UNMEASURED_QUANTIZED = 256  # up to this many rows, our kernels are the default
_MARGIN = 0.97  # smaller differences are noise
_WARM_UPS, _ROUNDS = 2, 5
_BEYOND_CACHES = 256 << 20  # bytes of weights that a run should read: more than L2 holds
_MOST_WEIGHTS = 256  # weights that a run reads at most
# by device name, switches and key: the measured choices, for all managers of the process
_known: dict[tuple[str, Features, Key], Mapping[int, Engine]] = {}


class MatmulChoice:
    """The choice of matmul kernels for one model."""

    def __init__(self) -> None:
        self._chosen: dict[Key, Mapping[int, Engine]] = {}  # by the number of rows

    def engine(self, num_rows: int, weight: DeviceMatrix) -> Engine:
        """Return the engine for a matmul of `num_rows` rows with `weight`."""
        chosen = self._chosen.get(_key(weight), {}).get(_measured(num_rows))
        if chosen is not None:
            return chosen
        most = FEW_ROWS if isinstance(weight, Tensor) else _UNMEASURED_QUANTIZED
        return OWN if num_rows <= most else SCALED if isinstance(weight, Fp8Rows) else TORCH

    def measure(
        self,
        own: OwnMatmuls,
        weights: Iterable[DeviceMatrix],
        device: str,
        timer: Timer,
        agree: Agree = lambda table: table,
    ) -> None:
        """Time the engines for each kind of weight in `weights`, and log the results.

        `device` is the device's name; the process caches results by this name and by the switches
        of `own`. `timer` prepares a run for timing. If memory runs out for a kind of weight, the
        defaults without measurements apply to this kind.

        `agree` receives this rank's choices and returns the choices that all ranks use. Values that
        every rank computes for itself, such as the scores of experts, must be bitwise equal.
        """
        groups: dict[Key, list[DeviceMatrix]] = {}
        num_bytes = 0
        for weight in weights:
            groups.setdefault(_key(weight), []).append(weight)
            num_bytes += _bytes_of(weight)
        for key, group in groups.items():
            place = device, own.features, key
            if place in _known:
                self._chosen[key] = _known[place]
                continue
            try:
                chosen = _choose(own, _beyond_caches(group, num_bytes), timer)
            except torch.OutOfMemoryError:
                logger.warning(
                    "not enough memory to time matmuls with %d x %d: our kernels compute up to 16 "
                    "rows, and up to 256 with 8-bit and 4-bit weights",
                    *group[0].shape,
                )
            else:
                self._chosen[key] = _known[place] = chosen
        table = agree({str(key): [*chosen.items()] for key, chosen in self._chosen.items()})
        self._chosen = {key: dict(table[str(key)]) for key in groups if str(key) in table}


def multiply_by_torch(
    x: Tensor, weight: DeviceMatrix, bias: Tensor | None = None, engine: Engine = SCALED
) -> Tensor:
    """Return `x @ weight^T + bias`, by `scaled_matmul` if it supports the tensors.

    With the engine TORCH, `F.linear` is always used.
    """
    if engine != TORCH and isinstance(weight, Fp8Rows) and scaled_matmul.covers(x, weight):
        return scaled_matmul.multiply(x, weight, bias)
    return F.linear(x, plain(weight), bias)


def _measured(num_rows: int) -> int:
    """Return the measured number of rows that stands for `num_rows`."""
    return _NUMBERS[min(bisect_left(_NUMBERS, num_rows), len(_NUMBERS) - 1)]


def _key(weight: DeviceMatrix) -> Key:
    return weight.shape, weight.dtype, values_of(weight).dtype


def _bytes_of(weight: DeviceMatrix) -> int:
    return sum(tensor.nbytes for tensor in stored(weight))


def _beyond_caches(group: Sequence[DeviceMatrix], num_bytes: int) -> list[DeviceMatrix]:
    """Return at most `_MOST_WEIGHTS` weights of one kind for a run.

    The run reads about `_BEYOND_CACHES` bytes, so a repeated run finds no weight in L2. If all
    weights of the model together have fewer bytes, `num_bytes`, the run reads about `num_bytes`: a
    small model stays in L2 in its steps, too. If `group` has too few weights, copies are added.
    """
    needed = -(-min(num_bytes, _BEYOND_CACHES) // _bytes_of(group[0]))
    count = min(needed, _MOST_WEIGHTS)
    copies = [group[number % len(group)].clone() for number in range(len(group), count)]
    return [*group[:count], *copies]


def _choose(own: OwnMatmuls, weights: Sequence[DeviceMatrix], timer: Timer) -> dict[int, Engine]:
    """Return the fastest engine for each number of rows that more than one engine supports."""
    depth, device = weights[0].shape[1], values_of(weights[0]).device
    chosen: dict[int, Engine] = {}
    times = []
    for number in _NUMBERS:
        x = torch.randn(number, depth, device=device).to(weights[0].dtype)
        runs = _runs(own, x, weights)
        if len(runs) > 1:
            seconds = _compare({engine: timer(run) for engine, run in runs.items()})
            chosen[number] = _fastest(seconds)
            each = (f"{engine} {it * 1e6 / len(weights):.1f}" for engine, it in seconds.items())
            times.append(f"{number}: {', '.join(each)}")
    if times:
        dtype = str(values_of(weights[0]).dtype).removeprefix("torch.")
        logger.info(
            "matmuls with %d x %d %s, us by the number of rows: %s",
            *(*weights[0].shape, dtype, "; ".join(times)),
        )
    return chosen


def _runs(own: OwnMatmuls, x: Tensor, weights: Sequence[DeviceMatrix]) -> dict[Engine, Run]:
    """Return a function for each engine that supports `x`; it multiplies `x` by every weight."""

    def ours() -> Tensor:
        for weight in weights:
            own.multiply(out, x, weight, None)
        return out

    def by_torch(engine: Engine) -> Tensor:
        for weight in weights:
            result = multiply_by_torch(x, weight, engine=engine)
        return result

    runs: dict[Engine, Run] = {}
    if own.covers(x, weights[0]):
        out = x.new_empty(len(x), weights[0].shape[0])
        runs[OWN] = ours
    if scaled_matmul.covers(x, weights[0]):
        runs[SCALED] = lambda: by_torch(SCALED)
    runs[TORCH] = lambda: by_torch(TORCH)
    return runs


def _compare(timers: Mapping[Engine, Callable[[], float]]) -> dict[Engine, float]:
    """Return the least time of each engine in seconds.

    The engines alternate, so that changes of the device's clocks affect all of them. The first
    `_WARM_UPS` rounds do not count, because clocks still rise, and code is loaded.
    """
    best = dict.fromkeys(timers, math.inf)
    for number in range(_WARM_UPS + _ROUNDS):
        for engine, seconds in timers.items():
            taken = seconds()
            if number >= _WARM_UPS:
                best[engine] = min(best[engine], taken)
    return best


def _fastest(seconds: Mapping[Engine, float]) -> Engine:
    """Return the engine with the least time, or OWN if OWN is at most slightly slower."""
    best = min(seconds, key=seconds.__getitem__)
    return OWN if OWN in seconds and seconds[best] >= _MARGIN * seconds[OWN] else best
