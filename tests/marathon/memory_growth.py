"""Growth of memory that does not end: a leak, and not what a process takes while it warms up."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def lasting_growth(sizes: Mapping[float, float], length: float) -> float | None:
    """The MB a minute of `sizes` (in MB, by seconds) in a run of `length` seconds.

    Judged are its third and its fourth quarter, and the lower slope counts: a leak goes on in both,
    and a cache that has become full, or a process that has been started anew, is in one of them.
    A heap that warms up grows in ever smaller steps.
    None: a quarter has fewer than two sizes.
    """
    slopes = []
    for share in (0.5, 0.75):
        times = [at for at in sizes if share * length <= at <= (share + 0.25) * length]
        if len(times) < 2:
            return None
        slope, _ = np.polyfit(np.array(times) / 60, [sizes[at] for at in times], 1)
        slopes.append(float(slope))
    return round(min(slopes), 3)
