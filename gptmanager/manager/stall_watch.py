"""`StallWatch`: records when a step last ended, and warns if requests wait while no step runs.

The loop's thread writes the record, and any thread may read it. This module alone decides when a
manager counts as stuck.
"""

from __future__ import annotations

from gptmanager.lifecycle.clock import monotonic
from gptmanager.lifecycle.log import logger
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.manager.inspection import explain

_STALL_WARNING_S = 1.0
_STUCK_S = 10.0  # a loop with active requests is stuck after this time without a step


class StallWatch:
    """Watches one loop. `last_step`: the monotonic time when a step last ended, or None."""

    __slots__ = ("last_step", "_last", "_has_warned")

    def __init__(self) -> None:
        self.last_step: float | None = None
        self._last = monotonic()  # when a step last ended or there was nothing to do
        self._has_warned = False

    def note(self, *, worked: bool, is_active: bool) -> None:
        """Record that an iteration of the loop has ended. `worked`: the iteration ran a step."""
        if worked:
            self.last_step = self._last = monotonic()
        elif not is_active:
            self._last = monotonic()

    def is_progressing(self, num_active: int) -> bool:
        """Return False if active requests have waited ten seconds for the end of a step."""
        return num_active == 0 or monotonic() - self._last < _STUCK_S

    def last_step_age_s(self) -> float | None:
        """Return the seconds since a step last ended; None before the end of the first step."""
        last_step = self.last_step
        return None if last_step is None else monotonic() - last_step

    def warn_of_stall(self, loop: TokenLoop) -> None:
        """Log once why no request runs while some are active."""
        stalled_s = monotonic() - self._last
        if not loop.active or stalled_s < _STALL_WARNING_S:
            self._has_warned = False
        elif not self._has_warned:
            self._has_warned = True
            text = explain(loop, loop.active[0].request_id).text
            logger.warning(
                "no request has been scheduled for %.1f s, %d requests are active: %s",
                *(stalled_s, len(loop.active), text),
            )
