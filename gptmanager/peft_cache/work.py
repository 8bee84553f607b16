"""Adapter jobs that run in parallel with the token loop, and their results.

Reading, writing and copying adapters is slow, so other threads do it while steps run. Jobs are
plain values. The pages of an adapter are allocated before its job is created.
"""

from __future__ import annotations

from typing import NamedTuple

from gptmanager.peft_cache.layout import AdapterRow, Packing
from gptmanager.peft_cache.manager import PageCopy
from gptmanager.request.adapter import AdapterTensors


class ReadAdapter(NamedTuple):
    """Read and check the numbers that a request passed, and keep them for `WriteAdapter`.

    `job`: an id, unique among all jobs of a loop.
    """

    job: int
    task_id: int
    tensors: AdapterTensors


class WriteAdapter(NamedTuple):
    """Write the weights that job `source` has read to host pages, and release its copy."""

    job: int
    source: int
    host_pages: tuple[int, ...]
    rows: tuple[AdapterRow, ...]
    packing: Packing


class DropAdapter(NamedTuple):
    """Release the weights of job `source`, even if it is still reading them."""

    source: int


class CopyAdapter(NamedTuple):
    """Copy an adapter to the device, and register it in `slot` of the kernels' table."""

    job: int
    slot: int
    copies: tuple[PageCopy, ...]
    rows: tuple[AdapterRow, ...]
    packing: Packing
    device_pages: tuple[int, ...]


class FreeHostPages(NamedTuple):
    """Free these pages: their content is no longer needed."""

    host_pages: tuple[int, ...]


AdapterWork = ReadAdapter | WriteAdapter | DropAdapter | CopyAdapter | FreeHostPages


class AdapterDone(NamedTuple):
    """The result of a job. `digest`: that of the weights read. `error`: None after a success."""

    job: int
    digest: str = ""
    error: BaseException | None = None
