"""GEMM of up to 256 rows with a weight matrix, which is read once.

`MatmulPlan` describes how the GEMM is divided among thread blocks. `matmul_choice` decides when to
use this GEMM instead of the matmul of torch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gptmanager.cuda.device.launch import NAMES, Launcher, Program, check_tensors, ints
from gptmanager.cuda.gemm import gemv
from gptmanager.cuda.gemm.byte_rows import ByteRows
from gptmanager.cuda.gemm.device_matrices import BYTES, scales_of, values_of

_DTYPES = (torch.float16, torch.bfloat16)
_THREADS, _DEPTH = 256, 64  # equal to those in the .cu
_RESERVED_BYTES = 1024  # shared memory that CUDA reserves for each block
# The cost model's rates at which a multiprocessor reads from L2. The unit is the rate at which a
# multiprocessor reads from memory while all multiprocessors read from memory.
_FROM_L2 = 1.3  # while all other multiprocessors read from L2
_ALONE = 3.3  # while the other multiprocessors do not read
# How long the blocks of a tile take to find out which of them is the last to finish: the number of
# bytes that a multiprocessor could read from memory in this time.
_MEETING = 400 * 128


class _Kind(NamedTuple):
    """The size arguments of a kernel's template, in order, and whether the weight has 8 bits.

    A tile of the result is computed from 32 * `m` rows of x and 32 * `n` rows of the weight. A
    round multiplies `_DEPTH` columns of both. Shared memory has space for `stages` rounds.
    """

    m: int
    n: int
    stages: int
    resident: int  # blocks per multiprocessor for which there are enough registers
    in_bytes: bool = False  # the weight has 8-bit elements

    def name(self, dtype: torch.dtype, silu: bool, weight: str = "") -> str:
        """Return the kernel's name. `weight` is a value of BYTES for a weight in 8 bits."""
        numbers = ", ".join(map(str, self[:4]))
        return f"gemm<{NAMES[dtype]}, {numbers}, {str(silu).lower()}{weight}>"

    @property
    def rows(self) -> int:
        return 32 * self.m

    @property
    def weights(self) -> int:
        return 32 * self.n

    @property
    def weight_bytes(self) -> int:
        """The number of bytes of the weight that a round reads."""
        return self.weights * _DEPTH * (1 if self.in_bytes else 2)

    @property
    def round_bytes(self) -> int:
        return self.rows * _DEPTH * 2 + self.weight_bytes

    @property
    def shared_bytes(self) -> int:
        return self.stages * self.round_bytes


_FLOAT_KINDS = (  # need up to 160 KiB of shared memory; GPUs have 99, 163 or 227 KiB per block
    _Kind(1, 4, 4, 2),
    _Kind(2, 4, 4, 2),
    _Kind(2, 8, 4, 1),
    _Kind(4, 4, 3, 2),
    _Kind(4, 8, 3, 1),
    _Kind(8, 4, 3, 1),
)
# With weights in 8 bits, a block of the fourth kind needs more than half of the registers.
_BYTE_KINDS = tuple(
    kind._replace(in_bytes=True, resident=1 if kind.m == 4 else kind.resident)
    for kind in _FLOAT_KINDS
)
_KINDS = _FLOAT_KINDS + _BYTE_KINDS
PROGRAM = Program(
    "gemm/gemm.cu",
    tuple(
        kind.name(dtype, silu, weight)
        for dtype in _DTYPES
        for kind in _KINDS
        for silu in (False, True)
        for weight in (BYTES.values() if kind.in_bytes else ("",))
    ),
    dependent=True,
    at_once=1,  # each takes long to compile, and a model needs few of them
)


class MatmulPlan(NamedTuple):
    """How a matmul is divided among blocks, all of which run at the same time.

    Each tile of the result takes `rounds` rounds (see `_Kind`). The rounds of all tiles are
    numbered, and block b computes `share` of them, from round `b * share` on.
    """

    kind: _Kind
    num_tiles: int
    rounds: int
    share: int

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tiles * self.rounds // self.share)

    @property
    def blocks_of_a_tile(self) -> int:
        """Return the largest number of blocks that share a tile."""
        if self.share % self.rounds == 0:
            return 1
        most, rest = divmod(self.rounds, self.share)
        return most if rest == 0 else most + 1 + (rest > 1 and self.num_tiles > 1)


def covers(launcher: Launcher, x: Tensor, weight: Tensor | ByteRows) -> bool:
    """Return whether `gemm` supports the tensors.

    `x` must have 16-bit elements, and at most 256 rows, or 128 on GPUs with little shared memory.
    The rows of both must be multiples of 16 bytes, aligned to 16 bytes.
    """
    fits = weight.dtype in _DTYPES and gemv.covers(x, weight)
    return fits and len(x) <= most_rows(launcher.max_shared_mem, isinstance(weight, ByteRows))


def new_counters(launcher: Launcher, device: torch.device) -> Tensor:
    """Return the argument `arrived` of `gemm`. Launches on one stream may share it."""
    most = max(kind.resident for kind in _KINDS) * launcher.num_multiprocessors
    return torch.zeros(most, dtype=torch.int32, device=device)


def gemm(
    launcher: Launcher,
    out: Tensor,
    x: Tensor,
    weight: Tensor | ByteRows,
    bias: Tensor | None = None,
    *,
    arrived: Tensor,
    silu: bool = False,
) -> None:
    """Compute `out [T, O] = x [T, I] @ weight [O, I]^T + bias [O]`, in float16 or bfloat16.

    For `ByteRows`, the stored values are multiplied, and each sum is then multiplied by the scale
    of its weight row. With `silu`, `weight [2O, I]` contains the rows of the gate, then the rows of
    the up projection, and `out [T, O] = silu(gate) * up`. Sums are float32, and rounded once, at
    the end. The bits of a row of `out` do not depend on the other rows. They depend on T only
    through its range: 1 to 32, 33 to 64, 65 to 128, or 129 to 256; T is at most 256. Rows of
    `weight` must be a multiple of 16 bytes. `arrived` is from `new_counters`, and zero before and
    after each launch. Raises ValueError for other tensors.
    """
    num_rows, width = out.shape
    depth, dtype, num_weights = x.shape[1], out.dtype, (1 + silu) * width
    values, scales = values_of(weight), scales_of(weight)
    in_bytes = scales is not None
    check_tensors(
        out=(out, (num_rows, width), dtype),
        x=(x, (num_rows, depth), dtype),
        weight=(values, (num_weights, depth), values.dtype if in_bytes else dtype),
        scales=(scales, (num_weights,), torch.float32),
        bias=(bias, (num_weights,), dtype),
        arrived=(arrived, (None,), torch.int32),
    )
    if not covers(launcher, x, weight):
        raise ValueError(f"{num_rows} rows of {depth} {dtype} are not covered")
    if out.numel() == 0:
        return
    plan = plan_matmul(launcher, num_rows, width, depth, silu, in_bytes)
    kind, partial = plan.kind, None
    if plan.blocks_of_a_tile > 1:
        num_sums = 2 * plan.num_blocks * kind.rows * kind.weights
        partial = torch.empty(num_sums, dtype=torch.float32, device=x.device)
    name = kind.name(dtype, silu, BYTES.get(values.dtype, ""))
    kernel = launcher.kernel(PROGRAM, name, kind.shared_bytes)
    arguments = (out, partial, arrived, x, values, scales, bias)
    sizes = ints(num_rows, width, depth, plan.share)
    kernel((plan.num_blocks,), (_THREADS,), (*arguments, *sizes), kind.shared_bytes)


def plan_matmul(
    launcher: Launcher,
    num_rows: int,
    width: int,
    depth: int,
    silu: bool = False,
    in_bytes: bool = False,
) -> MatmulPlan:
    """Return the plan of a matmul with `width` columns.

    The plan depends on the number of rows only through the choice of the tile's height.
    """
    rows = next(kind.rows for kind in _KINDS if num_rows <= kind.rows)
    sizes = width, depth, silu, in_bytes
    return _plan(rows, *sizes, launcher.num_multiprocessors, launcher.max_shared_mem)


@functools.cache  # called at each launch, but with few different arguments
def _plan(
    rows: int,
    width: int,
    depth: int,
    silu: bool,
    in_bytes: bool,
    multiprocessors: int,
    max_shared_mem: int,
) -> MatmulPlan:
    plans = [
        plan
        for kind in _KINDS
        if kind.in_bytes is in_bytes and kind.rows == rows and kind.shared_bytes <= max_shared_mem
        for plan in _plans(kind, width, depth, silu, multiprocessors, max_shared_mem)
    ]
    return min(plans, key=lambda plan: _cost(plan, multiprocessors))


def _plans(
    kind: _Kind, width: int, depth: int, silu: bool, multiprocessors: int, max_shared_mem: int
) -> Iterator[MatmulPlan]:
    """Yield plans with one block per multiprocessor, and with as many blocks as can be resident.

    If at least as many blocks can be resident as there are tiles, also yield plans that divide the
    rounds of each tile into equal shares.
    """
    of_block = kind.shared_bytes + _RESERVED_BYTES
    resident = min(kind.resident, (max_shared_mem + _RESERVED_BYTES) // of_block)
    places = multiprocessors * resident
    num_tiles = -(-width * (1 + silu) // kind.weights)
    rounds = -(-depth // _DEPTH)
    total = num_tiles * rounds
    shares = {-(-total // count) for count in (multiprocessors, places)}
    shares |= {-(-rounds // parts) for parts in range(1, places // num_tiles + 1)}
    for share in sorted(shares):
        yield MatmulPlan(kind, num_tiles, rounds, share)


def _cost(plan: MatmulPlan, multiprocessors: int) -> float:
    """Estimate a plan's time, in bytes that a multiprocessor could read from memory meanwhile."""
    kind, meeting = plan.kind, 0.0
    of_round = max(kind.weight_bytes, kind.round_bytes / _FROM_L2)
    if plan.blocks_of_a_tile > 1:  # each block writes its sums, and the last one reads all of them
        sums = kind.rows * kind.weights * 4 / _ALONE
        meeting = _MEETING + (1 + plan.blocks_of_a_tile) * sums
    return (plan.share * of_round + meeting) * max(1, plan.num_blocks / multiprocessors)


def most_rows(max_shared_mem: int, in_bytes: bool) -> int:
    """Return the largest number of rows that `gemm` supports."""
    own = (kind for kind in _KINDS if kind.in_bytes is in_bytes)
    return max(kind.rows for kind in own if kind.shared_bytes <= max_shared_mem)
