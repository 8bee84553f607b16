"""`gptmanager bench experts`: the experts of a layer on the CPU, compared with a dense matmul.

The layer has the sizes of a layer of Qwen3-30B-A3B. The dense matmul has the same number of tokens,
and reads about as many bytes as the experts that these tokens choose. The experts and the matmul
are captured, as in generation steps, and timed alternately, on weights that are not in the
processor's cache.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gptmanager.bench.machine import header
from gptmanager.errors import ConfigError
from gptmanager.kernels import CpuKernels
from gptmanager.kernels.experts.mixture import ExpertMatrices
from gptmanager.kernels.experts.routing import Routing, choose_experts
from gptmanager.kernels.gemm.packed_matrix import Matrix, PackedMatrix, Quantized

HIDDEN, WIDTH, COUNT, PER_TOKEN = 2048, 768, 128, 8
_ROUTING = Routing(PER_TOKEN, renormalize=True)
_NUM_SETS = 16  # sets of inputs of a case; each set chooses other experts
_GIGA = 1e9


def bench_experts(
    tokens: Sequence[int],
    dtype: str,
    weights_dtype: Quantized | None,
    rounds: int,
    on_case: Callable[[int, int], None] = lambda *_: None,
) -> dict[str, Any]:
    """Run the benchmark and return its report.

    `tokens`: the number of tokens of each case. `rounds`: how often each set of inputs is timed.
    The highest rate of a case counts. `on_case` is called before each case, with the number of
    finished cases and the number of all cases.
    """
    kernels = CpuKernels()
    layer = _Layer(kernels, getattr(torch, dtype), weights_dtype)
    cases = []
    for number, count in enumerate(tokens):
        on_case(number, len(tokens))
        cases.append(layer.measure(count, rounds))
    names = {"dtype": dtype, "weights_dtype": weights_dtype or dtype}
    return {**header([], torch.device("cpu")), **names, "cases": cases}


def expert_rows(report: dict[str, Any]) -> Iterator[Sequence[str]]:
    """Yield the rows of the report's table; the first row has the titles."""
    yield "tokens", "experts read", "experts GB/s", "dense GB/s", "of dense"
    for it in report["cases"]:
        figures = it["experts_per_second"] / _GIGA, it["dense_per_second"] / _GIGA
        touched = f"{it['experts_read']:.1f}"
        yield f"{it['tokens']}", touched, *(f"{own:.1f}" for own in figures), f"{it['ratio']:.2f}"


class _Layer:
    """The experts of a layer, with random weights."""

    def __init__(
        self, kernels: CpuKernels, dtype: torch.dtype, quantized: Quantized | None
    ) -> None:
        self._kernels, self._dtype = kernels, dtype
        self._up = _random_matrix(kernels, 2 * COUNT * WIDTH, HIDDEN, dtype, quantized)
        down = _random_matrix(kernels, COUNT * HIDDEN, WIDTH, dtype, quantized)
        self._experts = ExpertMatrices(self._up, None, down, None, "silu", True, 0, COUNT)

    def measure(self, num_tokens: int, rounds: int) -> dict[str, Any]:
        """Return the report's fields for a case of `num_tokens`. Rates are in bytes per second.

        "experts_read" is the mean number of different experts that the tokens of a set choose.
        """
        generator = torch.Generator().manual_seed(num_tokens)

        def drawn(width: int) -> Tensor:
            return torch.randn(_NUM_SETS, num_tokens, width, generator=generator)

        x, logits = drawn(HIDDEN).to(self._dtype), drawn(COUNT)
        chosen = [choose_experts(own, _ROUTING, None)[0] for own in logits]
        row_bytes = self._up.nbytes // len(self._up)
        of_one = [len(torch.unique(own)) * 3 * WIDTH * row_bytes for own in chosen]
        touched = sum(map(len, map(torch.unique, chosen))) / _NUM_SETS
        dense = self._dense(round(touched * 3 * WIDTH))
        dense_bytes = len(dense[0]) * row_bytes
        best = [math.inf, math.inf]
        mix = self._captured(self._mix)
        multiply = [self._captured(partial(self._linear, it)) for it in dense]
        for number in range(rounds * _NUM_SETS):
            one, other = number % _NUM_SETS, number % len(dense)
            best[0] = min(best[0], _seconds(mix, x[one], logits[one]) / of_one[one])
            best[1] = min(best[1], _seconds(multiply[other], x[one]))
        rates = 1 / best[0], dense_bytes / best[1]
        return {
            "tokens": num_tokens,
            "experts_read": touched,
            "experts_per_second": rates[0],
            "dense_per_second": rates[1],
            "ratio": rates[0] / rates[1],
        }

    def _mix(self, inputs: Sequence[Tensor]) -> Tensor:
        x, logits = inputs
        return self._kernels.experts(x, logits, None, _ROUTING, self._experts)

    def _linear(self, matrix: Matrix, inputs: Sequence[Tensor]) -> Tensor:
        (x,) = inputs
        return self._kernels.linear(x, matrix)

    def _captured(self, compute: Callable[[Sequence[Tensor]], Tensor]) -> Callable[..., Tensor]:
        """Return a function like `compute` that replays a captured step from its third call on."""
        capture = self._kernels.new_step_capture()
        assert capture is not None
        return lambda *inputs: capture.run(inputs, None, compute)

    def _dense(self, num_rows: int) -> Sequence[Matrix]:
        """Return the up matrix in equal parts of about `num_rows` rows."""
        panels, most = len(self._up.values), max(1, len(self._up) // num_rows)
        return self._up.parts(next(it for it in range(most, 0, -1) if panels % it == 0))


def _seconds(work: Callable[..., object], *given: Any) -> float:
    started = time.perf_counter()
    work(*given)
    return time.perf_counter() - started


def _random_matrix(
    kernels: CpuKernels, rows: int, columns: int, dtype: torch.dtype, quantized: Quantized | None
) -> PackedMatrix:
    matrix = kernels.new_matrix(rows, columns, dtype, quantized)
    if matrix is None:
        raise ConfigError("weights are not packed on this processor: there is nothing to compare")
    if matrix.scales is None:
        matrix.values.normal_(std=0.02)
    else:
        matrix.values.random_(0, 127)
        matrix.scales.fill_(1e-3)
    return matrix
