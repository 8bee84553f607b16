"""A request's logits post-processor, from admission to the executor, which calls it.

The module decides which objects are valid processors, and which names processors have in messages.
"""

from __future__ import annotations

from typing import Any

from gptmanager.errors import InvalidRequestError
from gptmanager.lifecycle.callables import kind_of_deferred


class BoundProcessor:
    """A request's parameters for a processor that is called once in a step, for many requests.

    `owner` is the processor, a `decoding.processors.rows.RowProcessor`. Subclasses add the
    parameters.
    """

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    @property
    def name(self) -> str:
        return name_of(self.owner)


class RequestProcessor:
    """A request's logits post-processor, which the loop only passes to the executor.

    When a paused request starts again, the loop passes the same object, so `kept`, the processor's
    state, survives pauses. If `prepares` is True, the request waits until the processor is ready.
    `post_processor` is None after the request has ended. Two objects are equal if their names are
    equal, because a recording has only the names.
    """

    __slots__ = ("kept", "name", "post_processor", "prepares")

    def __init__(self, post_processor: Any, name: str = "") -> None:
        self.post_processor = post_processor
        self.name = name or name_of(post_processor)
        self.prepares = callable(getattr(post_processor, "prepare", None))
        self.kept: Any = None

    def end(self) -> None:
        """Drop the processor of a request that has ended. Its rows in flight need no processing."""
        self.post_processor = self.kept = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RequestProcessor) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"RequestProcessor({self.name})"


def read_post_processor(value: Any) -> RequestProcessor | None:
    """Return a request's post-processor, or None. Raise InvalidRequestError if it is invalid."""
    if value is None:
        return None
    if problem := problem_of(
        value, "a callable (request_id, logits, tokens, stream, client_id), or "
    ):
        raise InvalidRequestError(f"logits_post_processor is {problem}")
    return RequestProcessor(value)


def problem_of(value: Any, expected: str = "") -> str:
    """Return why a value is not a valid processor, or "" if it is.

    `expected` names valid values other than an object with `process_batch`, for the message.
    """
    if isinstance(value, BoundProcessor):
        return ""
    process = getattr(value, "process_batch", None)
    if not callable(process) and not callable(value):
        kind = type(value).__name__
        if callable(getattr(value, "bind", None)):
            return f"of type {kind}: pass what its bind() returns"
        return f"of type {kind}, expected {expected}an object with a method process_batch"
    deferred = kind_of_deferred(process if callable(process) else value)
    return f"{deferred}, which would never be awaited" if deferred else ""


def is_post_processor(value: Any) -> bool:
    """Return whether a value is a valid processor."""
    return not problem_of(value)


def name_of(processor: Any) -> str:
    """Return the `name` of a processor, if it has one; otherwise its function's or class's name."""
    for attribute in ("name", "__qualname__"):
        name = getattr(processor, attribute, None)
        if isinstance(name, str) and name:
            return name
    return type(processor).__qualname__
