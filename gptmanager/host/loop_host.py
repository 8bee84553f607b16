"""`LoopHost`: a host as a manager's worker sees it. `Turn`: the next action of a loop."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Protocol

from gptmanager.step import Host


class Turn(Enum):
    """The next action of a loop."""

    ITERATE = "iterate"
    PAUSE = "pause"  # rank 0 is paused: do not iterate
    DRAIN = "drain"  # iterate without new requests
    END = "end"  # every request has got its final response
    ABORT = "abort"  # end all requests with an error


class LoopHost(Host, Protocol):
    """The host of a loop: a `CallbackHost`, or the host of one of several ranks."""

    def await_turn(self, *, ends: bool, aborts: bool, is_active: Callable[[], bool]) -> Turn:
        """Return what the loop does next. Ranks other than 0 wait for rank 0 first.

        `ends` and `aborts` say whether this manager was asked to end or abort. `is_active` returns
        whether the loop has requests or pending steps, which a call on all ranks may change. Raise
        RankError when a rank has failed.
        """

    def pause_s(self, idle_poll_s: float | None, *, is_active: bool) -> float | None:
        """Return how many seconds an idle loop sleeps before it calls `await_turn` again."""

    def peek(self, room: int | None) -> bool:
        """Return whether an idle loop, which can accept `room` requests, has something to fetch."""

    def stop(self, error: BaseException) -> None:
        """Accept no more requests, because the loop has failed with `error`.

        Other ranks fail as well.
        """

    def release(self) -> None:
        """Drop the loop, its executor and the connections to other ranks."""
