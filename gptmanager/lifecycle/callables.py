"""Checks the callables of a host: they accept their arguments, and finish their work in a call.

A call of a coroutine function only returns a coroutine. The manager's loop does not await the
coroutine, so the work would never be done, without any error. Coroutine functions are therefore
refused, and a returned coroutine is an error. The same holds for generators.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, TypeVar

from gptmanager.errors import CallbackError, ConfigError

_T = TypeVar("_T")

# What callables are called with. A wrong signature would be an error in each call.
_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "get_inference_requests_cb": ("max_num_requests",),
    "send_response_cb": ("request_id", "tensors", "is_final", "error"),
    "poll_stop_signal_cb": (),
    "return_batch_manager_stats_cb": ("json",),
    "OptionalParams.on_progress": ("stage", "done", "total"),
    "OptionalParams.restore_cb": ("request_id",),
    "OptionalParams.restore_processor_cb": ("request_id", "client_id"),
    "see": ("event",),
}
READY = frozenset({list, tuple, set, frozenset})  # types of most answers: these have a length
_HINT = (
    "pass an ordinary function, which does its work when it is called (for asyncio, one that "
    "calls loop.call_soon_threadsafe)"
)


class UnfinishedAnswer(CallbackError):
    """A callback returned a value that has to be awaited or iterated."""


def ordinary(name: str, function: _T, *, may_yield: bool = False) -> _T:
    """Return `function` if a call does the work of the function.

    Raise ConfigError if `function` is not callable, if a call only returns a coroutine, an async
    generator or a generator, or if it does not accept the arguments of the option `name`. With
    `may_yield`, a generator is allowed.
    """
    if not callable(function):
        raise ConfigError(f"{name} = {function!r} is not callable")
    kind = kind_of_deferred(function, may_yield=may_yield)
    if kind:
        raise ConfigError(f"{name} = {function!r} is {kind}: {_HINT}")
    arguments = _ARGUMENTS.get(name)
    if arguments is not None and (problem := mismatch(function, arguments)):
        raise ConfigError(
            f"{name} = {function!r} must accept the arguments ({', '.join(arguments)}): {problem}"
        )
    return function


def mismatch(
    function: Callable[..., Any], arguments: Sequence[str] = (), keywords: Iterable[str] = ()
) -> str:
    """Return why a call with `arguments` and `keywords` would raise TypeError, or "".

    A function without a known signature, such as some of C, is not checked.
    """
    try:
        if hasattr(function, "__signature__"):  # a decorator may have copied another function's
            return ""
        signature = inspect.signature(function, follow_wrapped=False)
    except Exception:
        return ""
    try:
        signature.bind(*arguments, **dict.fromkeys(keywords))
    except TypeError as error:
        return str(error)
    return ""


def required(name: str, callback: Any, *, may_yield: bool = False) -> Any:
    """Return a mandatory callback. Raise ConfigError if it is None, or if `ordinary` raises."""
    if callback is None:
        raise ConfigError(f"{name} is mandatory")
    return ordinary(name, callback, may_yield=may_yield)


def optional(name: str, callback: Any, *, may_yield: bool = False) -> Any:
    """Return an optional callback, or None. Raise ConfigError if `ordinary` does."""
    return None if callback is None else ordinary(name, callback, may_yield=may_yield)


def kind_of_deferred(function: Any, *, may_yield: bool = False) -> str:
    """Return a description such as "a coroutine function", or "" for an ordinary function.

    With `may_yield`, generator functions count as ordinary. Partial functions, bound methods and
    objects with `__call__` are unwrapped.
    """
    while isinstance(function, functools.partial):
        function = function.func
    if not (inspect.isroutine(function) or inspect.isclass(function)):
        function = type(function).__call__
    if inspect.iscoroutinefunction(function):
        return "a coroutine function"
    if inspect.isasyncgenfunction(function):
        return "an async generator function"
    if inspect.isgeneratorfunction(function) and not may_yield:
        return "a generator function"
    return ""


def check_answer(name: str, answer: Any, *, may_yield: bool = False) -> None:
    """Raise UnfinishedAnswer if `answer`, which `name` returned, has to be awaited or iterated.

    With `may_yield`, a generator is accepted. A refused coroutine is closed, so that Python does
    not warn that it was never awaited.
    """
    if answer is None:
        return
    is_generator = inspect.isgenerator(answer) and not may_yield
    if is_generator or inspect.isawaitable(answer) or inspect.isasyncgen(answer):
        if inspect.iscoroutine(answer) or inspect.isgenerator(answer):
            answer.close()
        kind = type(answer).__name__
        article = "an" if kind[0] in "aeiou" else "a"  # for example "an async_generator"
        raise UnfinishedAnswer(f"{name} returned {article} {kind}: {_HINT}")


class _ItemsOf(Iterable[_T]):
    """Items of an answer that has a length, such as a deque: a manager limits only generators."""

    def __init__(self, answer: Sized, items: Iterator[_T]) -> None:
        self._answer = answer
        self._items = items

    def __iter__(self) -> Iterator[_T]:
        return self._items

    def __len__(self) -> int:
        return len(self._answer)


def passed_on(answer: Any, items: Iterator[_T]) -> Iterable[_T]:
    """Return `items`, which a wrapper of a callback passes on from the callback's `answer`.

    They have a length if the answer has one, because a manager limits what a generator may yield.
    """
    if type(answer) in READY:
        return [*items]
    # not a list: an error of the answer's iterator would lose the items before it
    return _ItemsOf(answer, items) if isinstance(answer, Sized) else items


def checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `function`, and checks the result with `check_answer`.

    Raise ConfigError if `ordinary` does.
    """
    ordinary(name, function)

    @functools.wraps(function, updated=())
    def call(*arguments: Any) -> Any:
        answer = function(*arguments)
        check_answer(name, answer)
        return answer

    return call
