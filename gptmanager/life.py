"""The life of a manager, how it says that it is well, and what it says at a bad end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gptmanager.errors import GptManagerError, ManagerDeadError, response_text
from gptmanager.watchdog import CallbackLatency


class ManagerState(Enum):
    """Life of a manager."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


NEXT_MANAGER_STATES: dict[ManagerState, frozenset[ManagerState]] = {
    ManagerState.STARTING: frozenset(
        {ManagerState.RUNNING, ManagerState.STOPPED, ManagerState.FAILED}
    ),
    ManagerState.RUNNING: frozenset(
        {ManagerState.DRAINING, ManagerState.STOPPED, ManagerState.FAILED}
    ),
    ManagerState.DRAINING: frozenset({ManagerState.STOPPED, ManagerState.FAILED}),
    ManagerState.STOPPED: frozenset(),
    ManagerState.FAILED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class Health:
    """`alive`: the loop thread runs. `progressing`: nothing is active, or the last step is less
    than ten seconds old. `last_step_age_s`: seconds since the last step ended, None: none yet.
    `accepting`: Get is being called. `callbacks`: latency by callback name.
    """

    alive: bool
    progressing: bool
    accepting: bool
    num_active: int
    last_step_age_s: float | None
    callbacks: dict[str, CallbackLatency]


def as_final(error: BaseException) -> GptManagerError:
    """The error that every active request gets when the loop has failed."""
    if isinstance(error, GptManagerError):
        return error
    return ManagerDeadError(
        f"Encountered an error in forwardAsync function: {response_text(error)}"
    )
