"""`CudaKernels`: the ops of the network as CUDA kernels; torch computes most large matmuls.

The class chooses the kernel for each call; calls that no kernel covers fall back to the reference.
The launcher decides where the kernels run: on a GPU, or on the CPU in the emulator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gptmanager.cuda import activations, norms
from gptmanager.cuda.attention import cache_write
from gptmanager.cuda.attention.context_attention import (
    context_attention,
    max_num_context_items,
    plan_context,
)
from gptmanager.cuda.attention.generation_attention import (
    GenerationWork,
    find_places,
    generation_attention,
)
from gptmanager.cuda.attention.generation_plan import WHOLE, max_num_items, plan_generation
from gptmanager.cuda.attention.paged_kernels import HEAD_DIMS, refusal
from gptmanager.cuda.device.launch import Launcher
from gptmanager.cuda.gemm import gemv, gemv_int4, lora
from gptmanager.cuda.gemm.byte_rows import ByteRows, Fp8Rows, Int8Rows
from gptmanager.cuda.gemm.device_matrices import DeviceMatrix, on_device
from gptmanager.cuda.gemm.matmul_choice import OWN, MatmulChoice, multiply_by_torch
from gptmanager.cuda.gemm.own_matmuls import OwnMatmuls
from gptmanager.cuda.recurrent_kernels import RecurrentKernels
from gptmanager.kernels.activations.activation_kinds import Activation
from gptmanager.kernels.attention.attention_arguments import AttentionShape, Pages, RowSpans
from gptmanager.kernels.gemm.int4_matrix import Int4Matrix
from gptmanager.kernels.gemm.packed_matrix import Matrix, PackedMatrix, Quantized
from gptmanager.kernels.lora.adapter_arguments import StepAdapters
from gptmanager.kernels.provided import ProvidedKernels
from gptmanager.kernels.reference import Ints
from gptmanager.lifecycle.log import logger

# heads, KV heads, head size, window, sink, chunked
_Kind = tuple[int, int, int, int | None, int, bool]


class _Work(NamedTuple):
    """The work of both attention kernels, shared by all layers of one `_Kind`."""

    context_items: Tensor
    generation: GenerationWork


class StepPlan(NamedTuple):
    """A step's plan: each token's cell in the pages, and the rows and work for attention.

    `cells` is int32 `[T]`. `context` and `generation` are the rows of the two attention kernels,
    None if a kernel has no rows. `work` has an entry for each kind of layer.
    """

    cells: Tensor
    context: RowSpans | None
    generation: RowSpans | None
    work: Mapping[_Kind, _Work]

    def part(self, first: int) -> StepPlan:
        """Return the plan of the context rows if `first` is 0, otherwise of the generation rows."""
        if self.context is None or self.generation is None:
            return self
        return self._replace(context=None) if first else self._replace(generation=None)


class CudaKernels(RecurrentKernels):
    """Ops on tensors of the launcher's device. They are enqueued on its current stream.

    `keys [P, K, D, B]` is a view of `[P, K, B, D]` in memory. If `deterministic`, a matmul uses
    the same kernel for any number of rows, and context attention computes all rows, because
    generation attention divides a row into parts that depend on the other rows.
    """

    has_float64 = False
    quantized_kinds: tuple[Quantized, ...] = ("int8", "int4")

    def __init__(self, launcher: Launcher, deterministic: bool = False) -> None:
        super().__init__(launcher, deterministic)
        if launcher.has_fp8:
            self.quantized_kinds = (*self.quantized_kinds, "fp8")
        self._own_matmuls = OwnMatmuls(launcher)
        self._choice = MatmulChoice()
        self._is_refusal_logged = False

    def measure_matmuls(self, weights: Iterable[Matrix], *given: Any) -> None:
        """Time matmuls with these weights; further arguments as in `MatmulChoice.measure`."""
        is_measured = self._launcher.has_matmuls and not self.deterministic
        measured = map(on_device, weights) if is_measured else ()
        self._choice.measure(self._own_matmuls, measured, *given)  # always: all ranks agree here

    def padded_head_dim(self, head_dim: int) -> int:
        return min((it for it in HEAD_DIMS if it >= head_dim), default=head_dim)

    def new_matrix(
        self,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        quantized: Quantized | None = None,
        device: torch.device | str = "cpu",
    ) -> PackedMatrix | None:
        if quantized == "int4":
            return Int4Matrix(rows, columns, dtype, device)
        if quantized == "fp8":
            return Fp8Rows(rows, columns, dtype, device)
        return Int8Rows(rows, columns, dtype, device) if quantized == "int8" else None

    def embedding(self, ids: Tensor, table: Matrix) -> Tensor:
        if isinstance(table, ByteRows | Int4Matrix):
            return table.gathered(ids)
        return super().embedding(ids, table)

    def plan(
        self,
        shapes: Sequence[AttentionShape],
        row_starts: Ints,
        kv_lengths: Ints,
        num_context_rows: int,
        fixed: int = 0,
    ) -> tuple[Ints, ...]:
        """Return the plans of both attention kernels: four arrays for each `_Kind` of layer.

        These are the items of context attention, then the items, block starts and partial starts of
        generation attention. With `fixed`, the arrays are padded to sizes that do not depend on the
        lengths of the rows. The result is empty if the reference computes attention.
        """
        if not self._covers(shapes):
            return ()
        num_new = np.diff(row_starts)
        middle = num_context_rows
        if self.deterministic or (num_new[middle:] > 1).any():
            middle = len(num_new)
        alive = middle + int(np.count_nonzero(num_new[middle:]))  # the rest is padding
        stretch = None if self._launcher.features.split else WHOLE
        arrays: list[Ints] = []
        for shape in _by_kind(shapes).values():
            context = plan_context(num_new[:middle], kv_lengths[:middle], shape)
            size = shape.num_kv_heads, find_places(self._launcher, shape)
            window, sink, single = shape.window, shape.sink, kv_lengths[middle:alive]
            generation = plan_generation(
                single, *size, window=window, sink=sink, chunked=shape.chunked, stretch=stretch
            )
            if fixed:
                num_single = len(num_new) - middle
                most = max_num_items(num_single, *size, window=window, sink=sink)
                generation = generation.padded(most, num_single)
                context = _padded(context, max_num_context_items(middle, fixed, shape))
            arrays += (context, generation.items)
            arrays += (generation.block_starts, generation.partial_starts)
        return tuple(arrays)

    def begin(
        self,
        shapes: Sequence[AttentionShape],
        rows: RowSpans,
        plan: Sequence[Tensor],
        num_tokens: int,
        tokens_per_block: int,
    ) -> RowSpans:
        if not plan:
            return rows
        device, num_rows = rows.slots.device, rows.slots.shape[0]
        cells = torch.empty(num_tokens, dtype=torch.int32, device=device)
        cache_write.locate_tokens(self._launcher, cells, rows, tokens_per_block)
        contexts, items, blocks, starts = (plan[kind::4] for kind in range(4))
        # One partial result per item is enough. Only the device has the number of partial results.
        most, num_single = max(len(own) for own in items), len(starts[0]) - 1
        memory = {
            heads: (
                torch.empty(most, heads[0], heads[2], device=device),
                torch.empty(most, heads[0], device=device),
                torch.zeros(num_single, heads[1], dtype=torch.int32, device=device),
            )
            for heads in {shape[:3] for shape in shapes}
        }
        work = {
            kind: _Work(context, GenerationWork(own, block, start, *memory[kind[:3]]))
            for kind, context, own, block, start in zip(
                _by_kind(shapes), contexts, items, blocks, starts, strict=True
            )
        }
        middle = num_rows - num_single
        context = rows.part(0, middle) if middle else None
        generation = rows.part(middle, num_rows) if num_single else None
        return rows._replace(plan=StepPlan(cells, context, generation, work))

    def linear(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        x, matrix = x.to(weight.dtype).contiguous(), on_device(weight)
        if not self._multiplies(x, matrix):
            if self.deterministic:
                return super().linear(x, matrix, bias)
            return multiply_by_torch(x, matrix, bias, self._choice.engine(len(x), matrix))
        out = x.new_empty(len(x), len(matrix))
        if self.deterministic and not isinstance(matrix, Int4Matrix):
            gemv.multiply(self._launcher, out, x, matrix, bias)  # for any number of rows
        else:
            self._own_matmuls.multiply(out, x, matrix, bias)
        return out

    def linear_silu_mul(self, x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
        x, matrix = x.to(weight.dtype).contiguous(), on_device(weight)
        # If deterministic, round before the activation, as for rows with an adapter.
        if self.deterministic or not self._multiplies(x, matrix, silu=True):
            return super().linear_silu_mul(x, matrix, bias)
        out = x.new_empty(len(x), len(matrix) // 2)
        self._own_matmuls.multiply(out, x, matrix, bias, silu=True)
        return out

    def _covers(self, shapes: Sequence[AttentionShape]) -> bool:
        """Return whether kernels compute attention of all `shapes`; log once if they do not."""
        reason = next(filter(None, map(refusal, shapes)), None)
        if reason is not None and not self._is_refusal_logged:
            self._is_refusal_logged = True
            logger.warning(
                "no kernel computes this model's attention: %s. PyTorch computes it, step by step "
                "and without CUDA graphs, which is slow",
                reason,
            )
        return reason is None

    def _multiplies(self, x: Tensor, matrix: DeviceMatrix, *, silu: bool = False) -> bool:
        """Return whether our kernels compute this matmul.

        If deterministic, the answer does not depend on the number of rows.
        """
        if not self._launcher.has_matmuls:
            return False
        if self.deterministic:
            if isinstance(matrix, Int4Matrix):
                return gemv_int4.covers(x, matrix)
            return gemv.covers(x, matrix)
        covered = self._own_matmuls.covers(x, matrix, silu=silu)
        return covered and self._choice.engine(len(x), matrix) == OWN

    def add_adapters(
        self, result: Tensor, x: Tensor, adapters: StepAdapters, layer: int, matrix: str
    ) -> None:
        modules = adapters.layout.get(matrix, ())
        if lora.covers(result, x, adapters, modules):
            lora.add_adapters(self._launcher, result, x, adapters, layer, modules)
        else:
            super().add_adapters(result, x, adapters, layer, matrix)

    def _normalize(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        plus_one: bool,
        *,
        centered: bool,
    ) -> Tensor:
        out = torch.empty_like(x) if residual is None else x
        kind = {"centered": centered, "plus_one": plus_one}
        norms.norm(self._launcher, out, x, weight, bias, eps, residual, **kind)
        return out

    def norm_heads(
        self,
        qkv: Tensor,
        columns: range,
        head_dim: int,
        weight: Tensor,
        eps: float,
        *,
        centered: bool,
        plus_one: bool,
    ) -> None:
        given = qkv, columns, head_dim, weight, eps
        if plus_one:  # no model family has such norms
            super().norm_heads(*given, centered=centered, plus_one=True)
        else:
            norms.norm_heads(self._launcher, *given, centered=centered)

    def activate(self, x: Tensor, activation: Activation, gated: bool) -> Tensor:
        if not gated:
            activations.activate(self._launcher, x, x, activation)
            return x
        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        activations.activate_gated(self._launcher, out, x, activation)
        return out

    def activate_times(self, x: Tensor, activation: Activation, factors: Tensor) -> Tensor:
        return self.activate(x, activation, gated=False) * factors

    def rope_and_write(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        pages: Pages,
        rows: RowSpans,
        norm_last: bool = False,
        plus_one: bool = False,
    ) -> Tensor:
        if rows.plan is None:
            given = positions, cos_sin, q_norm, k_norm, eps, pages, rows, norm_last, plus_one
            return super().rope_and_write(qkv, *given)
        num_kv_heads, head_dim = pages.keys.shape[1:3]
        queries = qkv.new_empty(len(qkv), qkv.shape[1] // head_dim - 2 * num_kv_heads, head_dim)
        cache_write.rope_and_write(
            self._launcher,
            # a layer with gated outputs passes a view of some columns
            *(queries, qkv.contiguous(), positions, rows.plan.cells, pages),
            cos_sin=cos_sin,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
            late=norm_last,
            plus_one=plus_one,
        )
        return queries

    def attention(
        self,
        q: Tensor,
        pages: Pages,
        rows: RowSpans,
        shape: AttentionShape,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if rows.plan is None:
            return super().attention(q, pages, rows, shape, sinks)
        plan: StepPlan = rows.plan
        launcher, out, work = self._launcher, torch.empty_like(q), plan.work[_kind(shape)]
        if plan.context is not None:
            own = plan.context, work.context_items
            context_attention(launcher, out, q, pages, *own, shape, sinks)
        if plan.generation is not None:
            given = plan.generation, work.generation
            generation_attention(launcher, out, q, pages, *given, shape, sinks)
        return out.flatten(1)


class ProvidedCudaKernels(ProvidedKernels, CudaKernels):
    """CUDA kernels with providers for attention or matmuls."""


def _kind(shape: AttentionShape) -> _Kind:
    """Return the kind of a layer. Layers of one kind share a plan."""
    return (*shape[:3], shape.window, shape.sink, shape.chunked)


def _by_kind(shapes: Sequence[AttentionShape]) -> dict[_Kind, AttentionShape]:
    """Return one shape of each kind, in order of appearance."""
    return {_kind(shape): shape for shape in shapes}


def _padded(items: Ints, num_items: int) -> Ints:
    """Return `items` padded to `num_items` with items that do nothing."""
    result = np.full((num_items, 4), -1, dtype=np.int32)
    result[: len(items)] = items
    return result
