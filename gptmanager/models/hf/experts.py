"""Replaces the experts of a network with ours.

transformers has an interface for functions that compute experts. Modules that use this interface
describe their weights in attributes, which `_Layout` reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from gptmanager.kernels.activations.activation_kinds import Activation, activate, activate_gated
from gptmanager.kernels.experts.mixture import ExpertMatrices
from gptmanager.kernels.gemm.packed_matrix import Matrix, PackedMatrix, Quantized
from gptmanager.kernels.reference import Kernels

_ATTRIBUTES = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate")
# Values for which activations are compared. The largest ones are beyond the limits of any clamp.
_SAMPLES = (-1e4, -90.0, -8.5, -3.0, -1.3, -0.4, 0.0, 0.2, 0.9, 1.7, 4.0, 7.5, 12.0, 90.0, 1e4)


class OwnExperts(nn.Module):
    """The experts of a layer, computed by our kernels. Its call is that of transformers' modules.

    Buffers refer to all plain tensors of `experts`, so that the network's size includes them.
    """

    up_bias: Tensor | None
    down_bias: Tensor | None

    def __init__(self, experts: ExpertMatrices, kernels: Kernels) -> None:
        super().__init__()
        self.experts, self._kernels = experts, kernels
        for name in ("up", "up_bias", "down", "down_bias"):
            own = getattr(experts, name)
            self.register_buffer(name, None if isinstance(own, PackedMatrix) else own)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sums `[T, C]` of the chosen experts `[T, k]` for tokens `[T, C]`."""
        return self._kernels.mix_experts(hidden_states, top_k_index, top_k_weights, self.experts)


class _Layout(NamedTuple):
    """The weights of experts in transformers, and what `ExpertMatrices` needs to know of them.

    `up` is `[E, U, C]` and `down` is `[E, C, F]` or, if `transposed`, `[E, C, U]` and `[E, F, C]`.
    If `interleaved`, the rows of gate and up alternate.
    """

    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    activation: Activation
    gated: bool
    transposed: bool
    interleaved: bool

    @property
    def is_consistent(self) -> bool:
        """Whether all tensors have the shapes of the layout, and one dtype."""
        if self.up.dim() != 3:
            return False
        count, width, hidden = (self.up.mT if self.transposed else self.up).shape
        down = count, hidden, width // 2 if self.gated else width
        expected = (
            (self.down.mT if self.transposed else self.down, down),
            (self.up_bias, (count, width)),
            (self.down_bias, (count, hidden)),
        )
        return not (self.gated and width % 2) and all(
            it is None or (it.shape == shape and it.dtype is self.up.dtype)
            for it, shape in expected
        )

    def up_rows(self, rows: Tensor) -> Tensor:
        """Return the rows of an expert's gate, then those of its up projection."""
        return torch.cat((rows[::2], rows[1::2])) if self.interleaved else rows


def replace_experts(
    network: nn.Module,
    kernels: Kernels,
    kind_of: Callable[[str], Quantized | None],
    on_layer: Callable[[], None] = lambda: None,
    device: torch.device | str = "cpu",
) -> list[PackedMatrix]:
    """Replace the experts that the kernels can compute at once; return their packed matrices.

    The matrices and their biases are on `device`. `kind_of` maps the name of a module to the
    quantization of its matrices, None for no quantization. Experts are not quantized in formats
    that the kernels do not have for experts. `on_layer` is called after each of `find_experts`.
    """
    matrices: list[PackedMatrix] = []
    for name in find_experts(network):
        layout = _layout_of(network.get_submodule(name))
        kind = kind_of(name)
        kind = kind if kind in kernels.expert_kinds else None
        own = None if layout is None else _copied(layout, kernels, kind, device)
        if own is not None:
            parent, _, last = name.rpartition(".")
            setattr(network.get_submodule(parent), last, OwnExperts(own, kernels))
            matrices += (it for it in (own.up, own.down) if isinstance(it, PackedMatrix))
        on_layer()
    return matrices


def find_experts(network: nn.Module) -> list[str]:
    """Return the names of the modules of experts that use transformers' interface."""
    return [
        name
        for name, module in network.named_modules()
        if all(hasattr(module, it) for it in _ATTRIBUTES)
    ]


def _layout_of(module: Any) -> _Layout | None:
    """Return the weights of a module of experts, or None if we do not have its computation."""
    prefix = "gate_up_proj" if module.has_gate else "up_proj"
    names = prefix, f"{prefix}_bias", "down_proj", "down_proj_bias"
    up, up_bias, down, down_bias = (getattr(module, name, None) for name in names)
    activation = _activation_of(module)
    has_biases = [it is not None for it in (up_bias, down_bias)]
    if up is None or down is None or activation is None or has_biases != [module.has_bias] * 2:
        return None
    interleaved = module.has_gate and not module.is_concatenated
    kind = activation, module.has_gate, module.is_transposed, interleaved
    layout = _Layout(up, up_bias, down, down_bias, *kind)
    return layout if layout.is_consistent else None


def _activation_of(module: Any) -> Activation | None:
    """Return the activation of experts, recognized by its results; None if it is another one."""
    samples = torch.tensor(_SAMPLES, dtype=torch.float64)
    gate, up = (it.flatten() for it in torch.meshgrid(samples, samples, indexing="ij"))
    try:
        if module.has_gate:
            rows = torch.stack((gate, up), dim=0 if module.is_concatenated else -1)
            found = module._apply_gate(rows.view(1, -1))[0]
        else:
            found = module.act_fn(gate)
    except Exception:  # the code of an architecture may raise any error for a width of its own
        return None
    names: tuple[Activation, ...] = get_args(Activation)
    for name in names:
        if module.has_gate:
            expected = activate_gated(gate, up, name)
        elif name != "clamped_swiglu":
            expected = activate(gate, name)
        else:
            continue
        if found.shape == expected.shape and torch.allclose(found, expected, 1e-6, 1e-9):
            return name
    return None


def _copied(
    layout: _Layout, kernels: Kernels, kind: Quantized | None, device: torch.device | str
) -> ExpertMatrices | None:
    """Return matrices for our kernels; None if the kernels cannot compute these experts at once."""
    ups, downs = (it.detach() for it in (layout.up, layout.down))
    if layout.transposed:
        ups, downs = ups.mT, downs.mT
    count, width, hidden = ups.shape
    kinds = ups.dtype, kind, device
    up = kernels.new_expert_matrix(count, width, hidden, *kinds)
    down = kernels.new_expert_matrix(count, hidden, downs.shape[2], *kinds)
    if up is None or down is None:
        return None
    for number, (of_up, of_down) in enumerate(zip(ups, downs, strict=True)):
        _write(up, layout.up_rows(of_up), number)
        _write(down, of_down, number)
    up_bias, down_bias = layout.up_bias, layout.down_bias
    if up_bias is not None and down_bias is not None:
        up_bias = torch.cat([layout.up_rows(it) for it in up_bias.detach()]).to(device)
        down_bias = down_bias.detach().flatten().to(device)
    own = up, up_bias, down, down_bias, layout.activation, layout.gated
    return ExpertMatrices(*own, first=0, count=count)


def _write(matrix: Matrix, rows: Tensor, number: int) -> None:
    """Write the rows of the expert `number`. Each expert has as many rows."""
    first = number * len(rows)
    if isinstance(matrix, PackedMatrix):
        matrix.copy_(rows, first)
    else:
        matrix[first : first + len(rows)].copy_(rows)
