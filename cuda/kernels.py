"""`CudaKernels`: the ops of the network as the kernels of this folder, GEMMs as torch does them.

Decides which kernel serves which call, and what no kernel covers, which the reference computes.
Knows nothing of batches and models. Where the kernels run is the launcher's: a GPU, or the emulator
on the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from gptmanager.cuda import activations, cache_write, norms
from gptmanager.cuda.context_attention import context_attention, plan_context
from gptmanager.cuda.generation_attention import MAX_GROUP, generation_attention
from gptmanager.cuda.generation_plan import max_num_items, plan_generation
from gptmanager.cuda.launch import Launcher
from gptmanager.kernels.reference import AttentionShape, Ints, Kernels


@dataclass(frozen=True, eq=False)
class _Items:
    """Work of the attention kernels for one window."""

    context: Tensor
    generation: Tensor
    partial_starts: Tensor


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows that one of the attention kernels serves."""

    row_starts: Tensor
    kv_lengths: Tensor
    slots: Tensor


@dataclass(frozen=True, eq=False)
class StepPlan:
    """Where a step's tokens go in the pages, how its attention is cut, and room to work in."""

    places: Tensor
    items: dict[int | None, _Items]
    context: _Rows | None
    generation: _Rows | None
    partial: Tensor
    partial_log: Tensor
    arrived: Tensor


class CudaKernels(Kernels):
    """The ops on tensors of the launcher's device, on its current stream; nothing waits for it.

    Pages are token-major in memory: `keys [P, K, D, B]` is a transposed view. `deterministic`:
    context attention serves all rows, since generation attention cuts a row by what else runs.
    """

    def __init__(self, launcher: Launcher, deterministic: bool = False) -> None:
        super().__init__(deterministic)
        self._launcher = launcher

    def plan(
        self,
        shape: AttentionShape,
        row_starts: Ints,
        kv_lengths: Ints,
        num_context_rows: int,
        fixed: bool = False,
    ) -> tuple[Ints, ...]:
        """For each window the items of context attention, of generation attention, and its
        partial results; none where the reference computes attention.
        """
        if not _covers(shape):
            return ()
        num_new = np.diff(row_starts)
        middle = num_context_rows
        if self.deterministic or (num_new[middle:] > 1).any():
            middle = len(num_new)
        alive = middle + int(np.count_nonzero(num_new[middle:]))  # those behind are padding
        group = shape.num_heads // shape.num_kv_heads
        size = shape.num_kv_heads, self._launcher.num_multiprocessors
        arrays: list[Ints] = []
        for window in shape.windows:
            context = plan_context(
                num_new[:middle],
                kv_lengths[:middle],
                group,
                shape.head_dim,
                window=window,
                sink=shape.sink,
                fp8=shape.fp8,
            )
            generation = plan_generation(
                kv_lengths[middle:alive], *size, window=window, sink=shape.sink
            )
            if fixed:  # a token's queries are one item
                num_single = len(num_new) - middle
                most = max_num_items(num_single, *size, window=window, sink=shape.sink)
                generation = generation.padded(most, num_single)
                context = _padded(context, middle)
            arrays += (context, generation.items, generation.partial_starts)
        return tuple(arrays)

    def begin(
        self,
        shape: AttentionShape,
        plan: Sequence[Tensor],
        row_starts: Tensor,
        kv_lengths: Tensor,
        slots: Tensor,
        block_tables: Tensor,
        num_tokens: int,
        tokens_per_block: int,
    ) -> StepPlan | None:
        if not plan:
            return None
        places = torch.empty(num_tokens, dtype=torch.int32, device=slots.device)
        cache_write.locate_tokens(
            self._launcher, places, row_starts, kv_lengths, slots, block_tables, tokens_per_block
        )
        items = {window: _Items(*plan[3 * i : 3 * i + 3]) for i, window in enumerate(shape.windows)}
        num_rows = slots.shape[0]
        middle = num_rows + 1 - plan[2].shape[0]
        context = generation = None
        if middle:
            context = _Rows(row_starts[: middle + 1], kv_lengths[:middle], slots[:middle])
        if middle < num_rows:
            generation = _Rows(row_starts[middle:], kv_lengths[middle:], slots[middle:])
        # room for as many partial results as there are items: their number is on the device
        most = max(own.generation.shape[0] for own in items.values())
        partial = torch.empty(most, shape.num_heads, shape.head_dim, device=slots.device)
        partial_log = torch.empty(most, shape.num_heads, device=slots.device)
        arrived = torch.zeros(
            num_rows - middle, shape.num_kv_heads, dtype=torch.int32, device=slots.device
        )
        return StepPlan(places, items, context, generation, partial, partial_log, arrived)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        norms.rms_norm(self._launcher, out, x, weight, eps)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        norms.rms_norm(self._launcher, x, x, weight, eps, residual=residual)
        return x

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        out = torch.empty_like(x)
        norms.layer_norm(self._launcher, out, x, weight, bias, eps)
        return out

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor:
        norms.layer_norm(self._launcher, x, x, weight, bias, eps, residual=residual)
        return x

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        activations.silu_mul(self._launcher, out, gate_up)
        return out

    def gelu(self, x: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
        activations.gelu(self._launcher, x, x, approximate)
        return x

    def rope_and_write(
        self,
        qkv: Tensor,
        positions: Tensor,
        cos_sin: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        keys: Tensor,
        values: Tensor,
        row_starts: Tensor,
        kv_lengths: Tensor,
        slots: Tensor,
        block_tables: Tensor,
        plan: Any = None,
        cache_scales: Tensor | None = None,
    ) -> Tensor:
        if plan is None:
            return super().rope_and_write(
                *(qkv, positions, cos_sin, q_norm, k_norm, eps, keys, values),
                *(row_starts, kv_lengths, slots, block_tables),
                cache_scales=cache_scales,
            )
        num_kv_heads, head_dim = keys.shape[1:3]
        num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
        queries = qkv.new_empty(len(qkv), num_heads, head_dim)
        cache_write.rope_and_write(
            self._launcher,
            queries,
            keys.mT,
            values,
            qkv,
            positions,
            plan.places,
            cos_sin=cos_sin,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
            cache_scales=cache_scales,
        )
        return queries

    def attention(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        row_starts: Tensor,
        kv_lengths: Tensor,
        slots: Tensor,
        block_tables: Tensor,
        *,
        scale: float,
        window: int | None = None,
        sink: int = 0,
        softcap: float = 0.0,
        cache_scales: Tensor | None = None,
        num_context_rows: int = 0,
        plan: Any = None,
    ) -> Tensor:
        if plan is None:
            return super().attention(
                *(q, keys, values, row_starts, kv_lengths, slots, block_tables),
                scale=scale,
                window=window,
                sink=sink,
                softcap=softcap,
                cache_scales=cache_scales,
            )
        out, items = torch.empty_like(q), plan.items[window]
        keys = keys.mT
        if plan.context is not None:
            rows = plan.context
            context_attention(
                self._launcher,
                *(out, q, keys, values, items.context),
                *(rows.row_starts, rows.kv_lengths, rows.slots, block_tables),
                scale=scale,
                window=window,
                sink=sink,
                softcap=softcap,
                cache_scales=cache_scales,
            )
        if plan.generation is not None:
            rows = plan.generation
            generation_attention(
                self._launcher,
                *(out, plan.partial, plan.partial_log, plan.arrived, items.partial_starts),
                *(q, keys, values, items.generation),
                *(rows.row_starts, rows.slots, block_tables),
                scale=scale,
                softcap=softcap,
                cache_scales=cache_scales,
            )
        return out.flatten(1)


def _covers(shape: AttentionShape) -> bool:
    group, rest = divmod(shape.num_heads, shape.num_kv_heads)
    return shape.head_dim in cache_write.HEAD_DIMS and not rest and group <= MAX_GROUP


def _padded(items: Ints, num_items: int) -> Ints:
    """With items that do nothing."""
    result = np.full((num_items, 4), -1, dtype=np.int32)
    result[: len(items)] = items
    return result
