"""`GenerationControl`: pauses generation, replaces weights, and releases a manager's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from gptmanager.errors import CallbackError
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.manager.loop_questions import ANSWER_S, LoopQuestions
from gptmanager.manager.weight_updates import NewWeights

_T = TypeVar("_T")


class GenerationControl(LoopQuestions):
    """Calls of a host that trains the model which it serves.

    With several ranks make each call on all of them, except that rank 0 alone decides about
    `pause_generation` and `resume_generation`. If another rank does not make the call within
    `ParallelConfig.timeout_s`, or fails, RankError says so on all ranks.
    """

    def update_weights(
        self, tensors: NewWeights, *, recompute: bool = False, timeout: float | None = None
    ) -> int:
        """Replace weights between two iterations, in place; return the new `weights_version`.

        `tensors`: a mapping or an iterator of (name, tensor), by the checkpoint's names; tensors
        that it lacks stay as they are. Running requests keep their keys and values, or compute
        them again with `recompute`. Blocks cached before are not reused by later requests. A
        manager that is asleep takes the memory of its weights, and sleeps on.

        Raises ConfigError for unknown names and wrong shapes: of a mapping before anything is
        copied. If an iterator fails half-way, no step runs until an update with all tensors is
        complete. Raises CallbackError in a callback, and TimeoutError and ManagerDeadError like
        `explain`.
        """
        update = self._worker.updates.update
        return self._call(
            "update_weights", lambda loop: update(loop, tensors, recompute=recompute), timeout
        )

    @property
    def weights_version(self) -> int:
        """The number of complete updates of the weights."""
        return self._worker.updates.version

    def sleep(self, *, keep_weights: bool = True, timeout: float | None = None) -> None:
        """Release the memory of the weights and of the KV cache, between two iterations.

        Until `wake` no step runs and Get is not called. Active requests stay, and compute their
        contexts again afterwards. `keep_weights`: write the weights to a temporary file (on a
        device: to CPU memory), from which `wake` reads them. Without it they are dropped, and no
        step runs until `update_weights` has passed all tensors, before or after `wake`. The
        weights of an object that implements `Model` are the host's, and stay.

        Raises SleepError if the manager is asleep, ConfigError if the file cannot be written, and
        the other errors of `update_weights`.
        """
        sleep = self._worker.updates.sleep
        self._call("sleep", lambda loop: sleep(loop, keep_weights=keep_weights), timeout)

    def wake(self, timeout: float | None = None) -> None:
        """Take the memory that `sleep` has released, and iterate again.

        Raises SleepError if the manager is not asleep, and errors of memory that is too short: then
        it stays asleep. Other errors are those of `update_weights`.
        """
        self._call("wake", self._worker.updates.wake, timeout)

    @property
    def is_asleep(self) -> bool:
        """Whether `sleep` was called, and not `wake`."""
        return self._worker.updates.is_asleep

    def pause_generation(self, timeout: float | None = ANSWER_S) -> None:
        """Stop iterating until `resume_generation`; return when no step runs. Requests keep their
        memory. `shutdown` also ends the pause.
        """
        self._raise_if_failed()
        self._inbox.is_paused = not self._inbox.defers_calls
        self._ask("pause_generation", lambda loop: None, timeout)

    def resume_generation(self) -> None:
        """End the pause of `pause_generation`."""
        self._inbox.is_paused = False
        self.notify()

    def abort_all(self, timeout: float | None = ANSWER_S) -> int:
        """End all active requests before the next step, like stop signals; return their number.

        Each gets a final response with its tokens so far and the finish reason CANCELLED: during a
        pause or sleep, after its end. Raises the errors of `update_weights`.
        """
        return self._call("abort_all", self._worker.stop_all, timeout)

    def _call(self, name: str, function: Callable[[TokenLoop], _T], timeout: float | None) -> _T:
        """Run a call on the loops of all ranks, between two iterations."""
        self._raise_if_failed()
        if self._worker.is_here:
            raise CallbackError(f"{name} cannot be called in a callback")
        return self._ask(name, function, timeout, is_call=True)
