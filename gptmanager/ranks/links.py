"""`Links`: the messages between the managers of all ranks. Tensors go through `Collectives`.

Each rank has two connections to rank 0. One carries the messages of the managers' loops, in order.
The other carries the messages of `Watch`, which notices failed ranks. A wait for a rank that has
failed ends with a RankError that names the rank.
"""

from __future__ import annotations

import math
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum, auto
from typing import Any, NoReturn

import orjson

from gptmanager.environment.machine.loopback import is_loopback
from gptmanager.errors import RankError, response_text
from gptmanager.lifecycle.clock import Patience
from gptmanager.ranks.frames import Frame, Frames, Wakener
from gptmanager.ranks.meeting import Blame, Channel, Store, call, meet
from gptmanager.ranks.watch import Watch

_GRACE_S = 0.3  # added to timeouts, so that the watch notices a failure before they expire
_VERDICT_S = 1.2  # how long a rank that has lost a connection waits for the watch's verdict
_SEND_S = 0.2  # how long the watch waits until a connection accepts a message
_PAUSE_S = 0.1  # time between a wait's checks for a failed rank


class Message(IntEnum):
    """The kinds of messages between loops."""

    EXCHANGE = auto()  # data that managers exchange at the start
    INTAKE = auto()  # the intake of rank 0, such as requests: an iteration begins
    ASK = auto()  # call the callback GetInferenceRequests on every rank
    DECISION = auto()  # digest of rank 0's decisions: a step begins
    RESULT = auto()  # the result of a step
    ABORT = auto()  # rank 0 ends its requests with an error
    END = auto()  # rank 0 has answered all requests
    CALL = auto()  # a call to rank 0's manager that all ranks must make
    PAUSED = auto()  # no iteration begins yet; sent again and again


class _Wait(threading.local):
    """The event that a thread waits for (`what`, for error texts), and for how long."""

    what = ""
    patience = Patience(math.inf)


class Links:
    """The connections of one rank to the other ranks.

    All ranks share `store`. `host` is the address of rank 0. `timeout_s` is how long a rank may be
    silent, or keep other ranks waiting. The constructor returns when all ranks are connected, and
    raises RankError if they are not connected within `boot_s` seconds. `on_failure` is called in
    another thread when a rank has failed.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store,
        host: str,
        *,
        timeout_s: float,
        boot_s: float,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.size = rank, size
        self.timeout_s = timeout_s
        self._host_failure = on_failure
        # ends collectives for which no CPU thread waits
        self.abort_collectives: Callable[[], None] = lambda: None
        # runs this rank's part of a call that rank 0 has announced by its name
        self.on_call: Callable[[str], None] = lambda name: None
        self._wakener = Wakener()
        self._watch = Watch(rank, timeout_s, Wakener(), self._on_failure)
        self._wait = _Wait()
        self.is_closed = False
        self._others: list[Frames] = []
        self._loops: dict[int, Frames] = {}
        watched: dict[int, Frames] = {}
        blame: Blame | None = None
        try:
            if rank == 0:
                found, blame = meet(store, host, size, boot_s)
            else:
                found = call(store, host, rank, boot_s)
            for (other, channel), connection in found.items():
                if channel is Channel.WATCH:
                    watched[other] = Frames(connection, None, _give_up, _SEND_S)
                else:
                    self._loops[other] = Frames(connection, self._wakener, self._between, _PAUSE_S)
            self._watch.start(watched)
            if blame is not None:
                self._watch.report_blame(*blame)
                self._watch.failed.wait(_VERDICT_S)
                self.check()
        except BaseException as error:
            self.fail(error, response_text(error))
            raise

    # From any thread -------------------------------------------------------------------------

    @property
    def failure(self) -> RankError | None:
        """The error of the first rank that failed, or None."""
        return self._watch.failure

    @property
    def address(self) -> str:
        """The address at which the others reach this rank.

        If a rank is on another machine, this is not a loopback address.
        """
        known = sorted((it.address for it in self._loops.values()), key=is_loopback)
        return known[0]

    def wake(self) -> None:
        """Make a waiting `receive(may_be_woken=True)` return."""
        self._wakener.ring()

    # On the loop's thread; `wait` also on the thread of its forward passes --------------------

    def check(self) -> None:
        """Raise RankError if a rank has failed."""
        if self._watch.failure is not None:
            raise self._watch.failure

    def send(self, kind: Message, payload: bytes = b"") -> None:
        """Send a message to rank 0, or from rank 0 to all.

        Raise RankError if a rank has failed.
        """
        self.check()
        self._begin(f"room for a message ({kind.name})")
        try:
            for connection in self._loops.values():
                connection.send(kind, payload)
        except EOFError as error:
            raise self._lost(error) from error
        finally:
            self._end()

    def receive(self, *, from_rank: int = 0, may_be_woken: bool = False) -> Frame | None:
        """Return the next message of a rank.

        Raise RankError with the rank to blame if no message arrives in time. With `may_be_woken`,
        wait without a time limit, and return None after a call of `wake`.
        """
        self.check()
        self._begin(f"a message of rank {from_rank}", bounded=not may_be_woken)
        try:
            return self._loops[from_rank].receive(returns_when_rung=may_be_woken)
        except EOFError as error:
            raise self._lost(error) from error
        finally:
            self._end()

    def exchange(self, payload: bytes) -> list[bytes]:
        """Send `payload` to all ranks, and return the payloads of all ranks, by rank.

        The wait for these payloads has no time limit, because ranks may start slowly.
        """
        kind = Message.EXCHANGE
        if self.rank:
            self.send(kind, payload)
            return _split(self._received(0, kind))
        parts = [payload, *(self._received(rank, kind) for rank in range(1, self.size))]
        self.send(kind, _joined(parts))
        return parts

    def wait(self, work: Any, what: str = "a collective") -> None:
        """Wait for a `torch.distributed.Work` or similar. Raise RankError if a rank has failed."""
        self._begin(what)
        try:
            while True:
                is_over = work.is_completed()
                try:
                    work.wait(timedelta(seconds=_PAUSE_S))
                    return
                except RuntimeError as error:  # the work failed, or is not done yet
                    if is_over:
                        raise self._lost(error) from error
                self._between()
        finally:
            self._end()

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Limit the time of the waits in a `with` block. Errors name `what`.

        The limit applies to waits on the `Frames` that the method `frames` returns.
        """
        self._begin(what)
        try:
            yield
        except EOFError as error:
            raise self._lost(error) from error
        finally:
            self._end()

    def frames(self, connection: socket.socket) -> Frames:
        """Return `Frames` on a further connection to a rank; `Links.close` also closes it.

        A wait on it ends with RankError when a rank has failed.
        """
        frames = Frames(connection, None, self._between, _PAUSE_S)
        self._others.append(frames)
        return frames

    def explain_difference(self, explain: Callable[[int, Any], str]) -> None:
        """Set rank 0's function `explain(rank, data)`, which is called in another thread.

        The function returns how the decisions of a rank (`data`) differ from rank 0's decisions.
        """
        self._watch.explain = explain

    def blame(self, rank: int, why: str) -> NoReturn:
        """Raise RankError, because `rank` has failed. All other ranks must know this already."""
        self._watch.fail(rank, why)
        self.check()
        raise AssertionError

    def report_difference(self, text: str, data: bytes) -> NoReturn:
        """Raise RankError: this rank's decisions (`data`) differ from rank 0's.

        The error includes rank 0's explanation of the difference.
        """
        self._watch.report_failure(text, orjson.loads(data))
        self._raise_verdict(text)

    def give_up(self, text: str) -> NoReturn:
        """Raise RankError: this rank cannot continue. All ranks raise the same text."""
        self._watch.report_failure(text)
        self._raise_verdict(f"failed: {text}")

    def _raise_verdict(self, text: str) -> NoReturn:
        self._watch.failed.wait(_VERDICT_S)
        self.check()
        raise RankError(f"rank {self.rank} {text}")

    # The end ---------------------------------------------------------------------------------

    def fail(self, error: BaseException, text: str) -> None:
        """Report that this rank ends with `error`, so that all ranks end. Then call `close`.

        An error that another rank has caused is not reported again.
        """
        if error is not self._watch.failure:
            self._watch.report_failure(text)
        self.close()

    def close(self) -> None:
        """Close all connections. Idempotent."""
        self.is_closed = True
        self.on_call = lambda name: None
        self._watch.close()
        for connection in (*self._loops.values(), *self._others):
            connection.close()
        self._wakener.close()

    # Waiting ---------------------------------------------------------------------------------

    def _begin(self, what: str, bounded: bool = True) -> None:
        self._wait.what = what
        self._wait.patience = Patience(self.timeout_s + _GRACE_S if bounded else math.inf)
        self._watch.waiting.add(threading.get_ident())

    def _end(self) -> None:
        self._watch.waiting.discard(threading.get_ident())

    def _between(self) -> None:
        self.check()
        if self._wait.patience.is_over():
            self._watch.report_timeout(self._wait.what)
            self._watch.failed.wait(_VERDICT_S)
            self.check()
            raise RankError(
                f"rank {self.rank} has waited {self.timeout_s:g} s for {self._wait.what}, and all "
                "ranks wait for each other"
            )

    def _lost(self, error: BaseException) -> RankError:
        """Return the error that explains why a connection or a collective broke."""
        self._watch.failed.wait(_VERDICT_S)
        return self._watch.failure or RankError(
            f"rank {self.rank} has lost {self._wait.what}: {error}"
        )

    def _received(self, rank: int, kind: Message) -> bytes:
        frame = None
        while frame is None:  # no time limit: only a failed rank ends this wait
            frame = self.receive(from_rank=rank, may_be_woken=True)
        if frame.kind != kind:
            raise RankError(f"rank {rank} sent message {frame.kind}, expected {kind.name}")
        return frame.payload

    def _on_failure(self) -> None:
        self.abort_collectives()
        self._wakener.ring()
        self._host_failure()


def _give_up() -> None:
    """End a wait of the watch: a connection that does not accept a few bytes hangs."""
    raise EOFError("it accepts no message")


def _joined(parts: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def _split(data: bytes) -> list[bytes]:
    parts, start = [], 0
    while start < len(data):
        (size,) = struct.unpack_from("<I", data, start)
        parts.append(data[start + 4 : start + 4 + size])
        start += 4 + size
    return parts
