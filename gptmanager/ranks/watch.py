"""`Watch`: a thread that notices failed ranks and reports them to all ranks.

Rank 0 is connected to every rank. The other ranks are connected only to rank 0. Rank 0 decides
which rank is to blame, so that all ranks raise the same text.
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

_BEATS = 4  # heartbeats that a rank sends per `timeout_s`
_ANSWER_S = 0.5  # how long rank 0 waits for the answers to "do you wait for another rank?"
_KIND = 0


class Watch:
    """The watch of one rank. A rank that is silent for more than `timeout_s` seconds has failed.

    `failure` is the error of the first rank that failed, with the same text on each rank. `waiting`
    holds this rank's threads that currently wait for another rank. `on_failure` is called in the
    thread that stores the failure, usually the thread of the watch.
    """

    def __init__(
        self, rank: int, timeout_s: float, wakener: Wakener, on_failure: Callable[[], None]
    ) -> None:
        self.failure: RankError | None = None
        self.failed = Latch()
        self.waiting: set[int] = set()
        self.explain: Callable[[int, Any], str] = lambda rank, decided: ""
        self._rank = rank
        self._timeout_s = timeout_s
        self._wakener = wakener
        self._on_failure = on_failure
        self._connections: dict[int, Frames] = {}
        self._heard: dict[int, float] = {}
        self._outbox: list[dict[str, Any]] = []
        self._is_closing = False
        self._poll_until = 0.0  # deadline of answers to "do you wait?"; 0: no question is open
        self._timeout_text = ""
        self._answers: dict[int, bool] = {}  # rank -> whether it waits for another rank
        self._thread = threading.Thread(target=self._run, name="gptmanager-ranks", daemon=True)

    def start(self, connections: Mapping[int, Frames]) -> None:
        self._connections = dict(connections)
        self._heard = dict.fromkeys(connections, monotonic())
        self._thread.start()

    # From any thread -------------------------------------------------------------------------

    def report_failure(self, text: str, decided: Any = None) -> None:
        """Report that this rank has failed. `decided` is passed to rank 0's `explain`."""
        self._post({"failed": text, "decided": decided})

    def report_blame(self, rank: int, why: str) -> None:
        """Rank 0: report that another rank has failed in a way that the watch cannot see."""
        self._post({"blames": [rank, why]})

    def report_timeout(self, what: str) -> None:
        """Report that this rank has waited too long for `what`. Rank 0 finds the rank to blame."""
        self._post({"expired": what})

    def close(self) -> None:
        """Send the posted messages and "bye" to the connected ranks, then stop."""
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
            logger.exception("the thread that watches the other ranks ends")
            self.fail(self._rank, f"cannot watch the others: {response_text(error)}")
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
            due = min(next_beat, self._poll_until or next_beat, oldest + self._timeout_s)
            ready = waits.poll(max(1, int((due - monotonic()) * 1000)))
            self._excuse(monotonic() - max(now, due))
            for number, _ in ready:
                rank = by_number.get(number)
                if rank is None:
                    self._wakener.clear()
                elif not self._read(rank):
                    waits.unregister(number)
                    del by_number[number]
            while self._outbox:
                self._forward(self._outbox.pop(0))
            if self._is_closing:
                self._send_all({"bye": True})
                return
            self._judge(monotonic())

    def _read(self, rank: int) -> bool:
        """Handle the messages that have arrived. Return False if the connection has ended."""
        connection = self._connections[rank]
        try:
            while (frame := connection.poll()) is not None:
                self._heard[rank] = monotonic()
                message = orjson.loads(frame.payload)
                if "bye" in message:
                    self._drop(rank)
                    return False
                self._handle(rank, message)
        except (EOFError, ValueError) as error:
            self._drop(rank)
            self._blame(rank, f"has died: {error}")
            return False
        return True

    def _handle(self, rank: int, message: dict[str, Any]) -> None:
        if "verdict" in message:
            number, why = message["verdict"]
            if self._rank:
                self.fail(int(number), str(why))
            else:
                self._blame(int(number), str(why))
        elif "failed" in message:
            self._blame(rank, self._explained(rank, message))
        elif "expired" in message:
            self._ask(f"rank {rank} waits for {message['expired']}")
        elif "ask" in message:
            self._send(rank, {"answer": bool(self.waiting)})
        elif "answer" in message:
            self._answers[rank] = bool(message["answer"])

    def _explained(self, rank: int, message: dict[str, Any]) -> str:
        if message["decided"] is None:
            return f"failed: {message['failed']}"
        try:
            return f"{message['failed']}: {self.explain(rank, message['decided'])}"
        except Exception as error:  # the ranks end anyway
            return f"{message['failed']}: {response_text(error)}"

    def _forward(self, message: dict[str, Any]) -> None:
        """Handle a message that another thread of this rank has posted."""
        if self._rank:
            self._send(0, message)
        elif "blames" in message:
            self._blame(*message["blames"])
        elif "failed" in message:
            self._send_all({"verdict": [0, f"failed: {message['failed']}"]})
        elif "expired" in message:
            self._ask(f"rank 0 waits for {message['expired']}")

    def _ask(self, what: str) -> None:
        """Ask every rank whether it waits for another rank, unless a question is open."""
        if not self._poll_until:
            self._timeout_text, self._poll_until = what, monotonic() + _ANSWER_S
            self._answers = {0: bool(self.waiting)}
            self._send_all({"ask": True})

    def _excuse(self, late_s: float) -> None:
        """Do not count the time in which this thread did not run: others may have paused too."""
        if late_s > self._timeout_s / _BEATS:
            self._heard = {rank: heard + late_s for rank, heard in self._heard.items()}
            self._poll_until += late_s if self._poll_until else 0.0

    def _judge(self, now: float) -> None:
        for rank, heard in list(self._heard.items()):
            if now - heard > self._timeout_s:
                self._heard[rank] = now  # or `_watch` would never sleep again
                self._blame(rank, f"has not been heard from for {self._timeout_s:g} s")
        silent = [rank for rank in self._heard if rank not in self._answers]
        if not self._poll_until or (silent and now < self._poll_until):
            return
        self._poll_until = 0.0
        busy = [rank for rank, waits in sorted(self._answers.items()) if not waits]
        after = f"for {self._timeout_s:g} s ({self._timeout_text})"
        if silent:
            self._blame(silent[0], f"has not answered {after}")
        elif busy:
            self._blame(busy[0], f"has kept the others waiting {after}")

    def _blame(self, rank: int, why: str) -> None:
        """Report a failed rank to all connected ranks.

        A failed rank that is still connected gets the report, too: it may only have been paused.
        """
        if self.failure is None and not self._is_closing:
            self._send_all({"verdict": [rank, why]})
            self.fail(rank, why)

    def fail(self, rank: int, why: str) -> None:
        """Store that `rank` has failed, and call `on_failure`. Any thread may call this."""
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
        with suppress(EOFError):  # the next read notices that the connection has ended
            self._connections[rank].send(_KIND, orjson.dumps(message))
