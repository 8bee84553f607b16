"""`Inbox`: requests of other threads to the loop: iterate, answer a question, report idleness.

Any thread may call at any time, and a signal handler in the middle of another call. So no lock is
held between two lines of Python: every step is one operation of a built-in container.
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
        """Compute the answer; called by the thread that took the question out of the inbox."""
        try:
            self._answer = self._function(loop)
        except BaseException as error:  # noqa: B036 - raised in the asker's line
            self._error = error
        self._answered.set()

    def refuse(self, error: BaseException) -> None:
        """Answer with an error; called by the thread that took the question out."""
        self._error = error
        self._answered.set()

    def wait(self, timeout: float | None) -> bool:
        return self._answered.wait(timeout)

    def answer(self) -> _T:
        if self._error is not None:
            raise self._error
        return self._answer


class Inbox:
    """`iteration` counts the iterations begun; `idle_iteration` is the last one without work.
    `bells`: other functions to be called when the loop is to wake.

    `is_to_end`: the loop finishes the requests that it has, and ends. `is_to_abort`: it ends now.
    Neither is reset.
    """

    def __init__(self) -> None:
        self.bells: list[Callable[[], None]] = []
        self.is_to_end = False
        self.is_to_abort = False
        self.iteration = 0
        self.idle_iteration = 0
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._questions: deque[Question[Any]] = deque()
        self._idle_waits: dict[Latch, int] = {}  # with the first iteration that counts for it
        self._is_closed = False

    # From any thread -------------------------------------------------------------------------

    def wake(self) -> None:
        """Make an iteration begin after this call."""
        if self._bell.empty():  # else the loop will see the earlier ring
            self._bell.put(None)
        for ring in tuple(self.bells):
            ring()

    def ask_to_end(self, *, aborts: bool) -> None:
        if aborts:
            self.is_to_abort = True
        self.is_to_end = True
        self.wake()

    def wait_idle(self, timeout: float | None) -> bool:
        """Wait for an iteration without work that begins after this call; False: there was none."""
        idle, wanted = Latch(), self.iteration + 1
        self._idle_waits[idle] = wanted
        self.wake()
        if not self._is_closed:
            idle.wait(timeout)
        self._idle_waits.pop(idle, None)
        return self.idle_iteration >= wanted

    def ask(self, function: Callable[[Any], _T]) -> Question[_T]:
        question = Question(function)
        self._questions.append(question)
        self.wake()
        return question

    def take_back(self, question: Question[Any]) -> bool:
        """Remove a question; True: it was still here, and no other thread answers it."""
        try:
            self._questions.remove(question)
        except ValueError:
            return False
        return True

    # On the loop's thread --------------------------------------------------------------------

    def begin_iteration(self) -> None:
        while not self._bell.empty():
            with suppress(Empty):
                self._bell.get_nowait()
        # only now: a thread that reads the new count rings a bell that the next iteration sees
        self.iteration += 1

    def answer(self, loop: Any) -> None:
        for question in self._take_questions():
            question.settle(loop)

    def refuse(self, error: BaseException) -> None:
        for question in self._take_questions():
            question.refuse(error)

    def _take_questions(self) -> Iterator[Question[Any]]:
        while self._questions:
            with suppress(IndexError):  # another thread has taken it back
                yield self._questions.popleft()

    def rest(self, seconds: float | None) -> None:
        """Sleep until `wake` is called, at most for `seconds`."""
        with suppress(Empty):
            self._bell.get(timeout=seconds)

    def tell_idle(self) -> None:
        """Note that this iteration has found nothing to do."""
        self.idle_iteration = self.iteration
        for idle, wanted in list(self._idle_waits.items()):
            if wanted <= self.idle_iteration:
                idle.set()

    def close(self) -> None:
        """End all waits for an idle iteration: no iteration follows."""
        self._is_closed = True
        for idle in list(self._idle_waits):
            idle.set()
        self.wake()
