"""`RecurrentOps`: the ops of recurrent layers in torch, which all kernels inherit."""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from gptmanager.kernels.attention.attention_arguments import RowSpans
from gptmanager.kernels.attention.paged_formulas import widened
from gptmanager.kernels.elementwise_ops import ElementwiseOps
from gptmanager.kernels.recurrent.convolution import Filter, convolve
from gptmanager.kernels.recurrent.delta_formulas import (
    DeltaShape,
    DeltaState,
    DeltaTensors,
    heads_of,
    in_chunks,
    step_by_step,
)
from gptmanager.kernels.recurrent.state_space_formulas import (
    StateSpaceShape,
    StateSpaceState,
    StateSpaceTensors,
    scan_chunks,
    scan_tokens,
)


class RecurrentOps(ElementwiseOps):
    """The ops of recurrent layers."""

    def captures_delta(self, shape: DeltaShape) -> bool:
        """Return whether CUDA graphs can contain `gated_delta`.

        If they can, `gated_delta` must never wait for the device.
        """
        return False

    def captures_state_space(self, shape: StateSpaceShape) -> bool:
        """Return the same for `state_space`."""
        return False

    def gated_delta(
        self,
        projected: Tensor,
        gates: Tensor,
        shape: DeltaShape,
        tensors: DeltaTensors,
        eps: float,
        state: DeltaState,
        rows: RowSpans,
    ) -> Tensor:
        """Return a layer's output `[T, H * V]` for the rows' tokens, and update its state.

        `delta_formulas` explains H and V. `projected` `[T, channels + H * V]` has queries, keys and
        values before the convolution, then the gates of the output. `gates` float32 `[T, 2 * H]`
        has rates, then arguments of the decay, both before their activations. Each head's output is
        RMS-normalized, then multiplied by the SiLU of its gate. The state is read and written at
        the rows' slots.
        """
        result = projected.new_empty(len(projected), shape.values)
        wide = widened(projected)
        rates, steps = widened(gates).to(wide).chunk(2, dim=-1)
        rates = self.elementwise(torch.sigmoid, rates)
        arguments = steps + widened(tensors.step)
        decays = -widened(tensors.decay).exp() * self.elementwise(F.softplus, arguments)
        channels, output_gates = wide.split((shape.channels, shape.values), dim=-1)
        mixed = convolve(channels, Filter(tensors.conv), state.inputs, rows)
        mixed = self.elementwise(F.silu, mixed)
        for tokens, slots in self._spans(rows):
            count, memory = (len(slots), -1), state.memory[slots].to(wide)
            q, k, v = heads_of(mixed[tokens].unflatten(0, count), shape)
            advance = step_by_step if self.deterministic or q.shape[1] == 1 else in_chunks
            decay, rate = decays[tokens], rates[tokens]
            read, memory = advance(
                q, k, v, decay.unflatten(0, count), rate.unflatten(0, count), memory
            )
            state.memory[slots] = memory.to(state.memory)
            mean = read.square().mean(-1, keepdim=True)
            normed = read * torch.rsqrt(mean + eps) * widened(tensors.norm)
            gated = normed.flatten(0, 1).flatten(1) * F.silu(output_gates[tokens])
            result[tokens] = gated.to(result.dtype)
        return result

    def short_convolution(
        self, projected: Tensor, own: Filter, inputs: Tensor, rows: RowSpans
    ) -> Tensor:
        """Return the output `[T, C]` of a gated convolution, and update its `inputs`.

        `projected` `[T, 3 * C]` has factors of the convolution's input, factors of its result, and
        the input. Inputs are rounded to the dtype after they are multiplied. `convolve` explains
        `inputs`. CUDA graphs can contain this op.
        """
        before, after, x = widened(projected).chunk(3, dim=-1)
        x = widened((before * x).to(projected.dtype))
        return (convolve(x, own, inputs, rows) * after).to(projected.dtype)

    def state_space(
        self,
        projected: Tensor,
        shape: StateSpaceShape,
        tensors: StateSpaceTensors,
        eps: float,
        state: StateSpaceState,
        rows: RowSpans,
    ) -> Tensor:
        """Return a Mamba-2 layer's output `[T, H * P]` for the rows' tokens, and update its state.

        `state_space_formulas` explains the letters. `projected` has, for each token, the gates of
        the output, then inputs, B and C before the convolution, then arguments of the steps. The
        output is multiplied by the SiLU of its gates, then RMS-normalized in groups.
        """
        wide = widened(projected)
        gates, channels, steps = wide.split((shape.inner, shape.channels, shape.heads), dim=-1)
        mixed = self.elementwise(F.silu, convolve(channels, tensors.conv, state.inputs, rows))
        x, b, c = mixed.split((shape.inner, *2 * (shape.groups * shape.state,)), dim=-1)
        x = x.unflatten(-1, (shape.heads, shape.head_dim))
        b, c = (it.unflatten(-1, (shape.groups, shape.state)) for it in (b, c))
        steps = self.elementwise(F.softplus, steps + widened(tensors.step))
        values, decays = x * steps.unsqueeze(-1), -widened(tensors.decay).exp() * steps
        found, each = x * widened(tensors.skip).unsqueeze(-1), shape.heads // shape.groups
        for tokens, slots in self._spans(rows):
            count, memory = (len(slots), -1), state.memory[slots].to(wide)
            own_c, own_b, value, decay = (
                it[tokens].unflatten(0, count) for it in (c, b, values, decays)
            )
            scan = scan_tokens if self.deterministic or value.shape[1] == 1 else scan_chunks
            own_c, own_b = (it.repeat_interleave(each, dim=2) for it in (own_c, own_b))
            read, memory = scan(own_c, own_b, value, decay, memory)
            state.memory[slots] = memory.to(state.memory)
            found[tokens] += read.flatten(0, 1)
        gated = found.flatten(1) * self.elementwise(F.silu, gates)
        groups = gated.unflatten(-1, (shape.norm_groups, -1))
        mean = self._each(lambda it: it.square().mean(-1, keepdim=True), groups)
        normed = (groups * torch.rsqrt(mean + eps)).flatten(1) * widened(tensors.norm)
        result: Tensor = normed.to(projected.dtype)
        return result

    def _spans(self, rows: RowSpans) -> Iterator[tuple[slice | Tensor, Tensor]]:
        """Yield the tokens and the slots of rows that run together.

        All rows with one token run together, and each longer row runs alone. If deterministic, each
        token runs alone.
        """
        starts, slots = rows.row_starts.tolist(), rows.slots.long()
        lengths = rows.row_starts.diff()
        single = (lengths == 1).nonzero().squeeze(1)
        if len(single) and not self.deterministic:
            yield rows.row_starts.long()[single], slots[single]
        for row, (start, stop) in enumerate(zip(starts, starts[1:], strict=False)):
            if self.deterministic:
                yield from ((slice(it, it + 1), slots[row : row + 1]) for it in range(start, stop))
            elif stop - start > 1:
                yield slice(start, stop), slots[row : row + 1]
