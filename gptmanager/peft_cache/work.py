"""The work on adapters that runs in parallel with a token loop, and its results.

Reading, writing and copying take long, so other threads do it while steps run. These are plain
values: the pages of an adapter were decided when they were made.
"""

from __future__ import annotations

from typing import NamedTuple

from gptmanager.peft_cache.layout import AdapterRow, Packing
from gptmanager.peft_cache.manager import PageCopy
from gptmanager.request.adapter import AdapterTensors


class ReadAdapter(NamedTuple):
    """Read and check the numbers that a request brought, and keep them for `WriteAdapter`.

    `job` tells all jobs of a loop apart.
    """

    job: int
    task_id: int
    tensors: AdapterTensors


class WriteAdapter(NamedTuple):
    """Write what the job `source` has read to host pages; after that nobody asks for it again."""

    job: int
    source: int
    host_pages: tuple[int, ...]
    rows: tuple[AdapterRow, ...]
    packing: Packing


class DropAdapter(NamedTuple):
    """Nobody wants what the job `source` reads, or has read."""

    source: int


class CopyAdapter(NamedTuple):
    """Copy an adapter to the device, and tell kernels that it is in `slot` of their table."""

    job: int
    slot: int
    copies: tuple[PageCopy, ...]
    rows: tuple[AdapterRow, ...]
    packing: Packing
    device_pages: tuple[int, ...]


class FreeHostPages(NamedTuple):
    """Nobody needs what these pages hold."""

    host_pages: tuple[int, ...]


AdapterWork = ReadAdapter | WriteAdapter | DropAdapter | CopyAdapter | FreeHostPages


class AdapterDone(NamedTuple):
    """A job has ended. `digest`: of what was read. `error`: why it failed; None: it did not."""

    job: int
    digest: str = ""
    error: BaseException | None = None
