"""Replaces the `nn.Linear` and `Conv1D` layers of a network with our matmuls."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gptmanager.kernels.gemm.packed_matrix import PackedMatrix, Quantized
from gptmanager.kernels.reference import Kernels

# routers are not replaced, because a quantized router would choose other experts
_ROUTERS = re.compile(r".*(router|gate|gate\.wg|shared_expert_gate)")


class PackedLinear(nn.Module):
    """A linear layer that multiplies by a packed matrix."""

    bias: Tensor | None

    def __init__(self, matrix: PackedMatrix, bias: Tensor | None, kernels: Kernels) -> None:
        super().__init__()
        self.out_features, self.in_features = matrix.shape
        self.matrix = matrix
        self.register_buffer("bias", bias)
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., out]`: the matmul of `x` `[..., in]`, plus the bias."""
        found = self._kernels.linear(x.reshape(-1, x.shape[-1]), self.matrix, self.bias)
        return found.view(*x.shape[:-1], self.out_features)


def replace_linears(
    network: nn.Module,
    kernels: Kernels,
    kind_of: Callable[[str], Quantized | None],
    on_layer: Callable[[], None] = lambda: None,
    device: torch.device | str = "cpu",
) -> list[PackedMatrix]:
    """Replace all linear layers that the kernels pack, except routers; return the packed matrices.

    The packed matrices and their biases are on `device`; nothing else is moved there. `kind_of`
    maps the name of a module to the quantization of its matrix, None for no quantization.
    `on_layer` is called after each of `find_linears`.
    """
    matrices = []
    for name in find_linears(network):
        packed = _packed(network.get_submodule(name), kernels, kind_of(name), device)
        on_layer()
        if packed is not None:
            parent, _, own = name.rpartition(".")
            setattr(network.get_submodule(parent), own, packed)
            matrices.append(packed.matrix)
    return matrices


def find_linears(network: nn.Module) -> list[str]:
    """Return the names of the linear layers, except routers."""
    return [name for name, it in network.named_modules() if _is_linear(name, it)]


def _is_linear(name: str, module: nn.Module) -> bool:
    is_one = type(module) is nn.Linear or type(module).__name__ == "Conv1D"
    return is_one and not _ROUTERS.fullmatch(name)


def _packed(
    module: Any, kernels: Kernels, kind: Quantized | None, device: torch.device | str
) -> PackedLinear | None:
    """Return a layer with the matrix of `module`, packed; None if the kernels do not pack it."""
    weight = module.weight.detach()
    weight = weight if type(module) is nn.Linear else weight.t()
    rows, columns = weight.shape
    matrix = kernels.new_matrix(rows, columns, weight.dtype, kind, device)
    if matrix is None:
        return None
    # copied in pieces, because the quantization of rows needs temporary float32 arrays
    step = max(16, (1 << 20) // weight.shape[1] // 16 * 16)
    for start in range(0, len(weight), step):
        matrix.copy_(weight[start : start + step], start)
    bias = None if module.bias is None else module.bias.detach().to(device)
    return PackedLinear(matrix, bias, kernels)


def num_bytes(network: nn.Module, matrices: list[PackedMatrix]) -> int:
    """Return the size of all tensors and packed matrices in bytes. Tied tensors count once."""
    tensors = {it.data_ptr(): it.nbytes for it in [*network.parameters(), *network.buffers()]}
    return sum(tensors.values()) + sum(it.nbytes for it in matrices)
