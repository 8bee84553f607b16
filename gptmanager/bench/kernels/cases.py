"""`Case`: a case of the kernel benchmark, with its minimal work, contenders and goals.

This module is independent of kernels. Preparing a case on a `Rig` creates several sets of inputs,
which together usually exceed the L2 cache. A contender is a function that runs on one of the sets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gptmanager.bench.roofline import Ceilings
from gptmanager.bench.timing import Spread
from gptmanager.cuda.device.launch import Launcher
from gptmanager.kernels.recurrent.delta_formulas import DeltaShape
from gptmanager.kernels.recurrent.state_space_formulas import StateSpaceShape

OURS = "gptmanager"
Contender = Callable[[int], Tensor]  # index of the set of inputs -> result
_MAX_SETS = 64


@dataclass(frozen=True, eq=False)
class Planned:
    """A contender with a plan that the host makes once per step. Planning is timed separately."""

    run: Contender
    plan: Callable[[], object]

    def __call__(self, number: int) -> Tensor:
        return self.run(number)


class Absent(Exception):
    """A peer, or the device, cannot run a case. The message is the reason."""


class Decoder(NamedTuple):
    """The sizes of the matrices of a Llama with as many query columns as hidden columns."""

    name: str
    hidden: int
    qkv: int
    ffn: int
    vocab_size: int


class Adapters(NamedTuple):
    """The number of adapters in a step, the model's width, and the ranks that are timed."""

    number: int = 64
    hidden: int = 1024
    ranks: tuple[int, ...] = (8, 64)


class Mixture(NamedTuple):
    """A layer's experts: the model's width, the width and the number of the experts, the number of
    experts that a token chooses, and the numbers of tokens that are timed.
    """

    hidden: int = 2048
    width: int = 768
    number: int = 128
    per_token: int = 8
    tokens: tuple[int, ...] = (1, 32, 256, 4096)


class OtherLayers(NamedTuple):
    """The sizes of layers that Llamas do not have: experts, a gated delta rule, and Mamba-2."""

    mixture: Mixture = Mixture()
    delta: DeltaShape = DeltaShape(16, 32, 128, 128, 4)
    state_space: StateSpaceShape = StateSpaceShape(128, 64, 128, 1, 4)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of all cases.

    The defaults are the sizes of Llama-3.1-8B, with batches for a large GPU. Matmuls also run with
    the sizes of Qwen2.5-0.5B. Experts have the sizes of Qwen3-30B-A3B, the delta rule those of
    Qwen3-Next, and Mamba-2 those of Granite 4.0-H Small. The model's width for LoRA is
    `adapters.hidden`.
    """

    dtype: torch.dtype = torch.bfloat16
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 4096
    ffn: int = 14336
    vocab_size: int = 128256
    rows: int = 256  # the number of sequences in a large generation step
    tokens: int = 8192  # the number of tokens in a large context step
    batch: int = 32
    context: int = 4096
    chunk: int = 512
    tokens_per_block: int = 64
    other_blocks: tuple[int, ...] = (16, 32)
    copied_blocks: int = 32
    num_layers: int = 32
    decoders: tuple[Decoder, ...] = (
        Decoder("0.5B", 896, 1152, 4864, 151936),
        Decoder("8B", 4096, 6144, 14336, 128256),
    )
    matmul_rows: tuple[int, ...] = (1, 4, 16, 64, 256)  # rows of x in matmuls of generation steps
    adapters: Adapters = Adapters()
    others: OtherLayers = OtherLayers()


@dataclass(frozen=True, eq=False)
class Rig:
    """The device, launcher and sizes that cases run with.

    `cache_bytes` is the size of the device's L2 cache; 0 means one set of inputs per case. It
    determines how many sets a case has, so that calls do not find their inputs in the cache.
    """

    device: torch.device
    launcher: Launcher
    sizes: Sizes = field(default_factory=Sizes)
    cache_bytes: int = 60 << 20
    free_bytes: Callable[[], int] | None = None  # returns the free memory of the device

    def num_sets(self, set_bytes: int) -> int:
        """Return the number of input sets of a case; each call of a contender uses the next set.

        `set_bytes`: the number of bytes that a call accesses.
        """
        if self.cache_bytes == 0:
            return 1
        return max(2, min(_MAX_SETS, -(-3 * self.cache_bytes // max(1, set_bytes))))

    def randn(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        """Return normal random numbers, in the cases' dtype by default."""
        values = torch.randn(shape, device=self.device) * scale
        return values.to(dtype or self.sizes.dtype)

    def sets(
        self, set_bytes: int, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0
    ) -> list[Tensor]:
        """Return `num_sets(set_bytes)` tensors of random numbers, each as from `randn`."""
        count = self.num_sets(set_bytes)
        return [self.randn(*shape, dtype=dtype, scale=scale) for _ in range(count)]

    def records(self, records: Sequence[Any], dtype: np.dtype[Any]) -> Tensor:
        """Return `records` on the device: row i has the bytes of record i as `dtype`."""
        table = np.array(records, dtype=dtype).view(np.uint8).reshape(len(records), -1)
        return torch.from_numpy(table).to(self.device)

    def ints(self, values: object) -> Tensor:
        """Return `values` on the device, as int32."""
        return torch.as_tensor(values, dtype=torch.int32).to(self.device)


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal relative to a rate or time measured in the same run, so that it applies to any GPU.

    "copy": at least `value` times the bandwidth of a copy. "matmul": at least `value` times the
    rate of a large matmul. "times": at most `value` times the time of the case `of`. "peer": at
    most `value` times the time of the peer `of`. "roofline": at most `value` times
    `Ceilings.floor_s`.
    """

    kind: Literal["copy", "matmul", "times", "peer", "roofline"]
    value: float
    of: str = ""

    @property
    def text(self) -> str:
        return {
            "copy": f">= {self.value:.0%} of copy",
            "matmul": f">= {self.value:.0%} of matmul",
            "times": f"<= {self.value:g} x {self.of}",
            "peer": f"<= {self.value:g} x {self.of}",
            "roofline": f"<= {self.value:g} x roofline",
        }[self.kind]

    def is_met(self, case: Case, spread: Spread, ceilings: Ceilings, other_s: float | None) -> bool:
        """Return whether the median of `spread` meets the goal.

        `other_s`: the median time, in seconds, of the case or peer `of`. If `other_s` is None, a
        goal relative to a case or peer is not met.
        """
        if self.kind == "copy":
            return case.num_bytes / spread.median >= self.value * ceilings.copy_bytes_per_s
        if self.kind == "matmul":
            return case.flops / spread.median >= self.value * ceilings.matmul_flops_per_s
        if self.kind == "roofline":
            return spread.median <= self.value * ceilings.floor_s(case.num_bytes, case.flops)
        return other_s is not None and spread.median <= self.value * other_s


@dataclass(frozen=True, eq=False)
class Prepared:
    """A case with its inputs. A contender that writes to its inputs has its own copy of them.

    `error` rates a result for set 0: 0 is exact, more than `tolerance` is wrong. `peers`: name -> a
    function that returns the peer's contender, or raises an exception if the peer cannot run.
    """

    num_sets: int
    ours: Contender
    error: Callable[[Tensor], float]
    tolerance: float
    peers: Mapping[str, Callable[[], Contender]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Case:
    """A case with its minimal work: `num_bytes` to read and write, `flops` to compute."""

    part: str
    name: str
    num_bytes: int
    prepare: Callable[[Rig], Prepared]
    flops: int = 0
    goals: tuple[Goal, ...] = ()
    quick: bool = True  # also runs with --quick


def largest_error(expected: Tensor) -> Callable[[Tensor], float]:
    """Return a function that rates a result by its worst row: the row's largest difference from
    `expected`, divided by the row's largest absolute value in `expected`.
    """
    rows = expected.flatten(1).float()
    scale = rows.abs().amax(1).clamp_min(1e-20)

    def error(result: Tensor) -> float:
        difference = (result.flatten(1).float() - rows).abs().amax(1)
        worst = (difference / scale).max().item()
        return float(worst) if worst == worst else float("inf")

    return error


def tolerance(dtype: torch.dtype) -> float:
    """Return the `largest_error` that rounding inputs, weights and results to `dtype` may cause."""
    return {torch.float32: 2e-5, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-6}[dtype]
