"""`Inbox`: what other threads want of the loop: a turn, an answer, word of an idle turn.

Any thread may call at any time, and a signal handler in the middle of another call. So nothing is
locked between two lines of Python: every step is one operation of a built-in container.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from gptmanager.lifecycle.latch import Latch

_T = TypeVar("_T")


class Question(Generic[_T]):
    """A function of the loop, to be called between two iterations."""

    def __init__(self, function: Callable[[Any], _T]) -> None:
        self._function = function
        self._answered = Latch()
        self._answer: _T
        self._error: BaseException | None = None

    def settle(self, loop: Any) -> None:
        """Find the answer; for the thread that took the question out of the inbox."""
        try:
            self._answer = self._function(loop)
        except BaseException as error:  # noqa: B036 - raised in the asker's line
            self._error = error
        self._answered.set()

    def refuse(self, error: BaseException) -> None:
        """No answer will be found; as `settle`."""
        self._error = error
        self._answered.set()

    def wait(self, timeout: float | None) -> bool:
        return self._answered.wait(timeout)

    def answer(self) -> _T:
        if self._error is not None:
            raise self._error
        return self._answer


class Inbox:
    """`turn` counts the turns of the loop begun, `idle_turn` is the last that found nothing.
    `bells`: other functions to be called when the loop is to wake.

    `is_to_end`: the loop finishes what has come in, and ends. `is_to_abort`: it ends now. Neither
    is taken back.
    """

    def __init__(self) -> None:
        self.bells: list[Callable[[], None]] = []
        self.is_to_end = False
        self.is_to_abort = False
        self.turn = 0
        self.idle_turn = 0
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._questions: deque[Question[Any]] = deque()
        self._idle_waits: dict[Latch, int] = {}  # with the first turn that counts for it
        self._is_closed = False

    # From any thread -------------------------------------------------------------------------

    def wake(self) -> None:
        """A turn begins after this call."""
        if self._bell.empty():  # what has rung is still to be heard
            self._bell.put(None)
        for ring in tuple(self.bells):
            ring()

    def ask_to_end(self, *, aborts: bool) -> None:
        if aborts:
            self.is_to_abort = True
        self.is_to_end = True
        self.wake()

    def wait_idle(self, timeout: float | None) -> bool:
        """Has a turn that began after this call found nothing? Returns also when none follows."""
        idle, wanted = Latch(), self.turn + 1
        self._idle_waits[idle] = wanted
        self.wake()
        if not self._is_closed:
            idle.wait(timeout)
        self._idle_waits.pop(idle, None)
        return self.idle_turn >= wanted

    def ask(self, function: Callable[[Any], _T]) -> Question[_T]:
        question = Question(function)
        self._questions.append(question)
        self.wake()
        return question

    def take_back(self, question: Question[Any]) -> bool:
        """Was it still here? Then nobody else answers it."""
        try:
            self._questions.remove(question)
        except ValueError:
            return False
        return True

    # On the loop's thread --------------------------------------------------------------------

    def begin_turn(self) -> None:
        while not self._bell.empty():
            with suppress(Empty):
                self._bell.get_nowait()
        self.turn += 1  # only now: who has seen it rings a bell that is heard by the next

    def answer(self, loop: Any) -> None:
        for question in self._take_questions():
            question.settle(loop)

    def refuse(self, error: BaseException) -> None:
        for question in self._take_questions():
            question.refuse(error)

    def _take_questions(self) -> Iterator[Question[Any]]:
        while self._questions:
            with suppress(IndexError):  # it was taken back meanwhile
                yield self._questions.popleft()

    def rest(self, seconds: float | None) -> None:
        """Sleep until somebody wakes the loop, at most for `seconds`."""
        with suppress(Empty):
            self._bell.get(timeout=seconds)

    def tell_idle(self) -> None:
        """This turn has found nothing to do."""
        self.idle_turn = self.turn
        for idle, wanted in list(self._idle_waits.items()):
            if wanted <= self.idle_turn:
                idle.set()

    def close(self) -> None:
        """No turn follows: nobody waits for one any more."""
        self._is_closed = True
        for idle in list(self._idle_waits):
            idle.set()
        self.wake()
