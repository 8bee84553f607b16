"""Interrupts a call wherever a signal handler may run or raise, and fails where a call hangs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from inspect import CO_GENERATOR
from itertools import count
from typing import Any

TIMEOUT_S = 20


def in_a_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Run, fail instead of hanging."""
    found: list[Any] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(function(*arguments))
        except BaseException as error:  # noqa: B036 - raised in the test
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive(), "it hangs"
    if raised:
        raise raised[0]
    return found[0]


def handled(call: Callable[[], Any], number: int, handler: Callable[[], Any]) -> bool:
    """Call, and run `handler` at the point `number`; return whether the call has this point.

    Python runs signal handlers when a function begins, and after a function of C has returned:
    where a profiler is called, too. A `with` statement of a lock has no such point between the
    lock and its block, so there a handler never raises; a trace of lines would raise there. In
    Python 3.14 it has one (python/cpython#148874), which is left out: no code can avoid it.
    """
    points = count()
    is_reached = False

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal is_reached
        if is_reached or event not in ("call", "c_return") or frame.f_code.co_flags & CO_GENERATOR:
            return  # an exception in a generator that is freed would be ignored
        if event == "c_return" and argument.__name__ == "__enter__":
            return
        if next(points) == number:
            is_reached = True
            handler()

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return is_reached


def interrupted(call: Callable[[], Any], number: int) -> bool:
    """Call, and raise KeyboardInterrupt at the point `number`; see `handled`."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    try:
        return handled(call, number, interrupt)
    except KeyboardInterrupt:
        return True
