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
    """The calls of a program that trains the model which the manager serves.

    With several ranks, `pause_generation` and `resume_generation` have an effect only on rank 0,
    which pauses all ranks. Every other call must be made on every rank. If it fails on one rank, or
    is not made on one rank within `ParallelConfig.timeout_s`, the other ranks raise RankError.
    """

    def update_weights(
        self, tensors: NewWeights, *, recompute: bool = False, timeout: float | None = None
    ) -> int:
        """Replace weights between two iterations, in place; return the new `weights_version`.

        `tensors` is a mapping or an iterator of (name, tensor), by the names of a checkpoint of
        the family, or of its `state_dict()` in transformers. All other weights are unchanged.
        Running requests keep their keys and values, or compute new ones if `recompute`. Later
        requests do not reuse blocks that were cached before. If the manager is asleep, it allocates
        the memory of its weights, and stays asleep.

        Raise ConfigError for unknown names, wrong shapes, and tied tensors that differ; for a
        mapping this happens before anything is copied. If an iterator fails after its first tensor,
        no step runs until an update with all tensors is complete. Raise CallbackError in a
        callback, and TimeoutError and ManagerDeadError as `explain` does.
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

        Until `wake`, no step runs and GetInferenceRequests is not called. Active requests stay, and
        compute their contexts again afterwards. If `keep_weights`, weights in CPU memory are
        written to a temporary file, weights on a device are copied to CPU memory, and `wake`
        restores both. Otherwise the weights are dropped, and no step runs until `update_weights`
        has replaced all tensors, before or after `wake`. The weights of a `Model` object, or of a
        model that transformers computes, stay in memory.

        Raise SleepError if the manager is asleep, ConfigError if the file cannot be written, and
        the other errors of `update_weights`.
        """
        sleep = self._worker.updates.sleep
        self._call("sleep", lambda loop: sleep(loop, keep_weights=keep_weights), timeout)

    def wake(self, timeout: float | None = None) -> None:
        """Allocate the memory that `sleep` has released, and iterate again.

        Raise SleepError if the manager is not asleep, and the other errors of `update_weights`. If
        too little memory is free, raise an out-of-memory error; the manager stays asleep.
        """
        self._call("wake", self._worker.updates.wake, timeout)

    @property
    def is_asleep(self) -> bool:
        """Whether `sleep` has released the memory, and `wake` has not allocated it again."""
        return self._worker.updates.is_asleep

    def pause_generation(self, timeout: float | None = ANSWER_S) -> None:
        """Stop iterating until `resume_generation`; return when no iteration runs.

        Requests keep their memory. With run-ahead or micro batches, steps that were launched before
        may still run on the device; their results are read after the pause, or by `update_weights`,
        `sleep` or `abort_all`. In a callback, this call returns at once, and the pause begins after
        the current iteration. `shutdown` also ends the pause. Raise ManagerDeadError as `explain`
        does, and TimeoutError; then the pause still begins after the current iteration.
        """
        self._raise_if_failed()
        self._inbox.is_paused = not self._inbox.defers_calls
        self._ask("pause_generation", lambda loop: None, timeout)

    def resume_generation(self) -> None:
        """End the pause of `pause_generation`. Raise ManagerDeadError as `notify` does."""
        self._inbox.is_paused = False
        self.notify()

    def abort_all(self, timeout: float | None = ANSWER_S) -> int:
        """End all active requests before the next step, and return the number of requests.

        Each request gets a final response with its tokens so far and the finish reason CANCELLED.
        During a pause or a sleep, the responses are sent when the pause or sleep ends. Raise the
        errors of `update_weights`.
        """
        return self._call("abort_all", self._worker.stop_all, timeout)

    def _call(self, name: str, function: Callable[[TokenLoop], _T], timeout: float | None) -> _T:
        """Run a call on the loops of all ranks, between two iterations."""
        self._raise_if_failed()
        if self._worker.is_here:
            raise CallbackError(f"{name} cannot be called in a callback: call it on another thread")
        return self._ask(name, function, timeout, is_call=True)
