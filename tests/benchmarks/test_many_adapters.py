"""256 rows over 64 adapters at hidden 1024, beside what their bytes and operations take.

Bytes at the bandwidth of a copy, operations at the rate of a product, both measured beside: the
longer one is the floor. Each call reads the weights of another layer, as a step does; all layers
are larger than the caches. `make test` runs each once, `make bench` times them, and
`python tests/benchmarks/test_many_adapters.py` prints their time in floors, in alternating rounds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "support"))  # where pytest finds it too

from gptmanager.kernels import CpuKernels  # noqa: E402
from gptmanager.kernels.lora.adapter_arguments import AdapterModule, StepAdapters  # noqa: E402

ROWS, ADAPTERS, HIDDEN = 256, 64, 1024
DTYPES = torch.float32, torch.bfloat16
RANKS = 8, 16, 64
COPY_BYTES, PRODUCT_WIDTH = 256 << 20, 1024


class Step:
    """All layers' turns of queries, keys and values; `floor_s` needs the machine's rates."""

    def __init__(self, dtype: torch.dtype, rank: int, total_bytes: int) -> None:
        size = 2 * rank * HIDDEN
        self.num_bytes = dtype.itemsize * (3 * ADAPTERS * size + ROWS * HIDDEN * (1 + 2 * 3))
        self.flops = 2 * 3 * ROWS * size
        self.layers = max(2, total_bytes // (dtype.itemsize * 3 * ADAPTERS * size))
        places = size * torch.arange(self.layers * ADAPTERS * 3)
        places = places.view(self.layers, ADAPTERS, 3).transpose(0, 1)
        table = torch.stack((places, torch.full_like(places, rank)), dim=-1).contiguous()
        pool = (torch.randn(size * self.layers * ADAPTERS * 3) * 0.01).to(dtype)
        rows = (torch.arange(ROWS) * ADAPTERS // ROWS).to(torch.int32)
        modules = tuple(AdapterModule(n, n * HIDDEN, HIDDEN, HIDDEN) for n in range(3))
        self._kernels, self._layer = CpuKernels(), 0
        own = StepAdapters(pool, rows, table, {"qkv": modules}, rank)
        self._adapters = self._kernels.begin_adapters(own)
        self._x = torch.randn(ROWS, HIDDEN).to(dtype)
        self._result = torch.zeros(ROWS, 3 * HIDDEN, dtype=dtype)

    def __call__(self) -> None:
        layer = self._layer = (self._layer + 1) % self.layers
        assert self._adapters is not None
        self._kernels.add_adapters(self._result, self._x, self._adapters, layer, "qkv")


def rates(dtype: torch.dtype) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A copy of `COPY_BYTES`, and a packed product of `PRODUCT_WIDTH` cubed."""
    kernels, source = CpuKernels(), torch.zeros(COPY_BYTES, dtype=torch.uint8)
    target, x = torch.ones_like(source), torch.randn(PRODUCT_WIDTH, PRODUCT_WIDTH).to(dtype)
    packed = kernels.new_matrix(PRODUCT_WIDTH, PRODUCT_WIDTH, dtype)
    matrix = torch.empty_like(x) if packed is None else packed
    matrix.copy_(x)
    return lambda: target.copy_(source), lambda: kernels.linear(x, matrix)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.every(3)
def test_many_adapters(benchmark: Any, rank: int, dtype: torch.dtype) -> None:
    step = Step(dtype, rank, COPY_BYTES if benchmark.enabled else 0)
    benchmark.pedantic(step, rounds=50 if benchmark.enabled else 1)


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    for dtype in DTYPES:
        for rank in RANKS:
            step, (copy, product) = Step(dtype, rank, COPY_BYTES), rates(dtype)
            rounds = [
                (_seconds(copy), _seconds(product), [_seconds(step) for _ in range(8)])
                for _ in range(15)
            ]
            bandwidth = 2 * COPY_BYTES / min(it[0] for it in rounds)
            rate = 2 * PRODUCT_WIDTH**3 / min(it[1] for it in rounds)
            times = sorted(seconds for it in rounds for seconds in it[2])
            ours = times[len(times) // 2]
            floor = max(step.num_bytes / bandwidth, step.flops / rate)
            print(
                f"{dtype}, rank {rank}: {1e3 * ours:.2f} ms, {ours / floor:.2f} of the floor;"
                f" copy {bandwidth / 1e9:.1f} GB/s, product {rate / 1e9:.0f} GFLOP/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
