"""How busy a GPU is meanwhile, and with what, by torch's profiler."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

Interval = tuple[float, float]  # begin, end, in seconds
# what is in the names of kernels: ours, and those of cuBLAS and CUTLASS
_KINDS = {
    "attention": ("attention",),
    "gemm": ("multiply", "gemm", "gemv", "nvjet", "cutlass", "xmma", "cublas", "splitk"),
}


class Ran(NamedTuple):
    """A kernel or a copy: its time in seconds, and its name."""

    begin: float
    end: float
    name: str


_GAP_S = 10e-6  # shorter ones lie between the kernels of one recorded step


def watch(seconds: float) -> list[Ran]:
    """Record what runs on the device in the next `seconds`."""
    profiler: Any = torch.profiler
    device_type: Any = torch.autograd
    cuda = profiler.ProfilerActivity.CUDA
    with profiler.profile(activities=[cuda], acc_events=True) as profile:  # else torch 2.11 warns
        time.sleep(seconds)
    return [
        Ran(event.time_range.start / 1e6, event.time_range.end / 1e6, event.name)
        for event in profile.events()
        if event.device_type == device_type.DeviceType.CUDA
    ]


def split(ran: Sequence[Ran]) -> dict[str, float]:
    """Time of attention, of products and of the rest, as shares of that from the first to the last.

    By the names of kernels; what runs at the same time counts for each.
    """
    shares = dict.fromkeys((*_KINDS, "rest"), 0.0)
    total = max(it.end for it in ran) - min(it.begin for it in ran)
    for begin, end, name in ran:
        found = (kind for kind, words in _KINDS.items() if any(it in name.lower() for it in words))
        shares[next(found, "rest")] += (end - begin) / total if total > 0 else 0.0
    return shares


def idle_share(intervals: Sequence[Interval], gap_s: float = _GAP_S) -> tuple[float, float]:
    """Return the share of time in which nothing ran, from the first interval to the last, and the
    share of gaps longer than `gap_s`, in which the device waited for the host.
    """
    idle = waited = 0.0
    ordered = sorted(intervals)
    if not ordered:
        raise ValueError("nothing ran on the device")
    begin, end = ordered[0]
    for start, stop in ordered[1:]:
        gap = max(0.0, start - end)
        idle += gap
        waited += gap if gap > gap_s else 0.0
        end = max(end, stop)
    total = end - begin
    return (idle / total, waited / total) if total > 0 else (0.0, 0.0)
