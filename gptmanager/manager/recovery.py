"""`Recovery`: decides whether a loop continues after an iteration that raised an exception.

Every request that has started ends with an error. Then the counts of blocks and pages are checked.
The loop ends if these counts are inconsistent, if too many iterations fail in a row, or if the
scheduler or the journal has failed.
"""

from __future__ import annotations

from gptmanager.errors import (
    JournalError,
    ManagerDeadError,
    SchedulerError,
    StepError,
    response_text,
)
from gptmanager.host.callback_host import CallbackHost
from gptmanager.lifecycle.log import logger
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.manager.inspection import audit
from gptmanager.recorder import Recorder


class Recovery:
    """Handles failed iterations. `max_failures` failed iterations in a row end the loop."""

    def __init__(self, host: CallbackHost, recorder: Recorder, max_failures: int) -> None:
        self._host = host
        self._recorder = recorder
        self._max_failures = max_failures
        self._failures = 0  # in a row

    def note_step(self) -> None:
        """Record that an iteration has completed a step."""
        self._failures = 0

    def recover(self, loop: TokenLoop, error: Exception) -> None:
        """End the started requests, or raise `error` again if the loop must end.

        Must be called in the handler of `error`. A JournalError ends the loop at once, and so does
        a SchedulerError, because a scheduler that breaks its contract would do so again. Raise
        ManagerDeadError if the counts are inconsistent afterwards.
        """
        self._failures += 1
        if (
            isinstance(error, (SchedulerError, JournalError))
            or self._failures >= self._max_failures
        ):
            raise error
        cause = StepError(f"Encountered an error in forwardAsync function: {response_text(error)}")
        loop.recover(cause)
        self._host.answer_lost(loop.table.unanswered, cause)
        report = audit(loop)
        if not report.ok:
            raise ManagerDeadError(
                f"the counts of memory are inconsistent after {response_text(error)}: "
                f"{'; '.join(report.problems)}"
            ) from error
        logger.error(
            "an iteration failed, %d in a row (max_step_failures = %d); the loop continues without "
            "the requests that had started",
            *(self._failures, self._max_failures),
            exc_info=error,
        )
        self._recorder.restart(loop, error)
