"""The states of a manager, its health, and the error for its requests after the loop has failed."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import Enum

from gptmanager.errors import GptManagerError, ManagerDeadError, response_text
from gptmanager.lifecycle.latch import Latch
from gptmanager.lifecycle.watchdog import CallbackLatency


class ManagerState(Enum):
    """The states of a manager. `NEXT_MANAGER_STATES` has the changes that are allowed."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


_ENDS = frozenset({ManagerState.STOPPED, ManagerState.FAILED})
NEXT_MANAGER_STATES: dict[ManagerState, frozenset[ManagerState]] = {
    ManagerState.STARTING: _ENDS | {ManagerState.RUNNING},
    ManagerState.RUNNING: _ENDS | {ManagerState.DRAINING},
    ManagerState.DRAINING: _ENDS,
    ManagerState.STOPPED: frozenset(),
    ManagerState.FAILED: frozenset(),
}


class LoopAbandoned(BaseException):
    """Raised in the loop's thread after the watchdog has ended the manager."""


class Lifecycle:
    """The state of a manager. Until `leave` or `abandon`, the loop's thread changes the state.

    Reading the state needs no lock, so a signal handler may read the state at any time.
    """

    def __init__(self) -> None:
        self.state = ManagerState.STARTING
        self.exception: BaseException | None = None
        self.ended = Latch()
        self.is_abandoned = False
        self._is_left = False
        self._lock = threading.Lock()

    # On the loop's thread: each raises LoopAbandoned if the watchdog has ended the manager ----

    def check(self) -> None:
        """Raise LoopAbandoned if the watchdog has ended the manager."""
        if self.is_abandoned:
            raise LoopAbandoned

    def move_to(self, state: ManagerState) -> None:
        """Change the state. Raise RuntimeError for a change not in NEXT_MANAGER_STATES."""
        with self._lock:
            self.check()
            self._move_to(state)

    def fail(self, error: BaseException) -> None:
        """Set the state to FAILED because of `error`."""
        with self._lock:
            self.check()
            self.exception = error
            self._move_to(ManagerState.FAILED)

    def leave(self, state: ManagerState) -> None:
        """Set the last state. From now on the loop cannot be abandoned."""
        with self._lock:
            self.check()
            self._move_to(state)
            self._is_left = True

    # On the watchdog's thread -----------------------------------------------------------------

    def abandon(self, error: BaseException) -> bool:
        """End the manager in place of the loop's thread, with state FAILED because of `error`.

        Return False, and change nothing, after `leave` or an earlier call of `abandon`.
        """
        with self._lock:
            if self._is_left or self.is_abandoned:
                return False
            self.is_abandoned = True
            if self.state is not ManagerState.FAILED:
                self.exception = error
                self._move_to(ManagerState.FAILED)
            return True

    def _move_to(self, state: ManagerState) -> None:
        if state is not self.state:
            if state not in NEXT_MANAGER_STATES[self.state]:
                raise RuntimeError(f"{self.state} cannot become {state}")
            self.state = state


@dataclass(frozen=True, slots=True)
class Health:
    """The health of a manager.

    `alive` means that the manager has not ended. `progressing` means that no request is active,
    that generation is paused or the manager asleep, or that active requests have waited for the end
    of a step for less than ten seconds. `accepting` means that GetInferenceRequests may be called.
    After the end, and in a forked process, all three are False.
    `num_active` is the number of active requests. `last_step_age_s` is the number of seconds since
    the last step ended, or None before the end of the first step. `callbacks` has the latencies of
    each callback by name. `total_blocks` is the number of blocks of the KV cache, and `free_blocks`
    the number of them that are free.
    """

    alive: bool
    progressing: bool
    accepting: bool
    num_active: int
    last_step_age_s: float | None
    callbacks: dict[str, CallbackLatency]
    total_blocks: int
    free_blocks: int


def as_final(error: BaseException) -> GptManagerError:
    """Return the error that every active request gets after the loop has failed with `error`."""
    if isinstance(error, GptManagerError):
        return error
    return ManagerDeadError(
        f"Encountered an error in forwardAsync function: {response_text(error)}"
    )
