"""`broadcast`: what rank 0's callbacks answer, on every rank of a model."""

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
    """`(get, poll)` for the manager of each rank: all see what the callbacks of rank 0 answer.

    Rank 0 gives its GetInferenceRequests, and its PollStopSignal if it has one; the other ranks
    give nothing. `transport` None: the managers send the answers, in the one message that they
    exchange an iteration. "mpi": mpi4py does, for hosts under mpirun; extra `mpi`. ConfigError
    where there is none, ValueError for a `transport` that is unknown.
    """
    for name, callback in (("get", get), ("poll", poll)):
        if callback is not None:
            ordinary(name, callback, may_yield=True)
    if transport == "mpi":
        mpi = MpiTransport()
        return functools.partial(mpi.get, get), functools.partial(mpi.poll, poll)
    if transport is not None:
        raise ValueError(f"transport = {transport!r} is neither None nor 'mpi'")
    return Broadcast(get), Broadcast(poll)
