"""`AttentionTrial`: times attention by our own kernels and by each provider, on random pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gptmanager.kernels.attention.attention_arguments import (
    AttentionShape,
    Pages,
    RowLengths,
    RowSpans,
)
from gptmanager.kernels.provided import ProvidedKernels, Served
from gptmanager.kernels.providers import AttentionProvider
from gptmanager.lifecycle.log import logger

Run = Callable[[], Tensor]
Seconds = Callable[[Run, bool], float]  # times a run, as a CUDA graph if the flag is set

OWN = "own"
CONTEXT, GENERATION = PHASES = "context", "generation"
_ROUNDS = 3
_MARGIN = 0.97  # smaller differences are noise
_LENGTHS = {CONTEXT: 2048, GENERATION: 1024}  # KV length of each row in a run
_BEYOND_CACHES = 256 << 20  # bytes of keys and values that a run should read: more than L2 holds
_MOST_SETS = 8  # the most sets of pages that a run reads; a set stands for one layer


class StepLimits(NamedTuple):
    """The limits of a manager's steps, and which steps are captured in CUDA graphs.

    If `captures`, generation steps are captured. If `captures_mixed`, some steps with context rows
    are captured, too.
    """

    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    tokens_per_block: int
    captures: bool = False
    captures_mixed: bool = False


class _Sizes(NamedTuple):
    """The sizes of a run: each of `rows` rows has KV length `length`, with `new` new tokens at the
    end. The run computes attention once on each of `num_sets` sets of pages.
    """

    rows: int
    new: int
    length: int
    num_sets: int


class AttentionTrial:
    """Times attention for batches that do not exceed `limits`.

    `dtype` is the dtype of the queries. Keys and values have it, too, unless a shape uses fp8.
    """

    def __init__(
        self,
        kernels: ProvidedKernels,
        dtype: torch.dtype,
        limits: StepLimits,
        seconds: Seconds,
        device: torch.device | str,
    ) -> None:
        self._kernels, self._dtype, self._limits = kernels, dtype, limits
        self._seconds, self._device = seconds, device

    def seconds_of(
        self, phase: str, shape: AttentionShape, providers: Mapping[str, AttentionProvider]
    ) -> dict[str, float]:
        """Return and log the shortest time, in seconds, of our kernels ("own") and each provider.

        The result is by name, "own" first. Our kernels and each provider are timed once in each of
        `_ROUNDS` rounds. A provider that raises an exception in a run is left out, with a warning.
        If the device is out of memory, the result is only a time of 0 for "own", and nothing but a
        warning is logged.
        """
        best: dict[str, float] = {}
        runs: dict[str, Run] = {}
        try:
            runs[OWN] = self._run(phase, shape, None)
            for name, provider in providers.items():
                runs[name] = self._run(phase, shape, provider)
            for _ in range(_ROUNDS):
                for name in list(runs):
                    self._time(phase, name, runs, best)
        except torch.OutOfMemoryError:
            logger.warning("not enough memory to time attention: our own kernels compute it")
            return {OWN: 0.0}
        figures = ", ".join(f"{it * 1e6:.1f} us by {name}" for name, it in best.items())
        heads = shape.num_heads, shape.num_kv_heads, shape.head_dim
        logger.info("attention of %d/%d heads of %d, %s: %s", *heads, phase, figures)
        return best

    def _time(self, phase: str, name: str, runs: dict[str, Run], best: dict[str, float]) -> None:
        try:
            taken = self._seconds(runs[name], phase == GENERATION and self._limits.captures)
        except Exception as error:
            if name == OWN or isinstance(error, torch.OutOfMemoryError):
                raise
            logger.warning("the attention provider %s fails, and is not used: %s", name, error)
            del runs[name]
            best.pop(name, None)
        else:
            best[name] = min(best.get(name, taken), taken)

    def _run(self, phase: str, shape: AttentionShape, provider: AttentionProvider | None) -> Run:
        """Return a function that computes attention on each set of pages once, with `provider`.

        If `provider` is None, our own kernels compute the attention.
        """
        sizes = self._sizes(phase, shape)
        kernels, served = self._kernels, {shape: Served(provider, provider)}
        kernels.use_attention(served)
        spans = self._begin(shape, sizes, sizes.rows if phase == CONTEXT else 0)
        block = self._limits.tokens_per_block
        num_blocks = sizes.rows * -(-sizes.length // block)
        size = num_blocks, shape.num_kv_heads, block, shape.head_dim
        pages = [self._pages(size, shape) for _ in range(sizes.num_sets)]
        queries = self._random(sizes.rows * sizes.new, shape.num_heads, shape.head_dim)
        sinks = self._random(shape.num_heads) if shape.sinks else None

        def run() -> Tensor:
            kernels.use_attention(served)
            for own in pages:
                result = kernels.attention(queries, own, spans, shape, sinks)
            return result

        return run

    def _sizes(self, phase: str, shape: AttentionShape) -> _Sizes:
        limits, length = self._limits, min(_LENGTHS[phase], self._limits.max_seq_len)
        item = 1 if shape.fp8 else self._dtype.itemsize
        row_bytes = 2 * length * shape.num_kv_heads * shape.head_dim * item
        if phase == CONTEXT:
            length = min(length, limits.max_num_tokens)
            return _Sizes(1, length, length, min(_MOST_SETS, -(-_BEYOND_CACHES // row_bytes)))
        rows = min(limits.max_batch_size, -(-_BEYOND_CACHES // row_bytes))
        return _Sizes(rows, 1, length, min(_MOST_SETS, -(-_BEYOND_CACHES // (rows * row_bytes))))

    def _begin(self, shape: AttentionShape, sizes: _Sizes, num_context_rows: int) -> RowSpans:
        rows, new, length, _ = sizes
        starts = np.arange(rows + 1, dtype=np.int32) * np.int32(new)
        lengths = RowLengths(starts, np.full(rows, length, dtype=np.int32))
        plan = self._kernels.plan((shape,), *lengths, num_context_rows)
        on_device = [torch.from_numpy(it).to(self._device) for it in (*lengths, *plan)]
        own_starts, own_lengths, *own_plan = on_device
        block = self._limits.tokens_per_block
        slots = torch.arange(rows, dtype=torch.int32, device=self._device)
        blocks = torch.arange(rows * -(-length // block), dtype=torch.int32, device=self._device)
        tables = blocks.view(rows, -1)
        spans = RowSpans(own_starts, own_lengths, slots, tables, num_context_rows, lengths)
        return self._kernels.begin((shape,), spans, own_plan, rows * new, block)

    def _pages(self, size: Sequence[int], shape: AttentionShape) -> Pages:
        keys = self._random(*size)
        values = keys if shape.is_once else self._random(*size)
        if not shape.fp8:
            return Pages(keys.mT, values, None, shape.is_once)
        keys, values = (it.to(torch.float8_e4m3fn) for it in (keys, values))
        return Pages(keys.mT, values, torch.ones(2, size[1], device=self._device))

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self._device).to(self._dtype)


def fastest(totals: Mapping[str, float]) -> str:
    """Return the name with the least time, or "own" if our own kernels are only slightly slower."""
    best = min(totals, key=totals.__getitem__)
    return best if totals[best] < _MARGIN * totals[OWN] else OWN
