"""Launchers of a mixture of experts: routing, sorting by expert, grouped matmuls, weighted sums.

The grids do not depend on which experts are chosen, so each replay of a CUDA graph may choose
different experts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gptmanager.cuda import activations
from gptmanager.cuda.device.launch import NAMES, Argument, Launcher, Program, check_tensors, ints
from gptmanager.cuda.gemm.byte_rows import ByteRows
from gptmanager.cuda.gemm.device_matrices import BYTES, scales_of, values_of
from gptmanager.kernels.activations.activation_kinds import Activation
from gptmanager.kernels.experts.mixture import ExpertMatrices
from gptmanager.kernels.experts.routing import Routing
from gptmanager.kernels.gemm.packed_matrix import Matrix, plain

MAX_EXPERTS, MAX_PER_TOKEN = 1024, 32  # equal to those in the .cu
SCORES = {"softmax": 0, "sigmoid": 1, "softmax_of_best": 2, "sigmoid_of_best": 3}
_THREADS, _WARPS, _COLUMNS, _DEPTH = 256, 4, 128, 64  # equal to those in the .cu
_STAGES = {1: 4, 4: 3}  # from M, which is a tile's rows / 32, to the number of pipeline stages
_NARROW = (torch.float16, torch.bfloat16)
_FUSED: tuple[Activation, ...] = ("silu", "gelu_tanh", "clamped_swiglu")
_EPILOGUES = ("false, SILU", *(f"true, {kind.upper()}" for kind in _FUSED))
PROGRAM = Program(
    "moe.cu",
    (
        "choose_experts",
        "sort_slots",
        *(
            f"mix_outputs<{name}, {width}>"
            for dtype, name in NAMES.items()
            for width in (16 // dtype.itemsize, 1)
        ),
        *(
            f"expert_columns<{name}, {kind}{weight}>"
            for weight in ("", *BYTES.values())
            for name in NAMES.values()
            for kind in _EPILOGUES
        ),
        *(
            f"expert_gemm<{NAMES[dtype]}, {m}, {stages}, {kind}{weight}>"
            for weight in ("", *BYTES.values())
            for dtype in _NARROW
            for m, stages in _STAGES.items()
            for kind in _EPILOGUES
        ),
    ),
    dependent=True,
)


class SortedSlots(NamedTuple):
    """Slots sorted by expert, int32 `[N]`, and their tiles, int32 `[n, 3]`: expert, first, last.

    Slot `t * per_token + i` is the i-th choice of token t. A tile has the sorted slots from `first`
    to `last` (excluded), at most `rows`. A tile of expert -1 has no work.
    """

    sorted: Tensor
    tiles: Tensor
    rows: int


def choose_experts(
    launcher: Launcher, logits: Tensor, routing: Routing, correction: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the experts int32 `[T, k]` of each token and their weights float32 `[T, k]`.

    `logits` `[T, E]` and `correction` `[E]` are float32, with the meaning that they have in
    `routing.choose_experts`. Of experts with equal scores, the first is chosen. Raises ValueError
    for other tensors, for more than MAX_EXPERTS experts, and for more than MAX_PER_TOKEN experts
    per token.
    """
    num_tokens, num_experts = logits.shape
    per_token = routing.per_token
    check_tensors(
        logits=(logits, (num_tokens, num_experts), torch.float32),
        correction=(correction, (num_experts,), torch.float32),
    )
    if num_experts > MAX_EXPERTS or per_token > min(num_experts, MAX_PER_TOKEN):
        raise ValueError(
            f"{per_token} of {num_experts} experts for a token: at most {MAX_PER_TOKEN} of "
            f"{MAX_EXPERTS} are supported"
        )
    chosen = torch.empty(num_tokens, per_token, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, per_token, device=logits.device)
    if num_tokens:
        sizes = num_experts, per_token, SCORES[routing.score], routing.groups, routing.top_groups
        flags = routing.group_score == "two_best", routing.renormalize
        arguments: tuple[Argument, ...] = (
            chosen,
            weights,
            logits,
            correction,
            *ints(*sizes, *flags),
            np.float32(routing.factor),
            np.float32(routing.sum_eps),
        )
        launcher.kernel(PROGRAM, "choose_experts")((num_tokens,), (32,), arguments)
    return chosen, weights


def sort_slots(launcher: Launcher, chosen: Tensor, first: int, count: int) -> SortedSlots:
    """Sort the slots of `chosen` int32 `[T, k]` by expert.

    Only slots of the experts `first` to `first + count` (excluded) are in tiles. The tiles number
    these experts from 0. Raises ValueError for other tensors, and if `count` exceeds MAX_EXPERTS.
    """
    check_tensors(chosen=(chosen, (None, None), torch.int32))
    if count > MAX_EXPERTS:
        raise ValueError(f"{count} experts: at most {MAX_EXPERTS} are supported")
    num_slots = chosen.numel()
    rows = 128 if num_slots >= 64 * count else 32
    max_tiles = min(num_slots, num_slots // rows + count)
    order = torch.empty(num_slots, dtype=torch.int32, device=chosen.device)
    tiles = torch.empty(max_tiles, 3, dtype=torch.int32, device=chosen.device)
    if num_slots:
        arguments: tuple[Argument, ...] = (
            order,
            tiles,
            chosen,
            *ints(num_slots, first, count, max_tiles, rows),
        )
        launcher.kernel(PROGRAM, "sort_slots")((1,), (MAX_EXPERTS,), arguments)
    return SortedSlots(order, tiles, rows)


def multiply(
    launcher: Launcher,
    x: Tensor,
    weight: Tensor | ByteRows,
    bias: Tensor | None,
    slots: SortedSlots,
    count: int,
    activation: Activation | None = None,
) -> Tensor:
    """Return `x[slot // n] @ weight[expert]^T + bias[expert]` for each slot, `[N, O]`.

    `x` is `[N / n, I]`: n slots share a row. `weight` `[count * O, I]` and `bias` `[count * O]`
    have one expert after another. All have the same dtype: float32, float16 or bfloat16; `weight`
    may have 8 bits. With an `activation` (silu, gelu_tanh or clamped_swiglu), each expert has 2 O
    rows: the rows of the gate, then the rows of up. The result is then `activation(gate) * up`,
    without rounding in between. The result is undefined for slots without a tile. Raises ValueError
    for other tensors.
    """
    num_slots, (num_rows, depth), dtype = len(slots.sorted), x.shape, x.dtype
    num_weights, values, scales = weight.shape[0], values_of(weight), scales_of(weight)
    check_tensors(
        x=(x, (num_rows, depth), dtype),
        weight=(values, (num_weights, depth), dtype if scales is None else values.dtype),
        scales=(scales, (num_weights,), torch.float32),
        bias=(bias, (num_weights,), dtype),
        sorted=(slots.sorted, (num_slots,), torch.int32),
        tiles=(slots.tiles, (None, 3), torch.int32),
    )
    parts = count * (1 if activation is None else 2)
    per_row = num_slots // num_rows if num_rows else 0
    if num_weights % parts or num_slots != num_rows * per_row:
        raise ValueError(
            f"the rows of the weight must be a multiple of {parts}, and the slots a multiple of "
            f"the {num_rows} rows of x, got {num_weights} and {num_slots}"
        )
    width = num_weights // parts
    out = x.new_empty(num_slots, width)
    if not out.numel():
        return out
    epilogue = "false, SILU" if activation is None else f"true, {activation.upper()}"
    epilogue += BYTES.get(values.dtype, "")
    given = (out, x, values, scales, bias, slots.sorted, slots.tiles)
    arguments: tuple[Argument, ...] = (*given, *ints(per_row, width, depth))
    is_aligned = all(own.data_ptr() % 16 == 0 for own in (x, values))
    if dtype not in _NARROW or depth * values.itemsize % 16 or not is_aligned:
        kernel = launcher.kernel(PROGRAM, f"expert_columns<{NAMES[dtype]}, {epilogue}>")
        kernel((len(slots.tiles), -(-width // _WARPS)), (32 * _WARPS,), arguments)
        return out
    m = slots.rows // 32
    shared = _STAGES[m] * (2 * slots.rows + values.itemsize * _COLUMNS) * _DEPTH
    name = f"expert_gemm<{NAMES[dtype]}, {m}, {_STAGES[m]}, {epilogue}>"
    columns = _COLUMNS if activation is None else _COLUMNS // 2
    grid = len(slots.tiles), -(-width // columns)
    launcher.kernel(PROGRAM, name, shared)(grid, (_THREADS,), arguments, shared)
    return out


def mix_outputs(
    launcher: Launcher, outputs: Tensor, chosen: Tensor, weights: Tensor, first: int, count: int
) -> Tensor:
    """Return the weighted sums `[T, C]` of the `outputs` `[T * k, C]` of each token's slots.

    A sum has only the outputs of the experts `first` to `first + count` (excluded). Raises
    ValueError for other tensors.
    """
    num_tokens, per_token = chosen.shape
    width = outputs.shape[1]
    check_tensors(
        outputs=(outputs, (num_tokens * per_token, width), outputs.dtype),
        chosen=(chosen, (num_tokens, per_token), torch.int32),
        weights=(weights, (num_tokens, per_token), torch.float32),
    )
    out = outputs.new_empty(num_tokens, width)
    if not out.numel():
        return out
    vector = 1 if width * outputs.itemsize % 16 else 16 // outputs.itemsize
    name = f"mix_outputs<{NAMES[outputs.dtype]}, {vector}>"
    arguments: tuple[Argument, ...] = (
        out,
        outputs,
        chosen,
        weights,
        *ints(per_token, first, count, width),
    )
    grid = num_tokens, -(-width // (128 * vector))
    launcher.kernel(PROGRAM, name)(grid, (128,), arguments)
    return out


def experts(
    launcher: Launcher,
    x: Tensor,
    logits: Tensor,
    correction: Tensor | None,
    routing: Routing,
    own: ExpertMatrices,
) -> Tensor:
    """Compute `Kernels.experts`, without waiting for the device."""
    wide = None if correction is None else correction.float()
    chosen, weights = choose_experts(launcher, logits.float(), routing, wide)
    return mix_experts(launcher, *own.prepared(x, routing, chosen, weights), own)


def mix_experts(
    launcher: Launcher, x: Tensor, chosen: Tensor, weights: Tensor, own: ExpertMatrices
) -> Tensor:
    """Compute `Kernels.mix_experts`, without waiting for the device. Sums are float32."""
    chosen, weights = chosen.int().contiguous(), weights.float().contiguous()
    slots = sort_slots(launcher, chosen, own.first, own.count)
    rows, up, down = x.to(own.up.dtype).contiguous(), _readable(own.up), _readable(own.down)
    fuses = own.gated and own.activation in _FUSED
    kind = own.activation if fuses else None
    hidden = multiply(launcher, rows, up, own.up_bias, slots, own.count, kind)
    if not fuses and own.gated:
        activated = hidden.new_empty(len(hidden), hidden.shape[1] // 2)
        activations.activate_gated(launcher, activated, hidden, own.activation)
        hidden = activated
    elif not fuses:
        activations.activate(launcher, hidden, hidden, own.activation)
    outputs = multiply(launcher, hidden, down, own.down_bias, slots, own.count)
    given = outputs, chosen, weights, own.first, own.count
    return mix_outputs(launcher, *given).to(x.dtype)


def _readable(matrix: Matrix) -> Tensor | ByteRows:
    """Return the matrix in a form that `multiply` reads."""
    return matrix if isinstance(matrix, ByteRows) else plain(matrix)
