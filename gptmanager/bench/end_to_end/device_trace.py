"""Traces the kernels of a GPU with torch's profiler, and measures how busy the GPU is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

Interval = tuple[float, float]  # begin, end, in seconds
# words in the names of our kernels, and of the kernels of cuBLAS and CUTLASS
_KINDS = {
    "attention": ("attention",),
    "gemm": ("multiply", "gemm", "gemv", "nvjet", "cutlass", "xmma", "cublas", "splitk"),
}


class DeviceEvent(NamedTuple):
    """A kernel or a copy: its begin and end in seconds, and its name."""

    begin: float
    end: float
    name: str


_GAP_S = 10e-6  # shorter gaps are normal between the kernels of one CUDA graph


def trace_device(seconds: float) -> list[DeviceEvent]:
    """Trace the kernels and copies of the next `seconds`."""
    profiler: Any = torch.profiler
    device_type: Any = torch.autograd
    cuda = profiler.ProfilerActivity.CUDA
    # without acc_events torch 2.11 warns
    with profiler.profile(activities=[cuda], acc_events=True) as profile:
        time.sleep(seconds)
    return [
        DeviceEvent(event.time_range.start / 1e6, event.time_range.end / 1e6, event.name)
        for event in profile.events()
        if event.device_type == device_type.DeviceType.CUDA
    ]


def split(events: Sequence[DeviceEvent]) -> dict[str, float]:
    """Return the times of "attention", "gemm" and the "rest", as shares of the whole time.

    The whole time is from the begin of the first event to the end of the last. The name of an event
    decides to which kind its time is added. Parallel events are each counted in full.
    """
    shares = dict.fromkeys((*_KINDS, "rest"), 0.0)
    total = max(it.end for it in events) - min(it.begin for it in events)
    for begin, end, name in events:
        found = (kind for kind, words in _KINDS.items() if any(it in name.lower() for it in words))
        shares[next(found, "rest")] += (end - begin) / total if total > 0 else 0.0
    return shares


def idle_share(intervals: Sequence[Interval]) -> tuple[float, float]:
    """Return (idle share, waiting share) of the time from the first interval to the last.

    The device is idle while nothing runs; it waits for the host in gaps longer than 10 us. Raises
    ValueError without intervals.
    """
    idle = waited = 0.0
    ordered = sorted(intervals)
    if not ordered:
        raise ValueError("nothing ran on the device")
    begin, end = ordered[0]
    for start, stop in ordered[1:]:
        gap = max(0.0, start - end)
        idle += gap
        waited += gap if gap > _GAP_S else 0.0
        end = max(end, stop)
    total = end - begin
    return (idle / total, waited / total) if total > 0 else (0.0, 0.0)
