"""Send the answers of rank 0's callbacks to all ranks by MPI, for applications under mpirun.

Each answer is sent with two broadcasts: first the length of the message, and then its bytes.
Broadcasts are collective, so all ranks must call the callbacks in the same order, as their managers
do. Messages do not use pickle.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from gptmanager.environment.distribution import install_command
from gptmanager.errors import CallbackError, ConfigError, response_text
from gptmanager.host.rank_messages import pack_requests, unpack_requests
from gptmanager.request.inference_request import InferenceRequest

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
    ) -> list[InferenceRequest]:
        """Return the answer of rank 0's GetInferenceRequests, which rank 0 calls with `room`."""
        own: list[InferenceRequest] = []

        def answer() -> bytes:
            own.extend(() if callback is None else callback(room))
            return pack_requests(own)

        data = self._share(answer, "GetInferenceRequests")
        return own if self.is_first else unpack_requests(data)

    def poll(self, callback: Callable[[], Iterable[int]] | None) -> set[int]:
        """Return the answer of rank 0's PollStopSignal."""

        def answer() -> bytes:
            ids = () if callback is None else callback()
            return np.array(sorted(ids), dtype=np.uint64).tobytes()

        return set(np.frombuffer(self._share(answer, "PollStopSignal"), dtype=np.uint64).tolist())

    def _share(self, answer: Callable[[], bytes], name: str) -> bytes:
        """Return the result of rank 0's `answer` on all ranks.

        If `answer` raises an exception, rank 0 raises the same exception, and the other ranks raise
        a CallbackError.
        """
        data, error = b"", None
        if self.is_first:
            try:
                data = b"\0" + answer()
            except Exception as raised:
                data, error = b"\1" + response_text(raised).encode(), raised
        length = np.array([len(data)], dtype=np.int64)
        self._broadcast(length)
        buffer = np.zeros(int(length[0]), dtype=np.uint8)
        if self.is_first:
            buffer[:] = np.frombuffer(data, dtype=np.uint8)
        self._broadcast(buffer)
        if error is not None:
            raise error
        data = buffer.tobytes()
        if data[:1] == b"\1":
            raise CallbackError(f"{name} failed on rank 0: {data[1:].decode()}")
        return data[1:]

    def _broadcast(self, buffer: np.ndarray) -> None:
        """Broadcast in place. Sleep while waiting: a blocking MPI call would keep a core busy."""
        request, pause_s = self._communicator.Ibcast(buffer, root=0), 0.0
        while not request.Test():
            time.sleep(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, pause_s + _PAUSE_STEP_S)


def _world() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise ConfigError(
            f"broadcast(transport='mpi') needs mpi4py: {install_command('mpi')}, and an MPI library"
        ) from error
    return MPI.COMM_WORLD
