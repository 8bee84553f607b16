"""`Receiver`: holds requests that Get (GetInferenceRequests) returned, until the next intake.

Reading an attribute of a host's object may run any code, so each is read only here, once.
Afterwards a request is a plain `InferenceRequest`. A request is owed a final response from the
moment that its id is known.
"""

from __future__ import annotations

import reprlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import suppress
from typing import Any

import numpy as np

from gptmanager.arguments import as_integer
from gptmanager.errors import CallbackError, InvalidRequestError, response_text
from gptmanager.lifecycle.state import Lifecycle
from gptmanager.request.arrays import refuse_masked
from gptmanager.request.inference_request import KEYWORDS, InferenceRequest
from gptmanager.step import Progress

MAX_YIELDED = 100_000  # items of an answer without a length, such as a generator: it may be endless


class OwedFinals:
    """The ids of requests that are owed a final response. Any thread may call the methods.

    An id counts once for each time that Get returned it, because each request gets a final
    response.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[int, int] = {}

    def owe(self, request_id: int) -> None:
        with self._lock:
            self._counts[request_id] = self._counts.get(request_id, 0) + 1

    def settle(self, request_id: int) -> bool:
        """Record that a final response is about to be sent.

        Return False if no response is owed: then the caller must not send the response.
        """
        with self._lock:
            count = self._counts.get(request_id, 0)
            if count > 1:
                self._counts[request_id] = count - 1
            elif count:
                del self._counts[request_id]
            return count > 0

    def count(self, request_id: int) -> int:
        """Return how many requests with this id are owed a final response."""
        return self._counts.get(request_id, 0)

    def beyond(self, known: Iterable[int]) -> list[int]:
        """Return the owed ids minus the ids in `known`. Both may contain an id several times."""
        with self._lock:
            due = Counter(self._counts)
        due.subtract(Counter(known))
        return list(due.elements())


class Receiver:
    """Reads what Get returned.

    `returned` has the items that are not read yet, and `received` the requests for the next intake.
    `resumed` has the progress of requests that a journal has restored.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self.returned: deque[Any] = deque()
        self.received: list[InferenceRequest] = []
        self.resumed: list[Progress] = []
        self.owed = OwedFinals()
        self._lifecycle = lifecycle
        self._lock = threading.Lock()  # held while an item becomes an owed request

    def receive(self, refuse: Callable[[int, InvalidRequestError], None]) -> CallbackError | None:
        """Read what Get has returned. Return an error if some items were not requests.

        `refuse` answers a request that cannot be read.
        """
        num_foreign, first = 0, ""
        while self.returned:
            item = self.returned[0]
            try:
                request_id = read_id(item)
            except CallbackError as error:
                self.returned.popleft()
                num_foreign, first = num_foreign + 1, first or str(error)
                continue
            with self._lock:
                self._lifecycle.check()  # raises for an abandoned loop: its requests are answered
                self.owed.owe(request_id)
                self.returned.popleft()
            try:
                self.received.append(read_request(item, request_id))
            except InvalidRequestError as error:
                refuse(request_id, error)
        if not num_foreign:
            return None
        more = f" (and {num_foreign - 1} more)" if num_foreign > 1 else ""
        return CallbackError(f"GetInferenceRequests returned {first}{more}")

    def is_alone(self, request: InferenceRequest) -> bool:
        """Return whether no other unanswered request has the id of a received one."""
        return self.owed.count(request.request_id) == 1

    def restore(self, requests: list[InferenceRequest], resumed: list[Progress]) -> None:
        """Receive the requests of a journal, before Get is called."""
        for request in requests:
            self.owed.owe(request.request_id)
        self.received, self.resumed = requests, resumed

    def owe_returned(self, *, only_plain: bool) -> None:
        """Record each returned item as owed a final response, because it will not be received.

        With `only_plain`, an item of a type other than InferenceRequest itself is not read, and
        stays in `returned`. Any thread may call this method.
        """
        with self._lock:
            for item in [self.returned.popleft() for _ in range(len(self.returned))]:
                if only_plain and type(item) is not InferenceRequest:
                    self.returned.append(item)
                    continue
                with suppress(CallbackError):  # not a request
                    self.owed.owe(read_id(item))


def read_id(item: Any) -> int:
    """Return the id of an item that Get returned.

    Raise CallbackError, which names the item's type, if the item is not a request with a valid id.
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
            f"an item of type {name} with a request_id that cannot be read: {response_text(error)} "
            "(a subclass of InferenceRequest must call super().__init__())"
        ) from error
    raise CallbackError(
        f"an item of type {name}: its request_id, of type {type(request_id).__name__}, must be an "
        "integer in 0..2**64-1"
    )


def read_request(item: InferenceRequest, request_id: int) -> InferenceRequest:
    """Return a plain `InferenceRequest` with the fields of `item`, which may be of a subclass.

    Raise InvalidRequestError if a field cannot be read.
    """
    try:
        tensors = item.tensors
        keywords = {name: getattr(item, name) for name in KEYWORDS}
        request = InferenceRequest(request_id, tensors, **keywords)
    except BaseException as error:  # noqa: B036 - a host's class
        raise InvalidRequestError(
            f"the request cannot be read: {response_text(error)} (it is a {type(item).__name__}; "
            "a subclass of InferenceRequest must call super().__init__())"
        ) from error
    refuse_masked(request.tensors)
    return request


def items_of(name: str, answer: Any) -> Iterator[Any]:
    """Return an iterator over the items that the callback `name` has returned.

    If an answer without a length has more than `MAX_YIELDED` items, the iterator returns one more,
    and then raises CallbackError. Raise TypeError if the answer is not iterable.
    """
    items = iter(answer)
    return items if isinstance(answer, Sized) else _limited(name, items)


def _limited(name: str, items: Iterator[Any]) -> Iterator[Any]:
    for count, item in enumerate(items, 1):
        yield item  # also the one too many: it cannot be given back
        if count > MAX_YIELDED:
            raise CallbackError(
                f"{name} has yielded more than {MAX_YIELDED} items: the rest is not read; return a "
                "list, or yield fewer items in each call"
            )


def collect_ids(stops: Any, into: set[int]) -> None:
    """Add the ids that PollStopSignal returned. Raise CallbackError for other values.

    Integers that no request can have as its id are left out.
    """
    try:
        if isinstance(stops, (bytes, bytearray)):  # its items would be integers
            raise TypeError
        ids, foreign = items_of("PollStopSignal", stops), []
    except TypeError:
        ids, foreign = iter(()), [stops]
    for stop in ids:
        try:
            request_id = as_integer(stop)
        except TypeError:
            foreign.append(stop)
            continue
        if 0 <= request_id < 2**64:
            into.add(request_id)
    if foreign:
        raise CallbackError(
            f"PollStopSignal returned {reprlib.repr(foreign[0])} of type "
            f"{type(foreign[0]).__name__}, expected an iterable of request ids, which are integers"
        )


def not_iterable(answer: Any) -> CallbackError:
    """Return the error for an answer of Get that is not iterable."""
    hint = ", as a function without `return` does" if answer is None else ""
    return CallbackError(
        f"GetInferenceRequests returned {reprlib.repr(answer)}{hint}; expected an iterable of "
        "InferenceRequest"
    )
