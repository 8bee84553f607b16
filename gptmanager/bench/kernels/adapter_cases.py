"""Kernel benchmark cases for LoRA: a generation step with many adapters.

All adapters have the same number of adjacent rows, so that torch can compute them with batched
matmuls.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gptmanager.bench.kernels.cases import (
    Case,
    Goal,
    Prepared,
    Rig,
    Sizes,
    largest_error,
    tolerance,
)
from gptmanager.cuda.gemm.lora import add_adapters
from gptmanager.kernels.lora.adapter_arguments import AdapterModule, StepAdapters

_TIMES_ROOFLINE = 1.3
_MODULES = {"Q, K, V": 3, "output": 1}  # name -> number of modules, each as wide as the model


def adapter_cases(sizes: Sizes) -> list[Case]:
    """Return a case for each entry of `_MODULES` and each rank."""
    return [
        _case(sizes, name, number, rank)
        for name, number in _MODULES.items()
        for rank in sizes.adapters.ranks
    ]


def _case(sizes: Sizes, name: str, num_modules: int, rank: int) -> Case:
    rows, hidden = sizes.rows, sizes.adapters.hidden
    weights = sizes.adapters.number * num_modules * rank * 2 * hidden
    return Case(
        "adapters",
        f"{name} of rank {rank}, {rows} x {hidden} over {sizes.adapters.number}",
        (weights + rows * hidden + 2 * rows * num_modules * hidden) * sizes.dtype.itemsize,
        partial(_prepare, num_modules, rank),
        2 * rows * num_modules * rank * 2 * hidden,
        (Goal("roofline", _TIMES_ROOFLINE),),
        quick=rank == sizes.adapters.ranks[0],
    )


def _prepare(num_modules: int, rank: int, rig: Rig) -> Prepared:
    """Prepare several sets of weights. Each set has the weights of all adapters in one layer."""
    sizes = rig.sizes
    rows, hidden, num_adapters = sizes.rows, sizes.adapters.hidden, sizes.adapters.number
    size, scale = 2 * rank * hidden, (rank * hidden) ** -0.25
    shape = num_adapters, num_modules, size
    sets = torch.stack(rig.sets(sizes.dtype.itemsize * shape[0] * shape[1] * size, *shape))
    pool, num_sets = (sets * scale).flatten(), len(sets)
    starts = size * torch.arange(len(pool) // size, device=rig.device)
    places = starts.view(num_sets, num_adapters, num_modules).transpose(0, 1)
    table = torch.stack((places, torch.full_like(places, rank)), dim=-1).contiguous()
    modules = tuple(AdapterModule(n, n * hidden, hidden, hidden) for n in range(num_modules))
    slots = rig.ints([row * num_adapters // rows for row in range(rows)])
    adapters = StepAdapters(pool, slots, table, {"all": modules}, rank)
    x, before = rig.randn(rows, hidden), rig.randn(rows, num_modules * hidden)
    own, other = before.clone(), before.clone()

    def ours(number: int) -> Tensor:
        add_adapters(rig.launcher, own, x, adapters, number, modules)
        return own

    weights = pool.view(num_sets, num_adapters, num_modules, size)
    a = weights[..., : rank * hidden].unflatten(-1, (rank, hidden)).flatten(2, 3).contiguous()
    b = weights[..., rank * hidden :].unflatten(-1, (hidden, rank)).mT.contiguous()

    def add(result: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Add the adapters' outputs to `result`. One batched matmul with `a` serves all modules."""
        inner = torch.bmm(x.view(num_adapters, -1, hidden), a.mT)
        for n in range(num_modules):
            columns = result[:, n * hidden : (n + 1) * hidden].view(num_adapters, -1, hidden)
            columns.baddbmm_(inner[..., n * rank : (n + 1) * rank], b[:, n])
        return result

    expected = add(before.float(), x.float(), a[0].float(), b[0].float())
    peers = {"torch": lambda: lambda number: add(other, x, a[number], b[number])}
    return Prepared(num_sets, ours, largest_error(expected), tolerance(sizes.dtype), peers)
