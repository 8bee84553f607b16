"""`broadcast`: sends the answers of rank 0's callbacks to all ranks of a model."""

from __future__ import annotations

import functools
from typing import Literal

from gptmanager.callbacks.ranks.mpi_transport import MpiTransport
from gptmanager.host.broadcast import Broadcast
from gptmanager.lifecycle.callables import ordinary
from gptmanager.request.inference_request import (
    GetInferenceRequestsCallback,
    PollStopSignalCallback,
)

_Callbacks = tuple[GetInferenceRequestsCallback, PollStopSignalCallback]


def broadcast(
    get: GetInferenceRequestsCallback | None = None,
    poll: PollStopSignalCallback | None = None,
    transport: Literal["mpi"] | None = None,
) -> _Callbacks:
    """Return callbacks `(get, poll)` for this rank's manager. They return rank 0's answers.

    Rank 0 passes its GetInferenceRequests, and its PollStopSignal if it has one; the other ranks
    pass neither. By default the managers send the answers in the message that they exchange in each
    iteration. With `transport="mpi"` mpi4py sends them, for applications under mpirun; install the
    extra `mpi`. Raise ConfigError if mpi4py is needed but not installed, and ValueError for an
    unknown `transport`.
    """
    for name, callback in (("get", get), ("poll", poll)):
        if callback is not None:
            ordinary(name, callback, may_yield=True)
    if transport == "mpi":
        mpi = MpiTransport()
        return functools.partial(mpi.get, get), functools.partial(mpi.poll, poll)
    if transport is not None:
        raise ValueError(f"transport = {transport!r} must be None or 'mpi'")
    return Broadcast(get), Broadcast(poll)
