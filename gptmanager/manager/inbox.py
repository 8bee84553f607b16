"""`Inbox`: lets other threads wake the loop, ask it questions, and wait until it is idle.

Other threads may call the methods meant for them at any time. A signal handler may call these
methods even in the middle of another call. So no lock is held between two lines of Python: each
step is one operation of a built-in container.
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
    """A function that the loop's thread calls between two iterations, with the loop as argument."""

    def __init__(self, function: Callable[[Any], _T]) -> None:
        self._function = function
        self._answered = Latch()
        self._answer: _T
        self._error: BaseException | None = None

    def settle(self, loop: Any) -> None:
        """Compute the answer. Only the thread that took the question out may call this."""
        try:
            self._answer = self._function(loop)
        except BaseException as error:  # noqa: B036 - `answer` raises it in the asking thread
            self._error = error
        self._answered.set()

    def refuse(self, error: BaseException) -> None:
        """Answer with an error. Only the thread that took the question out may call this."""
        self._error = error
        self._answered.set()

    def wait(self, timeout: float | None) -> bool:
        return self._answered.wait(timeout)

    def answer(self) -> _T:
        """Return the answer, or raise its error. Call it after `wait` has returned True."""
        if self._error is not None:
            raise self._error
        return self._answer


class Inbox:
    """The questions and wake-up calls of other threads to one loop.

    `iteration` is the number of iterations that have begun, and `idle_iteration` the number of the
    last iteration without work. `bells` are other functions to call in order to wake the loop. With
    `is_to_end`, the loop must finish its requests and end; with `is_to_abort`, it must end now.
    Neither is reset. While `is_paused`, the loop must not iterate. With `defers_calls`, a call that
    every rank must make is queued for `take_call`, because rank 0 decides when such a call runs.
    """

    def __init__(self) -> None:
        self.bells: list[Callable[[], None]] = []
        self.is_to_end = self.is_paused = False
        self.is_to_abort = False
        self.iteration = 0
        self.idle_iteration = 0
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._questions: deque[Question[Any]] = deque()
        self.defers_calls = False
        self._calls: deque[tuple[str, Question[Any]]] = deque()
        self._idle_waits: dict[Latch, int] = {}  # the first iteration that may set each latch
        self._is_closed = False

    # From any thread -------------------------------------------------------------------------

    def wake(self) -> None:
        """Make an iteration begin after this call."""
        if self._bell.empty():  # otherwise the loop will find the earlier entry
            self._bell.put(None)
        for ring in tuple(self.bells):
            ring()

    def ask_to_end(self, *, aborts: bool) -> None:
        """Make the loop end after its requests, or now if it `aborts`."""
        if aborts:
            self.is_to_abort = True
        self.is_to_end = True
        self.wake()

    def wait_idle(self, timeout: float | None) -> bool:
        """Wait for a later iteration without work; return whether such an iteration ran."""
        idle, wanted = Latch(), self.iteration + 1
        self._idle_waits[idle] = wanted
        self.wake()
        if not self._is_closed:
            idle.wait(timeout)
        self._idle_waits.pop(idle, None)
        return self.idle_iteration >= wanted

    def ask(self, function: Callable[[Any], _T], call: str = "") -> Question[_T]:
        """Queue a question, and return it. `call` names a call that all ranks make, or is ""."""
        question = Question(function)
        if call and self.defers_calls:
            self._calls.append((call, question))
        else:
            self._questions.append(question)
        self.wake()
        return question

    def take_back(self, question: Question[Any]) -> bool:
        """Remove a question. Return False if another thread has taken it out to answer it."""
        with suppress(ValueError):
            self._questions.remove(question)
            return True
        for call in tuple(self._calls):
            if call[1] is question:
                with suppress(ValueError):
                    self._calls.remove(call)
                    return True
        return False

    # On the loop's thread --------------------------------------------------------------------

    def begin_iteration(self) -> None:
        """Count an iteration, which serves all wake-up calls so far."""
        while not self._bell.empty():
            with suppress(Empty):
                self._bell.get_nowait()
        # The count is raised last. Otherwise the loop above could drop the wake-up call of a thread
        # that has read the new count.
        self.iteration += 1

    def answer(self, loop: Any, before: Callable[[], None] | None = None) -> None:
        """Answer all questions. `before` is called before each of them."""
        for question in self._take_questions():
            if before is not None:
                before()
            question.settle(loop)

    def refuse(self, error: BaseException) -> None:
        """Answer all questions with an error."""
        for question in self._take_questions():
            question.refuse(error)

    def take_call(self) -> tuple[str, Question[Any]] | None:
        """Take out the oldest deferred call, if any: its name, and the question that runs it."""
        with suppress(IndexError):
            return self._calls.popleft()
        return None

    def _take_questions(self) -> Iterator[Question[Any]]:
        while self._questions:
            with suppress(IndexError):  # another thread has taken it back
                yield self._questions.popleft()

    def rest(self, seconds: float | None) -> None:
        """Sleep until `wake` is called, at most for `seconds`."""
        with suppress(Empty):
            self._bell.get(timeout=seconds)

    def report_idle(self) -> None:
        """Record that this iteration has found nothing to do."""
        self.idle_iteration = self.iteration
        for idle, wanted in list(self._idle_waits.items()):
            if wanted <= self.idle_iteration:
                idle.set()

    def close(self) -> None:
        """End all waits for an idle iteration, because no iteration follows.

        Deferred calls become questions, so that `answer` or `refuse` settles them.
        """
        self._is_closed = True
        self.defers_calls = False
        while (call := self.take_call()) is not None:
            self._questions.append(call[1])
        for idle in list(self._idle_waits):
            idle.set()
        self.wake()
