"""`Deputy`: watches the loop's thread, and answers for it should it hang.

All that it says it says on the watchdog's thread. The loop's thread then does nothing any more,
should it come back.
"""

from __future__ import annotations

import threading

from gptmanager.config import OptionalParams
from gptmanager.errors import ManagerDeadError, response_text
from gptmanager.lifecycle.log import logger
from gptmanager.lifecycle.watchdog import Hang, Watchdog
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.manager.ending import Ending

_SEND_S = 0.3  # a SendResponse that runs so long when the loop is given up hangs, too


class Deputy:
    """`thread`: the one on which it answers for the loop now, if it does."""

    def __init__(self, params: OptionalParams, ending: Ending) -> None:
        self.thread: threading.Thread | None = None
        self._params = params
        self._host = ending.host
        self._ending = ending
        self._watched: threading.Thread | None = None
        self._loop: TokenLoop | None = None

    def watch(self, loop: TokenLoop) -> Watchdog | None:
        """Begin to watch the calling thread, which turns `loop`; None: there are no budgets."""
        params = self._params
        if params.callback_budget_s is None and params.step_budget_s is None:
            return None
        self._watched, self._loop = threading.current_thread(), loop
        watchdog = Watchdog(
            self._host.timers.all,
            threading.get_ident(),
            budget_s=params.callback_budget_s,
            turn=self._ending.turn,
            step_budget_s=params.step_budget_s,
            on_hang=self._on_hang,
        )
        watchdog.start()
        return watchdog

    def _on_hang(self, hang: Hang) -> bool:
        try:
            statistics = self._host.statistics.so_far()
        except Exception as error:  # the hang must end at any rate
            statistics = f"none: {response_text(error)}"
        if self._params.on_hang == "log":
            hang.tell(f"; statistics: {statistics}")
            return True
        self._give_up(hang, statistics)
        return False

    def _give_up(self, hang: Hang, statistics: str) -> None:
        host, ending = self._host, self._ending
        error = ManagerDeadError(hang.text)
        if not host.lifecycle.depose(error):
            return  # it ends at this moment
        self.thread = threading.current_thread()
        host.is_accepting = False
        is_sent = host.answer_deposed(error, _SEND_S)
        ending.close()
        ending.inbox.refuse(error)
        hang.tell(f"; on_hang = 'fail': the manager has ended; statistics: {statistics}")
        if not is_sent:
            logger.error("SendResponse hangs itself: no final response can be sent before it ends")
        ending.tell_failure(error)
        host.answer_deposed(error)
        if self._watched is not None:
            self._watched.join()  # what a Get that hung returns at last is answered, too
        host.answer_deposed(error)
        ending.release(self._loop)
        self.thread = None
