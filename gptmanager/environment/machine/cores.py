"""Count the cores that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

from gptmanager.environment.machine.control_groups import ROOT, cpu_quota


def num_cores(root: Path = ROOT) -> int:
    """Return the number of cores that this process may use, within the quota of its control groups.

    The number is rounded down, because parallel work waits for its slowest thread, but is at least
    1.
    """
    return max(1, int(min(num_schedulable(), cpu_quota(root))))


def num_schedulable() -> int:
    """Return the number of cores that this process may run on, regardless of the quota."""
    if hasattr(os, "sched_getaffinity"):  # not on every system
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
