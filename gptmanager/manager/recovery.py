"""`Recovery`: whether a loop goes on after an iteration that raised.

The requests that ran end with an error. Then the accounts of memory are proven. The loop ends only
if they do not hold, or if it happens too often in a row.
"""

from __future__ import annotations

from gptmanager.errors import ManagerDeadError, SchedulerError, StepError, response_text
from gptmanager.host.callback_host import CallbackHost
from gptmanager.lifecycle.log import logger
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.manager.inspection import audit
from gptmanager.recorder import Recorder


class Recovery:
    """`max_failures`: iterations in a row that may not raise; the last of them ends the loop."""

    def __init__(self, host: CallbackHost, recorder: Recorder, max_failures: int) -> None:
        self._host = host
        self._recorder = recorder
        self._max_failures = max_failures
        self._failures = 0  # in a row

    def note_step(self) -> None:
        """An iteration has run a step to its end."""
        self._failures = 0

    def recover(self, loop: TokenLoop, error: Exception) -> None:
        """To be called where `error` is handled; raises it again where the loop must end.

        A scheduler that breaks its contract would do so again: its errors end the loop at once.
        """
        self._failures += 1
        if isinstance(error, SchedulerError) or self._failures >= self._max_failures:
            raise error
        cause = StepError(f"Encountered an error in forwardAsync function: {response_text(error)}")
        loop.recover(cause)
        self._host.answer_lost(loop.table.unanswered, cause)
        report = audit(loop)
        if not report.ok:
            raise ManagerDeadError(
                f"after {response_text(error)} the accounts of memory do not hold: "
                f"{'; '.join(report.problems)}"
            ) from error
        logger.error(
            "an iteration failed, %d in a row (max_step_failures = %d); the loop goes on without "
            "the requests that ran in it",
            *(self._failures, self._max_failures),
            exc_info=error,
        )
        self._recorder.restart(loop, error)
