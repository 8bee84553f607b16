"""When a recorded request came to its host, as far as the recording tells.

Get is asked for no more than there is room for: what it returned to the full may have waited in the
host's queue since long before. Knows nothing of what the requests are.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from gptmanager.recorder.recording import Iteration, Recording

logger = logging.getLogger("gptmanager")


@dataclass(frozen=True, slots=True)
class HostQueue:
    """`arrivals`: of each request, in the order in which Get returned it, seconds since the start.

    A request came at the latest when Get returned it, and that is taken for its arrival, unless the
    Get before had been answered to the full room: then it may have waited since the first Get
    from which on all were, and that one is. The first Get that was answered with less had
    emptied the queue. `num_held`: how many arrive so before Get returned them, and
    `longest_s`: how long before at most.
    """

    arrivals: tuple[float, ...]
    num_held: int = 0
    longest_s: float = 0.0


def host_queue(recording: Recording, max_active: int | None) -> HostQueue:
    """`max_active`: of the recorded loop, None: Get was never short of room."""
    first = recording.iterations[0].intake.now
    arrivals: list[float] = []
    full_since: float | None = None  # the first of the Gets, up to now, that were answered in full
    num_held, longest_s, untold = 0, 0.0, 0
    for turn in recording.iterations:
        now = turn.intake.now - first
        if full_since is not None and not turn.num_active and turn.idle_turns != 0:
            untold += turn.idle_turns is None
            full_since = None  # nothing was active: Get was asked again, and had nothing
        since = now if full_since is None else full_since
        arrivals += [since] * len(turn.intake.requests)
        if since < now:
            num_held += len(turn.intake.requests)
            longest_s = max(longest_s, now - since if turn.intake.requests else 0.0)
        full_since = since if _is_full(turn, max_active) else None
    if untold:
        logger.warning(
            "an older recording: %d times nothing was active, and it is not told whether Get was "
            "asked in vain then; requests that came next are taken to have come when Get "
            "returned them",
            untold,
        )
    return HostQueue(tuple(arrivals), num_held, longest_s)


def _is_full(turn: Iteration, max_active: int | None) -> bool:
    """Whether Get left nothing of the room. Without room it is not asked, and more may wait."""
    return max_active is not None and turn.num_active + len(turn.intake.requests) >= max_active
