"""Send the answers of rank 0's callbacks to all ranks by MPI, for applications under mpirun.

Each answer is sent with two broadcasts: first the length of the message, and then its bytes.
Broadcasts are collective, so all ranks must call the callbacks in the same order, as their managers
do. Messages do not use pickle.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from gptmanager.environment.distribution import install_command, too_old
from gptmanager.errors import CallbackError, ConfigError, InvalidRequestError, response_text
from gptmanager.host.rank_messages import pack_requests, unpack_requests
from gptmanager.host.received_requests import collect_ids, items_of, read_id, read_request
from gptmanager.request.inference_request import InferenceRequest

_LENGTH = struct.Struct("<Q")  # the length of an error's text
_PAUSE_STEP_S, _LONGEST_PAUSE_S = 20e-6, 5e-3


class MpiTransport:
    """Returns the answers of rank 0's callbacks on all ranks of a communicator of mpi4py.

    The default communicator has all ranks that mpirun started.
    """

    def __init__(self, communicator: Any = None) -> None:
        self._communicator = _world() if communicator is None else communicator
        self.is_first = self._communicator.Get_rank() == 0

    def get(
        self, callback: Callable[[int], Iterable[InferenceRequest]] | None, room: int
    ) -> Iterable[InferenceRequest]:
        """Return the answer of rank 0's GetInferenceRequests, which rank 0 calls with `room`.

        If the callback raises an exception, all ranks get the requests that it has yielded before,
        and then an error: rank 0 this exception, the other ranks a CallbackError.
        """
        own, error = _called("GetInferenceRequests", callback, room)
        data, error = self._share(pack_requests(_readable(own)), error, "GetInferenceRequests")
        # rank 0's manager also reports the items that are not sent
        return _answer(own if self.is_first else unpack_requests(data), error)

    def poll(self, callback: Callable[[], Iterable[int]] | None) -> Iterable[int]:
        """Return the answer of rank 0's PollStopSignal, with errors like those of `get`."""

        def stops() -> Iterable[int]:
            found = None if callback is None else callback()
            return () if found is None else found  # a manager reads None as no ids, too

        own, error = _called("PollStopSignal", stops)
        ids: set[int] = set()
        with suppress(CallbackError):  # raised again, and logged, by rank 0's manager
            collect_ids(own, ids)
        packed = np.array([*ids], np.uint64).tobytes()
        data, error = self._share(packed, error, "PollStopSignal")
        return _answer(own if self.is_first else np.frombuffer(data, np.uint64).tolist(), error)

    def _share(
        self, answer: bytes, error: Exception | None, name: str
    ) -> tuple[bytes, Exception | None]:
        """Return rank 0's `answer` and `error`. The other ranks get a CallbackError."""
        text = b"" if error is None else response_text(error).encode()
        data = _LENGTH.pack(len(text)) + text + answer
        length = np.array([len(data)], dtype=np.int64)
        self._broadcast(length)
        buffer = np.zeros(int(length[0]), dtype=np.uint8)
        if self.is_first:
            buffer[:] = np.frombuffer(data, dtype=np.uint8)
        self._broadcast(buffer)
        if self.is_first:
            return answer, error
        data = buffer.tobytes()
        end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        text = data[_LENGTH.size : end]
        failed = CallbackError(f"{name} failed on rank 0: {text.decode()}") if text else None
        return data[end:], failed

    def _broadcast(self, buffer: np.ndarray) -> None:
        """Broadcast in place. Sleep while waiting: a blocking MPI call would keep a core busy."""
        request, pause_s = self._communicator.Ibcast(buffer, root=0), 0.0
        while not request.Test():
            time.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, pause_s + _PAUSE_STEP_S)


def _called(
    name: str, callback: Callable[..., Iterable[Any]] | None, *arguments: Any
) -> tuple[list[Any], Exception | None]:
    """Return the items of the answer of the callback `name`, and the exception that ended them."""
    items: list[Any] = []
    try:
        for item in items_of(name, () if callback is None else callback(*arguments)):
            items.append(item)
    except Exception as error:
        return items, error
    return items, None


def _readable(items: list[Any]) -> Iterator[InferenceRequest]:
    """Yield the requests that rank 0's manager will accept: it refuses those it cannot read."""
    for item in items:
        with suppress(CallbackError, InvalidRequestError):
            yield read_request(item, read_id(item))


def _answer(items: list[Any], error: Exception | None) -> Iterable[Any]:
    """Return `items`, or an iterator that raises `error` after them."""
    if error is None:
        return items
    if not items:
        raise error
    return _raising(items, error)


def _raising(items: list[Any], error: Exception) -> Iterator[Any]:
    yield from items
    raise error


def _world() -> Any:
    if (old := too_old("mpi")) is not None:
        raise ConfigError(f"broadcast(transport='mpi') needs {old}")
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ConfigError(
            f"broadcast(transport='mpi') needs mpi4py: {install_command('mpi')}, and an MPI library"
        ) from error
    return MPI.COMM_WORLD
