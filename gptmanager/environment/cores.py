"""How many cores this process may use."""

from __future__ import annotations

import os
from pathlib import Path

from gptmanager.environment.control_groups import ROOT, cpu_quota


def num_cores(root: Path = ROOT) -> int:
    """Return the cores that the system schedules this process on, within a quota of its control
    groups. Half a core is not counted: parallel work waits for its slowest thread.
    """
    return max(1, int(min(num_schedulable(), cpu_quota(root))))


def num_schedulable() -> int:
    """Return the cores that the system schedules this process on, whatever its quota."""
    if hasattr(os, "sched_getaffinity"):  # not on every system
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
