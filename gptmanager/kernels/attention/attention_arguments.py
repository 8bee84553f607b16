"""The arguments of attention apart from queries: `Pages`, `RowSpans` and `AttentionShape`.

Letters for sizes are explained in `reference`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from torch import Tensor

_FEATURES = ("window", "sink", "softcap", "fp8", "sinks", "is_once", "chunked")
Positions = TypeVar("Positions", int, npt.NDArray[np.int64], Tensor)


class Pages(NamedTuple):
    """One layer's part of the KV cache: `keys [P, K, D, B]`, `values [P, K, B, D]`.

    If keys and values are float8_e4m3fn, `cache_scales [2, K]` float32 has the scales of keys, then
    of values. A stored element stands for element * scale. A number is stored as number / scale,
    clamped to +-448 and rounded to nearest. If `is_once`, the values are the keys (latents), in the
    same memory.
    """

    keys: Tensor
    values: Tensor
    cache_scales: Tensor | None = None
    is_once: bool = False


class RowLengths(NamedTuple):
    """`row_starts` and `kv_lengths` of `RowSpans` on the CPU, in NumPy, for plans made there."""

    row_starts: npt.NDArray[np.int32]
    kv_lengths: npt.NDArray[np.int32]


class RowSpans(NamedTuple):
    """The tokens and pages of each row: int32 tensors, the same for all layers.

    Row r owns the packed tokens `row_starts[r]:row_starts[r + 1]`; `row_starts` is `[R + 1]`. Row r
    has `kv_lengths[r]` positions, and its tokens have the last ones; `kv_lengths` is `[R]`.
    `block_tables[slots[r]]` lists the blocks of row r; `block_tables` is `[slots, blocks]`, and
    `slots` is `[R]`. The first `num_context_rows` rows may have several tokens. `lengths` is None
    in a captured step, and may be None in a batch made by a host. The method `begin` of some
    `Kernels` classes sets `plan` or `phases`, which are otherwise None.
    """

    row_starts: Tensor
    kv_lengths: Tensor
    slots: Tensor
    block_tables: Tensor
    num_context_rows: int = 0
    lengths: RowLengths | None = None
    plan: Any = None
    phases: Any = None

    def part(self, first: int, last: int) -> RowSpans:
        """Return the rows from `first` to `last` (excluded), for use with the tokens of all rows.

        If there is a plan, `first` to `last` must be exactly the context or the generation rows.
        """
        return self._replace(
            row_starts=self.row_starts[first : last + 1],
            kv_lengths=self.kv_lengths[first:last],
            slots=self.slots[first:last],
            plan=None if self.plan is None else self.plan.part(first),
        )


class AttentionShape(NamedTuple):
    """The attention that one layer computes.

    Token i of a row with n new tokens and KV length m is at position p = m - n + i, and sees the
    positions 0 to p. With `window` it sees only the last `window` of these positions, including p,
    and the first `sink` positions. If `chunked`, the window instead begins at the largest multiple
    of `window` that is at most p. A score is a dot product times `scale`; with `softcap` it becomes
    softcap * tanh(score / softcap). With `fp8`, pages have 8-bit floats. With `sinks`, each head
    has a score without a value. With `late_norm`, queries and keys are normalized after their
    rotation. With `plus_one`, the weights of these norms are stored minus 1. `is_once` is as in
    `Pages`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    sink: int = 0
    softcap: float = 0.0
    fp8: bool = False
    sinks: bool = False
    late_norm: bool = False
    plus_one: bool = False
    is_once: bool = False
    chunked: bool = False

    @property
    def group(self) -> int:
        """The number of query heads for each KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def features(self) -> frozenset[str]:
        """The names of the fields that make this more than causal attention with a scale.

        They are some of "window", "sink", "softcap", "fp8", "sinks", "is_once" and "chunked".
        """
        return frozenset(name for name in _FEATURES if getattr(self, name))

    def first_seen(self, position: Positions) -> Positions:
        """Return the first position in the window of a token at `position`; it may be negative."""
        if self.window is None:
            return position * 0
        return position // self.window * self.window if self.chunked else position + 1 - self.window
