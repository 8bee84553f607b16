"""`GetFailures`: how long to pause after a failure of the Get callback, and when to give up.

A request queue that fails for only a few seconds must not end a manager.
"""

from __future__ import annotations

from gptmanager.errors import CallbackError, response_text
from gptmanager.lifecycle.clock import monotonic

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0


class GetFailures:
    """Counts failures of the Get callback.

    `in_a_row` is the number of failures since the last success. When it exceeds `most`, `fatal` is
    set to the error to raise.
    """

    def __init__(self, most: int) -> None:
        self.in_a_row = 0
        self._most = most
        self._rests_until = 0.0
        self.fatal: CallbackError | None = None  # its cause is the last failure

    def add(self, error: BaseException) -> None:
        """Record that a call has failed with `error`."""
        if self.rests:
            return  # `notify` caused this call during the pause; the failure is not counted
        self.in_a_row += 1
        self._rests_until = monotonic() + self.pause_s
        if self.in_a_row > self._most:
            self.fatal = CallbackError(
                f"GetInferenceRequests failed {self.in_a_row} times in a row, max_get_failures = "
                f"{self._most}; last error: {response_text(error)}"
            )
            self.fatal.__cause__ = error

    @property
    def pause_s(self) -> float:
        """Seconds to pause: 0.01 after the first failure, then doubled each time, up to 1."""
        doublings = min(max(self.in_a_row - 1, 0), 10)
        return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0**doublings)

    @property
    def rests(self) -> bool:
        """Whether the pause after the last failure is still running."""
        return self.in_a_row > 0 and monotonic() < self._rests_until
