"""`Watch`: which rank has failed, told to all of them by a thread of its own.

Rank 0 hears of every rank, the others of rank 0: it decides who is to blame, so that all say the
same. Knows nothing of what ranks compute.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import orjson

from gptmanager.errors import RankError, response_text
from gptmanager.lifecycle.clock import monotonic
from gptmanager.lifecycle.latch import Latch
from gptmanager.lifecycle.log import logger
from gptmanager.ranks.frames import Frames, Wakener

_BEATS = 4  # in the time after which a rank that is silent has failed
_ANSWER_S = 0.5  # how long rank 0 waits for who is alive to say what it does
_KIND = 0


class Watch:
    """`connections`: those of this rank, by rank. `timeout_s`: how long one may be silent.

    `failure`: what has become of the first rank that failed, the same text on each rank.
    `waiting`: this rank's threads that wait for another now. `on_failure` is called in the watch's
    thread.
    """

    def __init__(
        self, rank: int, timeout_s: float, wakener: Wakener, on_failure: Callable[[], None]
    ) -> None:
        self.failure: RankError | None = None
        self.failed = Latch()
        self.waiting: set[int] = set()  # its threads that wait for another rank
        self.explain: Callable[[int, Any], str] = lambda rank, decided: ""
        self._rank = rank
        self._timeout_s = timeout_s
        self._wakener = wakener
        self._on_failure = on_failure
        self._connections: dict[int, Frames] = {}
        self._heard: dict[int, float] = {}
        self._outbox: list[dict[str, Any]] = []
        self._is_closing = False
        self._expired_at = 0.0  # when it was asked who waits; 0: it was not
        self._expired = ""
        self._answers: dict[int, bool] = {}
        self._thread = threading.Thread(target=self._run, name="gptmanager-ranks", daemon=True)

    def start(self, connections: Mapping[int, Frames]) -> None:
        self._connections = dict(connections)
        self._heard = dict.fromkeys(connections, monotonic())
        self._thread.start()

    # From any thread -------------------------------------------------------------------------

    def tell_failure(self, text: str, decided: Any = None) -> None:
        """This rank has failed: the others are told why. `decided`: what rank 0 is to `explain`."""
        self._post({"failed": text, "decided": decided})

    def tell_blame(self, rank: int, why: str) -> None:
        """Rank 0: another one has failed, which no watch can see."""
        self._post({"blames": [rank, why]})

    def tell_expired(self, what: str) -> None:
        """This rank has waited too long for `what`: rank 0 finds out who is to blame."""
        self._post({"expired": what})

    def close(self) -> None:
        """This rank leaves, and nobody is to blame. What was posted is sent before."""
        self._is_closing = True
        self._wakener.ring()
        if self._thread.ident is None:
            self._wakener.close()
        elif self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _post(self, message: dict[str, Any]) -> None:
        self._outbox.append(message)
        self._wakener.ring()

    # On its own thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:
            logger.exception("the watch over ranks ends")
            self.fail(self._rank, f"can watch no other: {response_text(error)}")
        finally:
            for connection in self._connections.values():
                connection.close()
            self._wakener.close()

    def _watch(self) -> None:
        waits = select.poll()
        waits.register(self._wakener.fileno(), select.POLLIN)
        by_number = {it.fileno(): rank for rank, it in self._connections.items()}
        for number in by_number:
            waits.register(number, select.POLLIN)
        next_beat = 0.0
        while True:
            now = monotonic()
            if now >= next_beat:
                self._send_all({"beat": True})
                next_beat = now + self._timeout_s / _BEATS
            oldest = min(self._heard.values(), default=now)
            due = min(next_beat, self._expired_at or next_beat, oldest + self._timeout_s)
            for number, _ in waits.poll(max(1, int((due - monotonic()) * 1000))):
                rank = by_number.get(number)
                if rank is None:
                    self._wakener.clear()
                elif not self._hear(rank):
                    waits.unregister(number)
                    del by_number[number]
            while self._outbox:
                self._say(self._outbox.pop(0))
            if self._is_closing:
                self._send_all({"bye": True})
                return
            self._judge(monotonic())

    def _hear(self, rank: int) -> bool:
        """Read what there is; False: nothing will come any more."""
        connection = self._connections[rank]
        try:
            while (frame := connection.poll()) is not None:
                self._heard[rank] = monotonic()
                message = orjson.loads(frame.payload)
                if "bye" in message:
                    self._drop(rank)
                    return False
                self._take(rank, message)
        except (EOFError, ValueError) as error:
            self._drop(rank)
            self._blame(rank, f"has died: {error}")
            return False
        return True

    def _take(self, rank: int, message: dict[str, Any]) -> None:
        if "verdict" in message:
            number, why = message["verdict"]
            if self._rank:
                self.fail(int(number), str(why))
            else:
                self._blame(int(number), str(why))
        elif "failed" in message:
            self._blame(rank, self._told(rank, message))
        elif "expired" in message:
            self._ask(f"rank {rank} waits for {message['expired']}")
        elif "ask" in message:
            self._send(rank, {"answer": bool(self.waiting)})
        elif "answer" in message:
            self._answers[rank] = bool(message["answer"])

    def _told(self, rank: int, message: dict[str, Any]) -> str:
        if message["decided"] is None:
            return f"failed: {message['failed']}"
        try:
            return f"{message['failed']}: {self.explain(rank, message['decided'])}"
        except Exception as error:  # the ranks end at any rate
            return f"{message['failed']}: {response_text(error)}"

    def _say(self, message: dict[str, Any]) -> None:
        """Send on a message that another thread of this rank has posted."""
        if self._rank:
            self._send(0, message)
        elif "blames" in message:
            self._blame(*message["blames"])
        elif "failed" in message:
            self._send_all({"verdict": [0, f"failed: {message['failed']}"]})
        elif "expired" in message:
            self._ask(f"rank 0 waits for {message['expired']}")

    def _ask(self, what: str) -> None:
        """Ask which rank does not wait for another."""
        if not self._expired_at:
            self._expired, self._expired_at = what, monotonic() + _ANSWER_S
            self._answers = {0: bool(self.waiting)}
            self._send_all({"ask": True})

    def _judge(self, now: float) -> None:
        for rank, heard in list(self._heard.items()):
            if now - heard > self._timeout_s:
                self._blame(rank, f"has not been heard of for {self._timeout_s:g} s")
        silent = [rank for rank in self._heard if rank not in self._answers]
        if not self._expired_at or (silent and now < self._expired_at):
            return
        self._expired_at = 0.0
        busy = [rank for rank, waits in sorted(self._answers.items()) if not waits]
        after = f"for {self._timeout_s:g} s ({self._expired})"
        if silent:
            self._blame(silent[0], f"has not answered {after}")
        elif busy:
            self._blame(busy[0], f"has kept the others waiting {after}")

    def _blame(self, rank: int, why: str) -> None:
        """Report a failed rank to all, itself included: it may only be stopped, and go on later."""
        if self.failure is None and not self._is_closing:
            self._send_all({"verdict": [rank, why]})
            self.fail(rank, why)

    def fail(self, rank: int, why: str) -> None:
        """This rank knows which one has failed. Of any thread."""
        if self.failure is None:
            self.failure = RankError(f"rank {rank} {why}")
            self.failed.set()
            self._on_failure()

    def _drop(self, rank: int) -> None:
        self._heard.pop(rank, None)

    def _send_all(self, message: dict[str, Any]) -> None:
        for rank in list(self._heard):
            self._send(rank, message)

    def _send(self, rank: int, message: dict[str, Any]) -> None:
        with suppress(EOFError):  # that it is gone is seen by who reads
            self._connections[rank].send(_KIND, orjson.dumps(message))
