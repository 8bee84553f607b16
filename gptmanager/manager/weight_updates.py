"""`WeightUpdates`: replaces a model's weights, and releases the memory of a manager that sleeps.

Updates, `sleep` and `wake` run on the loop's thread between two iterations, on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from gptmanager.errors import ConfigError, SleepError
from gptmanager.host.cache_invalidation import CacheInvalidation
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.manager.rank_calls import RankCalls
from gptmanager.memory.released_memory import ReleasedMemory
from gptmanager.memory.weights import Weights

_BATCH_BYTES = 256 << 20  # an iterator's tensors are loaded as soon as they exceed this size

NewWeights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


class WeightUpdates:
    """The weights of one manager. `version` is the number of updates that have succeeded.

    `is_incomplete` means that an update has failed half-way, or that `sleep` has dropped the
    weights. In both cases no step may run until an update with all tensors succeeds. `is_asleep`
    means that the memory of the weights and of the KV cache is released.
    """

    def __init__(self, cache_invalidation: CacheInvalidation, calls: RankCalls) -> None:
        self.version = 0
        self.is_incomplete = self.is_asleep = False
        self._runner: Any = None
        self._weights: Weights | None = None
        self._released: ReleasedMemory | None = None  # the memory of the weights
        self._cache_invalidation, self._calls = cache_invalidation, calls

    def attach(self, runner: Any) -> None:
        """Connect to the runner of a loop. Only a natively loaded model has `Weights`."""
        weights = getattr(runner.model, "weights", None)
        self._runner, self._weights = runner, weights if isinstance(weights, Weights) else None

    def release(self) -> None:
        """Drop the runner and its weights, because the loop has ended."""
        if self._released is not None:
            self._released.close()
        self._runner = self._weights = self._released = None

    @property
    def can_run(self) -> bool:
        """Whether steps may run."""
        return not (self.is_incomplete or self.is_asleep)

    # Updates -------------------------------------------------------------------------------

    def update(self, loop: TokenLoop, tensors: NewWeights, *, recompute: bool) -> int:
        """Copy tensors into the weights; see `GptManager.update_weights`."""
        name = "update_weights"
        return self._calls.run(name, loop, lambda: self._update(name, loop, tensors, recompute))

    def _update(self, name: str, loop: TokenLoop, tensors: NewWeights, recompute: bool) -> int:
        weights = self._calls.agree(name, lambda: self._prepared(tensors))
        try:
            self._calls.agree(name, lambda: self._load(weights, tensors))
        except BaseException:
            self.is_incomplete |= self._calls.has_ranks  # the ranks' weights may differ
            raise
        self.is_incomplete = False
        self.version += 1
        loop.table.note_weights(self.version)
        if recompute:
            self._cache_invalidation.recompute()
        return self.version

    def _prepared(self, tensors: NewWeights) -> Weights:
        """Allocate memory that `sleep` has released, and return the weights.

        If `tensors` is a mapping, check it first.
        """
        if self._weights is None:
            raise ConfigError(
                "update_weights needs a model that the manager has loaded natively: it does not "
                "know the weights of an object that implements `Model`, or of transformers"
            )
        if not isinstance(tensors, Mapping):
            self._restore_weights()
            return self._weights
        names = self._weights.check(tensors, partial=not self.is_incomplete)
        self._restore_weights()
        with self._runner.stream:
            self._weights.check_values(tensors, names)
        return self._weights

    def _load(self, weights: Weights, tensors: NewWeights) -> None:
        self._runner.catch_up()
        with self._runner.stream:
            if not isinstance(tensors, Mapping):
                self._load_one_by_one(weights, tensors)
                return
            was_incomplete, self.is_incomplete = self.is_incomplete, True
            weights.load(tensors, partial=not was_incomplete)

    def _load_one_by_one(self, weights: Weights, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load the tensors of an iterator in batches: all at once may not fit into memory.

        An error after the first tensor always leaves the update incomplete. Otherwise it would
        depend on the size of a batch whether weights have changed.
        """
        was_incomplete, seen = self.is_incomplete, list[str]()
        batch, twins = dict[str, Tensor](), dict[str, Tensor]()
        num_bytes = 0
        for name, tensor in tensors:
            self.is_incomplete = True
            seen.append(name)
            # A twin (tied tensor) is only compared with its parameter, which must be loaded before.
            (twins if weights.is_twin(name) else batch)[name] = tensor
            num_bytes += tensor.nbytes
            if num_bytes > _BATCH_BYTES:
                self._load_batch(weights, batch)
                batch, num_bytes = {}, 0
        if was_incomplete:
            weights.names(seen)  # raises if one is missing
        self._load_batch(weights, {**batch, **twins})

    def _load_batch(self, weights: Weights, batch: dict[str, Tensor]) -> None:
        weights.check(batch, partial=True)
        weights.load(batch, partial=True)

    # Sleep ---------------------------------------------------------------------------------

    def sleep(self, loop: TokenLoop, *, keep_weights: bool) -> None:
        """Release the memory of weights and KV cache; see `GptManager.sleep`."""
        self._calls.run("sleep", loop, lambda: self._sleep(keep_weights))

    def _sleep(self, keep_weights: bool) -> None:
        def check() -> None:
            if self.is_asleep:
                raise SleepError("sleep: the manager is asleep already")

        self._calls.agree("sleep", check)
        self.is_asleep = True  # also after an error, until all ranks have restored their memory
        try:
            self._calls.agree("sleep", lambda: self._release_weights(keep_weights))
            # not earlier: if the weights cannot be saved on a rank, no rank loses its cache
            self._calls.agree("sleep", self._release_cache)
        except BaseException:
            drops = not keep_weights and self._weights is not None
            self.is_incomplete |= drops and self._calls.has_ranks  # another rank may have dropped
            self._calls.agree("sleep", self._restore)
            self.is_asleep = False  # on all ranks or on none
            raise

    def _release_cache(self) -> None:
        self._cache_invalidation.recompute()
        self._cache_invalidation.clear()
        self._runner.release()

    def wake(self, loop: TokenLoop) -> None:
        """Allocate the memory again; see `GptManager.wake`."""
        self._calls.run("wake", loop, self._wake)

    def _wake(self) -> None:
        def restore() -> None:
            if not self.is_asleep:
                raise SleepError("wake: the manager is not asleep")
            self._restore()

        self._calls.agree("wake", restore)
        self.is_asleep = False  # on all ranks or on none

    def _restore(self) -> None:
        self._restore_weights()
        self._runner.restore()

    def _release_weights(self, keep: bool) -> None:
        if self._weights is None:
            return  # only a natively loaded model has `Weights`
        with self._runner.stream:
            self._released = ReleasedMemory(*self._weights.memory(keeps=keep))
            self.is_incomplete |= not keep
            self._released.release()

    def _restore_weights(self) -> None:
        if self._released is not None:
            with self._runner.stream:
                self._released.restore()
            self._released = None
