"""One item that Get returned, read once: behind this door a request is a plain `InferenceRequest`.

All that a host's objects may do when they are looked at is done here.
"""

from __future__ import annotations

import reprlib
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


def not_iterable(answer: Any) -> CallbackError:
    """What Get returned is no iterable at all."""
    hint = ", as a function without `return` does" if answer is None else ""
    return CallbackError(
        f"GetInferenceRequests returned {reprlib.repr(answer)}{hint}; expected an iterable of "
        "InferenceRequest"
    )
