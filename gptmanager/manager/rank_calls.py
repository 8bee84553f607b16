"""`RankCalls`: runs a call such as `sleep` on all ranks. The host of each rank must make it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from gptmanager.assembly.ranks import Ranks
from gptmanager.errors import ManagerDeadError, RankError, response_text
from gptmanager.host.callback_host import CallbackHost
from gptmanager.lifecycle.clock import Patience
from gptmanager.lifecycle.latch import Latch
from gptmanager.lifecycle.watchdog import CallbackTimer
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.manager.inbox import Inbox
from gptmanager.ranks.links import Message

_T = TypeVar("_T")
_POLL_S = 0.002  # time between two checks whether this rank's host has made its call


class RankCalls:
    """Runs a call on all ranks, between the same two iterations.

    Rank 0 announces its call. The other ranks then wait until their hosts make the same call. Each
    step of the call (see `agree`) succeeds on all ranks or raises on all ranks. The methods run on
    the loop's thread. `timer` times iterations; it is stopped during a call.
    """

    def __init__(self, host: CallbackHost, inbox: Inbox, timer: CallbackTimer) -> None:
        self._host, self._inbox, self._timer = host, inbox, timer
        self._ranks: Ranks | None = None
        self._failure: Exception | None = None  # a pending step's error, still to be raised

    def attach(self, ranks: Ranks | None, loop: TokenLoop) -> None:
        """Connect to the other ranks, and to the loop of this rank."""
        self._ranks = ranks
        if ranks is not None:
            ranks.links.on_call = functools.partial(self._follow, loop)
            self._inbox.defers_calls = ranks.links.rank > 0

    @property
    def has_ranks(self) -> bool:
        return self._ranks is not None

    @property
    def has_failed(self) -> bool:
        """Whether `raise_failure` will raise."""
        return self._failure is not None

    def run(self, name: str, loop: TokenLoop, call: Callable[[], _T]) -> _T:
        """Announce the call `name` if this is rank 0, finish pending steps, and return `call()`.

        `call` must use `agree` for each step that may fail, and at least once: if the host of a
        rank does not make the call, the rank reports this in the first `agree`. Raise
        ManagerDeadError if the loop has ended.
        """
        if not hasattr(loop, "executor"):
            raise ManagerDeadError(f"{name}: the loop has ended")
        is_timed = self._timer.started_ns > 0
        self._timer.abandon()
        try:
            if self._ranks is not None and not self._inbox.defers_calls:
                self._ranks.links.send(Message.CALL, name.encode())
            self._finish_pending(loop)
            return call()
        finally:
            if is_timed:
                self._timer.start()

    def agree(self, name: str, step: Callable[[], _T]) -> _T:
        """Return `step()`. Raise its error, or RankError if it fails only on another rank."""
        if self._ranks is None:
            return step()
        error: BaseException | None = None
        try:
            answer = step()
        except BaseException as raised:  # noqa: B036 - the other ranks wait; raised below
            error = raised
        texts = self._ranks.links.exchange(b"" if error is None else response_text(error).encode())
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text:
                raise RankError(f"{name}: rank {rank} failed: {text.decode()}")
        return answer

    def raise_failure(self) -> None:
        """Raise the error of a pending step that failed in a call, so that the loop recovers."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def note_pause(self) -> None:
        """Make the other ranks wait longer, because no iteration may begin yet.

        Raise RankError if a rank has failed.
        """
        if self._ranks is not None and not self._inbox.defers_calls:
            self._ranks.links.send(Message.PAUSED)

    def _finish_pending(self, loop: TokenLoop) -> None:
        try:
            while loop.pending:
                loop.finish_pending()
            self._host.journal.flush()  # the next iteration may begin much later
        except Exception as error:
            self._failure = error  # raised in the loop later, and by the call in the host
            raise

    def _follow(self, loop: TokenLoop, name: str) -> None:
        """Wait until this rank's host makes the call `name`, announced by rank 0, and run it."""
        assert self._ranks is not None
        links = self._ranks.links
        patience = Patience(links.timeout_s)
        while (found := self._inbox.take_call()) is None and not patience.is_over():
            links.check()
            Latch().wait(_POLL_S)
        own, question = found or ("", None)
        if question is not None and own == name:
            question.settle(loop)
            # raised here and not in the next iteration, which does not begin while rank 0 waits for
            # this rank's part of the call
            self.raise_failure()
            return
        why = (
            f"called {own}" if own else f"has not called it within timeout_s = {links.timeout_s:g}"
        )
        error = RankError(f"{name} must be called on all ranks: rank {links.rank} {why}")
        try:
            self._finish_pending(loop)
            self.agree(name, _raises(error))
        except Exception as raised:
            if question is not None:
                question.refuse(raised)
            if raised is not error:  # the ranks have failed, or are out of step
                raise


def _raises(error: Exception) -> Callable[[], None]:
    def step() -> None:
        raise error

    return step
