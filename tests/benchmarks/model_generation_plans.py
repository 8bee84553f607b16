"""A model of generation attention on a GPU, so that plans are compared without one.

    python tests/benchmarks/model_generation_plans.py

prints the share of copy bandwidth of the default plan and of plans with a fixed stretch. It is a
model and no measurement: processor sharing among the blocks that have a place.

- A block waits until a place is free, in the order of the grid. It then works off its items.
- An item first finds its pages (`START_US`), a chain of dependent loads.
- Blocks that read share the card's bandwidth evenly, in proportion to the speed of their places.
  None gets more than the bytes that it has on their way, once in `TRIP_US`.
- An item of a row with several writes its result and counts it (`WRITE_US`). The last of the row
  reads all: loads in flight together take `LOAD_US`, for `MERGED_AT_ONCE` results and once more for
  each 32 logarithms.

It leaves out the launch, limits of one multiprocessor, the time of computing, and noise.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from gptmanager.cuda.attention.generation_attention import resident_blocks
from gptmanager.cuda.attention.generation_plan import GenerationPlan, Places, plan_generation
from gptmanager.kernels.attention.attention_arguments import AttentionShape

# Assumed, not measured: 0.5 us for a load, and five of them for the chain of block_starts, items,
# slots, the block table and the first tile. A trip is a load and the products of a tile.
START_US = 2.5
TRIP_US = 0.75
WRITE_US = 1.0
LOAD_US = 0.7
MERGED_AT_ONCE = 16  # as PartialSum in partials.cuh, for heads of 128


@dataclass(frozen=True)
class Card:
    """`copy` in bytes a microsecond: read and written, by a copy within the card's memory."""

    name: str
    multiprocessors: int
    copy: float
    max_shared_mem: int = 227 << 10


H200 = Card("H200", 132, 4.3e6)  # measured with torch's copy
H100_PCIE = Card("H100 PCIe", 114, 1.8e6)  # nine tenths of the 2.0 TB/s in its data sheet


@dataclass
class Run:
    """A plan's blocks on their way: what is common to all is `clock`, and how far a place of speed
    1 has come, in bytes.
    """

    rate: float  # bytes a microsecond that one block gets at most
    copy: float
    clock: float = 0.0
    progress: float = 0.0
    speed: float = 0.0  # sum over blocks that read
    waiting: list[tuple[float, int, int, int]] = field(default_factory=list)
    reading: list[tuple[float, int, int, int]] = field(default_factory=list)

    def next(self) -> tuple[int, int, int] | None:
        """Phase, place and item that end next: 0, an item is found; 1, read; 2, done with."""
        rate = min(self.rate, self.copy / self.speed) if self.speed else inf
        read = inf
        if self.reading:
            read = self.clock + (self.reading[0][0] - self.progress) / rate
        if min(read, *(it[0] for it in self.waiting[:1]), inf) == inf:
            return None
        if self.waiting and self.waiting[0][0] <= read:
            time, *event = heapq.heappop(self.waiting)
            self.progress += (time - self.clock) * rate if self.speed else 0
            self.clock = time
        else:
            self.progress, *event = heapq.heappop(self.reading)
            self.clock = read
        return tuple(event)

    def wait(self, time: float, phase: int, place: int, item: int) -> None:
        heapq.heappush(self.waiting, (self.clock + time, phase, place, item))

    def read(self, size: float, speed: float, place: int, item: int) -> None:
        self.speed += speed
        heapq.heappush(self.reading, (self.progress + size / speed, 1, place, item))


def microseconds(
    plan: GenerationPlan,
    shape: AttentionShape,
    card: Card,
    *,
    num_places: int | None = None,
    speeds: Sequence[float] | None = None,
) -> float:
    """How long the plan takes. `num_places`: of blocks on the card, by default as many as fit;
    `speeds`: theirs, by default all the same.
    """
    itemsize = 1 if shape.fp8 else 2
    # four warps, each with a tile of 16 keys and values on its way (of 8 bits two)
    rate = 4 * 16 * 2 * shape.head_dim * 2 / TRIP_US
    resident = resident_blocks(shape, card.max_shared_mem)
    num_places = num_places or card.multiprocessors * resident
    speeds = speeds or [1.0] * num_places
    rows, first, last, _ = plan.items.T.tolist()
    parts = np.bincount(plan.items[:, 0], minlength=1)[plan.items[:, 0]].tolist()
    size = 2 * shape.head_dim * itemsize
    starts = plan.block_starts.tolist()
    spans = [span for span in zip(starts, starts[1:], strict=False) if span[0] < span[1]]
    blocks = [(head, *span) for head in range(shape.num_kv_heads) for span in spans]
    blocks.reverse()
    arrived: dict[tuple[int, int], int] = {}
    own = [(0, 0)] * num_places  # a place's KV head, and where its items end
    run = Run(rate, card.copy)

    def start(place: int) -> None:
        if blocks:
            head, item, end = blocks.pop()
            own[place] = head, end
            run.wait(START_US, 0, place, item)

    for place in range(num_places):
        start(place)
    while (event := run.next()) is not None:
        phase, place, item = event
        if phase == 0:
            run.read((last[item] - first[item]) * size, speeds[place], place, item)
        elif phase == 1:
            run.speed -= speeds[place]
            count, time = parts[item], 0.0
            if count > 1:
                key = rows[item], own[place][0]
                arrived[key] = arrived.get(key, 0) + 1
                merges = arrived[key] == count
                time = WRITE_US + merges * LOAD_US * (-(-count // MERGED_AT_ONCE) + -(-count // 32))
            run.wait(time, 2, place, item)
        elif item + 1 < own[place][1]:
            run.wait(START_US, 0, place, item + 1)
        else:
            start(place)
    return run.clock


def floor(lengths: Sequence[int], shape: AttentionShape, card: Card) -> float:
    """Microseconds that a copy takes for as many bytes as are read."""
    size = 2 * shape.num_kv_heads * shape.head_dim * (1 if shape.fp8 else 2)
    return sum(lengths) * size / card.copy


def default_plan(lengths: Sequence[int], shape: AttentionShape, card: Card) -> GenerationPlan:
    places = Places(card.multiprocessors, resident_blocks(shape, card.max_shared_mem))
    return plan_generation(np.array(lengths, np.int32), shape.num_kv_heads, places)


def shape_of(num_kv_heads: int, *, group: int = 4, head_dim: int = 128, fp8: bool = False):
    return AttentionShape(num_kv_heads * group, num_kv_heads, head_dim, 1.0, fp8=fp8)


LOADS: dict[str, list[int]] = {
    "32 x 4096": [4096] * 32,
    "32 x 1024": [1024] * 32,
    "16 x 128, 12 x 1000, 4 x 8192": [128] * 16 + [1000] * 12 + [8192] * 4,
    "16 x 128, 16 x 8064": [128] * 16 + [8064] * 16,
    "31 x 1024, one 99328": [1024] * 31 + [99328],
    "1 x 131072": [131072],
    "1 x 1024": [1024],
    "8 x 4096": [4096] * 8,
    "50 x 4096": [4096] * 50,
    "128 x 1024": [1024] * 128,
    "256 x 512": [512] * 256,
    "256 x 1024": [1024] * 256,
}
STRETCHES = (256, 1024, 4096)


def table(shape: AttentionShape, card: Card) -> str:
    """Percent of copy, of each load: by default, and with fixed stretches."""
    lines = ["| rows | " + " | ".join(["us", "default", *map(str, STRETCHES)]) + " |"]
    lines.append("| --- " * (len(STRETCHES) + 3) + "|")
    places = Places(card.multiprocessors, resident_blocks(shape, card.max_shared_mem))
    for name, lengths in LOADS.items():
        array, least = np.array(lengths, np.int32), floor(lengths, shape, card)
        plans = [default_plan(lengths, shape, card)]
        for stretch in STRETCHES:
            plans.append(plan_generation(array, shape.num_kv_heads, places, stretch=stretch))
        times = [microseconds(plan, shape, card) for plan in plans]
        shares = [f"{100 * least / time:.0f} %" for time in times]
        lines.append(f"| {name} | " + " | ".join([f"{times[0]:.1f}", *shares]) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    for card in (H200, H100_PCIE):
        for num_kv_heads in (1, 8, 32):
            print(f"{card.name}, {num_kv_heads} KV heads of 128, bfloat16\n")
            print(table(shape_of(num_kv_heads), card))


if __name__ == "__main__":
    main()
