"""The jobs of reading, writing and copying adapters, and their results, as plain values.

These jobs are slow, so other threads run them in parallel with the token loop. The pages that a job
writes are allocated before the job is created.
"""

from __future__ import annotations

from typing import NamedTuple

from gptmanager.peft_cache.layout import AdapterRow, Packing
from gptmanager.peft_cache.manager import PageCopy
from gptmanager.request.adapter import AdapterTensors


class ReadAdapter(NamedTuple):
    """Read and check the weights that a request passed, and keep them for `WriteAdapter`.

    `job` is an id that no other job of the loop has.
    """

    job: int
    task_id: int
    tensors: AdapterTensors


class WriteAdapter(NamedTuple):
    """Write to host pages the weights that job `source` has read, and release that job's copy."""

    job: int
    source: int
    host_pages: tuple[int, ...]
    rows: tuple[AdapterRow, ...]
    packing: Packing


class DropAdapter(NamedTuple):
    """Release the weights of job `source`, even if the job is still reading them."""

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
    """Record that these pages are free, because no request needs their content."""

    host_pages: tuple[int, ...]


AdapterWork = ReadAdapter | WriteAdapter | DropAdapter | CopyAdapter | FreeHostPages


class AdapterDone(NamedTuple):
    """The result of a job.

    `digest` identifies the weights that `ReadAdapter` has read. `error` is None after success.
    """

    job: int
    digest: str = ""
    error: BaseException | None = None
