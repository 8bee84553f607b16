"""What Get returns, and what is owed for it: one final response for each request.

All that a host's objects may do when they are looked at is done here, once: behind this door a
request is a plain `InferenceRequest`. Knows nothing of what becomes of it.
"""

from __future__ import annotations

import reprlib
import threading
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from gptmanager.errors import CallbackError, InvalidRequestError, response_text
from gptmanager.request.inference_request import KEYWORDS, InferenceRequest


def read_id(item: Any) -> int:
    """The id under which an item that Get returned is answered.

    Raises CallbackError, which tells the item's type, if it is no request or has no such id.
    """
    name = type(item).__name__
    try:
        if not isinstance(item, InferenceRequest):
            raise CallbackError(f"an item of type {name}, expected InferenceRequest")
        request_id = item.request_id
        is_integer = isinstance(request_id, (int, np.integer)) and not isinstance(request_id, bool)
        if is_integer and 0 <= (number := int(request_id)) < 2**64:
            return number
    except CallbackError:
        raise
    except BaseException as error:  # noqa: B036 - a host's class
        raise CallbackError(
            f"an item of type {name}, whose request_id cannot be read: {response_text(error)} "
            "(a subclass of InferenceRequest must call super().__init__())"
        ) from error
    raise CallbackError(
        f"an item of type {name}, whose request_id of type {type(request_id).__name__} is no "
        "integer in 0..2**64-1"
    )


def read_request(item: InferenceRequest, request_id: int) -> InferenceRequest:
    """The request as it is now, a plain one whatever its class.

    Raises InvalidRequestError if something of it cannot be read.
    """
    try:
        tensors = item.tensors
        keywords = {name: getattr(item, name) for name in KEYWORDS}
        return InferenceRequest(request_id, tensors, **keywords)
    except BaseException as error:  # noqa: B036 - a host's class
        raise InvalidRequestError(
            f"the request cannot be read: {response_text(error)} (it is a {type(item).__name__}; "
            "a subclass of InferenceRequest must call super().__init__())"
        ) from error


class OwedFinals:
    """The ids under which a final response is due. Safe from any thread.

    An id counts as often as Get returned it: whoever comes under an id that is taken gets a final
    response of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[int, int] = {}

    def owe(self, request_id: int) -> None:
        with self._lock:
            self._counts[request_id] = self._counts.get(request_id, 0) + 1

    def settle(self, request_id: int) -> bool:
        """A final response is about to be sent; False: none is due, it must not be."""
        with self._lock:
            count = self._counts.get(request_id, 0)
            if count > 1:
                self._counts[request_id] = count - 1
            elif count:
                del self._counts[request_id]
            return count > 0

    def beyond(self, known: Iterable[int]) -> list[int]:
        """What is due beyond `known`; an id as often as it is."""
        with self._lock:
            due = Counter(self._counts)
        due.subtract(Counter(known))
        return list(due.elements())


def not_iterable(answer: Any) -> CallbackError:
    """What Get returned is no iterable at all."""
    hint = ", as a function without `return` does" if answer is None else ""
    return CallbackError(
        f"GetInferenceRequests returned {reprlib.repr(answer)}{hint}; expected an iterable of "
        "InferenceRequest"
    )
