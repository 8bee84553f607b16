"""`ProvidedKernels`: lets providers compute attention or matmuls in place of our own kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
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
from gptmanager.kernels.cpu import CpuKernels
from gptmanager.kernels.gemm.packed_matrix import Matrix, PackedMatrix, Quantized
from gptmanager.kernels.providers import (
    AttentionProvider,
    AttentionRows,
    LinearProvider,
    answer_of,
    is_capturable,
    result_of,
)
from gptmanager.kernels.reference import Ints, Kernels


class Served(NamedTuple):
    """The provider of attention in each phase; None means our own kernels."""

    context: AttentionProvider | None = None
    generation: AttentionProvider | None = None

    @property
    def is_own(self) -> bool:
        """Whether our own kernels compute both phases."""
        return self.context is None and self.generation is None


class _Phase(NamedTuple):
    """The rows of a phase: `own` for our kernels, and `given` for a provider.

    Our kernels get the queries of all rows, a provider only the queries of `tokens`.
    """

    own: RowSpans
    tokens: slice
    given: AttentionRows


_OWN = Served()
_METHODS = "attend_context", "attend_generation"  # in the order of `Served`


class ProvidedKernels(Kernels):
    """A mixin: subclasses list it before a class of kernels, as `ProvidedCpuKernels` does.

    Nothing changes until `use_attention` or `use_linear` is called.
    """

    _served: Mapping[AttentionShape, Served] = MappingProxyType({})
    _linear: LinearProvider | None = None
    _accepted: dict[tuple[int, int, torch.dtype], bool]  # the answers of `LinearProvider.accepts`

    def use_attention(self, served: Mapping[AttentionShape, Served]) -> None:
        """Let providers compute attention of these shapes; call it before the first step."""
        self._served = served

    @property
    def has_providers(self) -> bool:
        """Whether a provider computes attention of any shape."""
        return not all(it.is_own for it in self._served.values())

    def use_linear(self, provider: LinearProvider | None) -> None:
        """Let `provider` compute matmuls; call it before weights are loaded."""
        self._linear = provider
        self._accepted = {}

    def plan(
        self,
        shapes: Sequence[AttentionShape],
        row_starts: Ints,
        kv_lengths: Ints,
        num_context_rows: int,
        fixed: int = 0,
    ) -> tuple[Ints, ...]:
        """Return the extended kernels' plan, or () if `fixed` and the step cannot be captured.

        A step cannot be captured if a provider in it is not capturable. A step with context rows
        cannot be captured if a provider computes attention, because this provider would need the
        lengths of the rows on the CPU.
        """
        served = [self._served.get(shape, _OWN) for shape in shapes]
        used = [self._linear, *(it.generation for it in served)]
        if fixed and not all(it is None or is_capturable(it) for it in used):
            return ()
        if fixed and num_context_rows and not all(it.is_own for it in served):
            return ()
        return super().plan(shapes, row_starts, kv_lengths, num_context_rows, fixed)

    def begin(
        self,
        shapes: Sequence[AttentionShape],
        rows: RowSpans,
        plan: Sequence[Tensor],
        num_tokens: int,
        tokens_per_block: int,
    ) -> RowSpans:
        if rows.lengths is None and not plan:  # a batch that a host made, not a captured step
            given = rows.row_starts.cpu().numpy(), rows.kv_lengths.cpu().numpy()
            rows = rows._replace(lengths=RowLengths(*given))
        rows = super().begin(shapes, rows, plan, num_tokens, tokens_per_block)
        if all(self._served.get(shape, _OWN).is_own for shape in shapes):
            return rows
        return rows._replace(phases=_phases(rows))

    def attention(
        self,
        q: Tensor,
        pages: Pages,
        rows: RowSpans,
        shape: AttentionShape,
        sinks: Tensor | None = None,
    ) -> Tensor:
        served = self._served.get(shape, _OWN)
        phases = zip(rows.phases or (), served, _METHODS, strict=False)
        parts = [part for part in phases if part[0] is not None]
        if all(provider is None for _, provider, _ in parts):
            return super().attention(q, pages, rows, shape, sinks)
        result = q.new_empty(len(q), q.shape[1] * q.shape[2])
        for phase, provider, method in parts:
            if provider is None:
                own = super().attention(q, pages, phase.own, shape, sinks)[phase.tokens]
            else:
                queries = q[phase.tokens]
                given = queries, pages, phase.given, shape, sinks
                own = result_of(provider, method, given, queries.shape).flatten(1)
            if len(parts) == 1:
                return own
            result[phase.tokens] = own  # now, because the next call may reuse the memory of `own`
        return result

    def new_matrix(
        self,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        quantized: Quantized | None = None,
        device: torch.device | str = "cpu",
    ) -> PackedMatrix | None:
        if quantized is None and self._accepts(rows, columns, dtype):
            return None
        return super().new_matrix(rows, columns, dtype, quantized, device)

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        if self._linear is None or not self._is_provided(weight):
            return super().linear(x, weight, bias)
        assert isinstance(weight, Tensor)
        given = x.to(weight.dtype), weight, bias
        return result_of(self._linear, "__call__", given, (len(x), len(weight)))

    def linear_silu_mul(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        if self._is_provided(weight):
            return self.silu_mul(self.linear(x, weight, bias))
        return super().linear_silu_mul(x, weight, bias)

    def _is_provided(self, weight: Matrix) -> bool:
        rows, columns = weight.shape
        return isinstance(weight, Tensor) and self._accepts(rows, columns, weight.dtype)

    def _accepts(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        if self._linear is None:
            return False
        kind = rows, columns, dtype
        if kind not in self._accepted:
            bools = (bool, np.bool_), "True or False"
            self._accepted[kind] = bool(answer_of(self._linear, "accepts", kind, *bools))
        return self._accepted[kind]


class ProvidedCpuKernels(ProvidedKernels, CpuKernels):
    """The kernels of the CPU with providers. Steps are not captured."""


def _phases(rows: RowSpans) -> tuple[_Phase | None, _Phase | None]:
    """Return the context rows and the generation rows of a step, or None for an empty phase.

    If a generation row has several tokens (drafts), all rows count as context rows, as in
    `CudaKernels.plan`.
    """
    middle, num_rows = rows.num_context_rows, len(rows.slots)
    if rows.lengths is None:  # captured: a query for each row, and maybe padding
        return None, _Phase(rows, slice(None), _rows(rows, 0, num_rows))
    if (rows.lengths.row_starts[middle + 1 :] - rows.lengths.row_starts[middle:-1] > 1).any():
        middle = num_rows
    context, generation = (
        None if first == last else _phase(rows, rows.lengths, first, last)
        for first, last in ((0, middle), (middle, num_rows))
    )
    return context, generation


def _phase(rows: RowSpans, lengths: RowLengths, first: int, last: int) -> _Phase:
    starts = lengths.row_starts
    tokens = slice(int(starts[first]), int(starts[last]))
    own = starts[first : last + 1] - starts[first], lengths.kv_lengths[first:last]
    given = _rows(rows, first, last, RowLengths(*own), tokens.start)
    return _Phase(rows.part(first, last), tokens, given)


def _rows(
    rows: RowSpans, first: int, last: int, lengths: RowLengths | None = None, start: int = 0
) -> AttentionRows:
    """Return the rows for a provider. Their tensors are copies, which it may overwrite: a kernel
    that reads other lengths than those of the step would access memory out of bounds.
    """
    if lengths is not None:
        lengths = RowLengths(*(it.copy() for it in lengths))
    return AttentionRows(
        rows.row_starts[first : last + 1] - start,
        rows.kv_lengths[first:last].clone(),
        rows.block_tables.index_select(0, rows.slots[first:last]),
        lengths,
    )
