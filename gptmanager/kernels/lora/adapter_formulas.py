"""LoRA in torch: adds the outputs of adapters to a matrix's output for the tokens of a step."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gptmanager.kernels.attention.paged_formulas import widened
from gptmanager.kernels.lora.adapter_arguments import StepAdapters


def add_outputs(
    linear: Callable[[Tensor, Tensor], Tensor],
    result: Tensor,
    x: Tensor,
    adapters: StepAdapters,
    layer: int,
    matrix: str,
) -> None:
    """Compute `Kernels.add_adapters`, one adapter at a time; `linear` computes the matmuls."""
    modules, slots = adapters.layout.get(matrix, ()), adapters.rows.tolist()
    for slot in sorted({*slots} - {-1}):
        tokens = (adapters.rows == slot).nonzero().squeeze(1)
        entries = adapters.table[slot, layer].tolist()
        own, total = widened(x[tokens]), widened(result[tokens])
        for index, first, columns, width in modules:
            offset, rank = entries[index]
            if rank:
                middle, end = offset + rank * width, offset + rank * (width + columns)
                a, b = widened(adapters.pool[offset:middle]), widened(adapters.pool[middle:end])
                inner = linear(own, a.view(rank, width))
                total[:, first : first + columns] += linear(inner, b.view(-1, rank))
        result[tokens] = total.to(result.dtype)
