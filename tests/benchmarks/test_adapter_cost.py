"""What adapters cost beside the products that they add to: 64 rows over 8 adapters of rank 8.

All attention modules of a layer: queries, keys, values, and the output. `make test` runs each
once, `make bench` times them, and `python tests/benchmarks/test_adapter_cost.py` prints their time
as a share of the time of the products, in alternating rounds.
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
from adapter_cases import LAYER, new_case, qkv_layout  # noqa: E402

from gptmanager.kernels import CpuKernels  # noqa: E402
from gptmanager.kernels.lora.adapter_arguments import AdapterModule  # noqa: E402

ROWS, ADAPTERS, RANK = 64, 8, 8
HIDDEN = (256, 512, 1024)
DTYPES = torch.float32, torch.bfloat16


def prepared(
    hidden: int, dtype: torch.dtype, adapters: int = ADAPTERS, rank: int = RANK
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The products of attention in one layer, and what adapters add to them."""
    kernels, x = CpuKernels(), torch.randn(ROWS, hidden).to(dtype)
    weights = [torch.randn(n * hidden, hidden) / hidden**0.5 for n in (3, 1)]
    matrices = []
    for weight in weights:
        matrix = kernels.new_matrix(*weight.shape, dtype) or torch.empty(weight.shape, dtype=dtype)
        matrix.copy_(weight)
        matrices.append(matrix)
    rows = [token * adapters // ROWS for token in range(ROWS)]
    layouts = (
        (qkv_layout(hidden, hidden, hidden), (0, rank, rank, rank)),
        ((AdapterModule(0, 0, hidden, hidden),), (rank,)),
    )
    steps = [
        new_case(layout, [ranks] * adapters, dtype, gap=0).with_rows(rows)
        for layout, ranks in layouts
    ]
    results = [torch.zeros(ROWS, n * hidden, dtype=dtype) for n in (3, 1)]

    def add() -> None:
        for result, step in zip(results, steps, strict=True):
            kernels.add_adapters(result, x, step, LAYER, "qkv")

    return lambda: [kernels.linear(x, matrix) for matrix in matrices], add


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_adapters(benchmark: Any, hidden: int, dtype: torch.dtype) -> None:
    multiply, add = prepared(hidden, dtype)
    if benchmark.enabled:
        multiply()
        benchmark.extra_info["products_ms"] = 1e3 * min(_seconds(multiply) for _ in range(20))
    benchmark.pedantic(add, rounds=50 if benchmark.enabled else 1)


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for dtype in DTYPES:
            for hidden in HIDDEN:
                for adapters, rank in ((ADAPTERS, RANK), (1, RANK), (ROWS, RANK), (ADAPTERS, 64)):
                    multiply, add = prepared(hidden, dtype, adapters, rank)
                    pairs = [(_seconds(add), _seconds(multiply)) for _ in range(60)]
                    sorted_times = (sorted(times) for times in zip(*pairs, strict=True))
                    ours, theirs = (times[len(times) // 4] for times in sorted_times)
                    print(
                        f"{threads} threads, {dtype}, hidden {hidden}, {adapters} adapters of rank"
                        f" {rank}: {ours * 1e6:.0f} us, {ours / theirs:.2f} of the products",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
