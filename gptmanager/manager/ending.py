"""`LoopEnding`: ends a loop, even one that hangs.

If the loop's thread hangs and `on_hang` is "fail", the watchdog's thread sends the last responses.
The loop's thread then does nothing more, even if the call that hung returns.
"""

from __future__ import annotations

import threading

from gptmanager.config import OptionalParams
from gptmanager.environment.machine.memory import give_back
from gptmanager.errors import GptManagerError, ManagerDeadError, RankError, response_text
from gptmanager.host.callback_host import CallbackHost
from gptmanager.host.loop_host import LoopHost
from gptmanager.lifecycle.log import logger
from gptmanager.lifecycle.watchdog import CallbackTimer, Hang, Watchdog
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.manager.inbox import Inbox
from gptmanager.recorder import Recorder

_SEND_S = 0.3  # seconds to wait until an abandoned loop's call of SendResponse returns


class LoopEnding:
    """Ends a loop. `timer` times the loop's iterations.

    While the watchdog's thread sends responses in place of a loop's thread that hangs, `stand_in`
    is the watchdog's thread. Otherwise it is None.
    """

    def __init__(
        self,
        params: OptionalParams,
        host: CallbackHost,
        inbox: Inbox,
        recorder: Recorder,
        timer: CallbackTimer,
    ) -> None:
        self.stand_in: threading.Thread | None = None
        self._params = params
        self._host = host
        self._inbox = inbox
        self._recorder = recorder
        self._timer = timer

    # On the loop's thread, or on `stand_in` -------------------------------------------------

    def end_requests(self, loop: TokenLoop, error: GptManagerError) -> None:
        """Send a final error for each request, including those that the loop has lost."""
        try:
            loop.abort(error)
        finally:
            self._host.answer_all(error)

    def log_failure(self, error: BaseException) -> None:
        """Write the error to the log and to the recording."""
        if isinstance(error, RankError):  # its text names the rank and the reason
            logger.error("the token loop has failed: %s", error)
        else:
            logger.error("the token loop has failed", exc_info=error)
        try:
            self._recorder.fail(error)
        except Exception:
            self._recorder.close("failed")

    def release(self, loop: TokenLoop | None, loop_host: LoopHost) -> None:
        """Free weights and pages now, not only when the host drops the manager."""
        try:
            loop_host.release()
        except Exception:  # for example of the journal's disk; the manager must still end
            logger.exception("an error while the loop was released")
        if loop is not None:
            loop.release()
        give_back()

    def close(self) -> None:
        """Mark the loop as ended, and wake every thread that waits for its end."""
        self._host.is_accepting = False
        self._timer.abandon()
        self._host.lifecycle.ended.set()
        self._inbox.close()

    # A hang ------------------------------------------------------------------------------------

    def watch(self, loop: TokenLoop, loop_host: LoopHost) -> Watchdog | None:
        """Start and return a watchdog of the calling thread, which runs `loop` for `loop_host`.

        Return None if no budget is set.
        """
        params, watched = self._params, threading.current_thread()
        if params.callback_budget_s is None and params.step_budget_s is None:
            return None

        def on_hang(hang: Hang) -> bool:
            try:
                statistics = self._host.statistics.so_far()
            except Exception as error:  # this must not prevent the handling of the hang
                statistics = f"none: {response_text(error)}"
            if params.on_hang == "log":
                hang.log(f"; statistics: {statistics}")
                return True
            self._give_up(hang, statistics, loop, loop_host, watched)
            return False

        watchdog = Watchdog(
            self._host.timers.all,
            threading.get_ident(),
            budget_s=params.callback_budget_s,
            iteration=self._timer,
            step_budget_s=params.step_budget_s,
            on_hang=on_hang,
        )
        watchdog.start()
        return watchdog

    def _give_up(
        self,
        hang: Hang,
        statistics: str,
        loop: TokenLoop,
        loop_host: LoopHost,
        watched: threading.Thread,
    ) -> None:
        host, error = self._host, ManagerDeadError(hang.text)
        if not host.lifecycle.abandon(error):
            return  # the loop's thread is ending by itself
        self.stand_in = threading.current_thread()
        loop_host.stop(error)
        is_sent = host.answer_abandoned(error, _SEND_S)
        self.close()
        self._inbox.refuse(error)
        hang.log(f"; on_hang = 'fail': the manager has ended; statistics: {statistics}")
        if not is_sent:
            logger.error("SendResponse itself hangs: no final response is sent until it returns")
        self.log_failure(error)
        host.answer_abandoned(error)
        watched.join()  # if GetInferenceRequests hung, its late requests need a response, too
        host.answer_abandoned(error)
        self.release(loop, loop_host)
        self.stand_in = None
