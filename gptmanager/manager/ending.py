"""`Ending`: what has to happen when a loop ends, on whichever thread it is told."""

from __future__ import annotations

from collections.abc import Callable

from gptmanager.errors import GptManagerError
from gptmanager.host.callback_host import CallbackHost
from gptmanager.lifecycle.log import logger
from gptmanager.lifecycle.watchdog import CallbackTimer
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.manager.inbox import Inbox
from gptmanager.memory.cpu_memory import give_back
from gptmanager.recorder import Recorder


class Ending:
    """`turn` times the turns of the loop. `on_end` is called once, by `close`."""

    def __init__(
        self,
        host: CallbackHost,
        inbox: Inbox,
        recorder: Recorder,
        turn: CallbackTimer,
        on_end: Callable[[], None],
    ) -> None:
        self.host = host
        self.inbox = inbox
        self.turn = turn
        self._recorder = recorder
        self._on_end = on_end

    def end_requests(self, loop: TokenLoop, error: GptManagerError) -> None:
        """A final error for each request, also for those that the loop has lost."""
        try:
            loop.abort(error)
        finally:
            self.host.answer_all(error)

    def tell_failure(self, error: BaseException) -> None:
        """To the log and to the recorder."""
        logger.error("the token loop has failed", exc_info=error)
        try:
            self._recorder.fail(error)
        except Exception:
            self._recorder.close("failed")

    def release(self, loop: TokenLoop | None) -> None:
        """Weights and pages go now, not when the host forgets the manager."""
        self.host.release()
        if loop is not None:
            loop.release()
        give_back()

    def close(self) -> None:
        """Every thread that waits for the end learns of it."""
        self.host.is_accepting = False
        self.turn.abandon()
        self.host.lifecycle.ended.set()
        self.inbox.close()
        on_end, self._on_end = self._on_end, lambda: None  # its owner is free to go
        on_end()
