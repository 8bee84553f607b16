"""`WeightUpdates`: replaces a model's weights between two iterations of its loop."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from gptmanager.errors import ConfigError, ManagerDeadError
from gptmanager.host.cached_blocks import CachedBlocks
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.memory.weights import Weights

_BATCH_BYTES = 256 << 20  # of an iterator's tensors that are loaded together

NewWeights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


class WeightUpdates:
    """The updates of one manager's weights; its methods are called on the loop's thread.

    `version` counts the complete updates. `is_incomplete`: an update has failed half-way, so that
    no step may run until another one is complete.
    """

    def __init__(self, cached: CachedBlocks) -> None:
        self.version = 0
        self.is_incomplete = False
        self._weights: Any = None
        self._cached = cached

    def attach(self, model: Any, *, has_ranks: bool) -> None:
        """Connect to the model of a loop."""
        self._weights = None if has_ranks else getattr(model, "weights", None)

    def release(self) -> None:
        self._weights = None

    def update(self, loop: TokenLoop, tensors: NewWeights, *, recompute: bool) -> int:
        """Copy tensors into the weights of `loop`'s model; see `GptManager.update_weights`."""
        if not hasattr(loop, "executor"):
            raise ManagerDeadError("update_weights: the loop has ended")
        if not isinstance(self._weights, Weights):
            raise ConfigError(
                "update_weights needs a checkpoint's model in one process: several ranks, and "
                "objects that implement `Model`, are not supported"
            )
        while loop.pending:  # these steps still read the old weights
            loop.finish_pending()
        if isinstance(tensors, Mapping):
            self._weights.check(tensors, partial=not self.is_incomplete)
            was_incomplete, self.is_incomplete = self.is_incomplete, True
            self._weights.load(tensors, partial=not was_incomplete)
        else:
            self._update_one_by_one(self._weights, tensors)
        self.is_incomplete = False
        self.version += 1
        if recompute:
            self._cached.recompute()
        return self.version

    def _update_one_by_one(self, weights: Weights, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load the tensors of an iterator, which may be too large to exist together."""
        was_incomplete, seen = self.is_incomplete, list[str]()
        batch, twins = dict[str, Tensor](), dict[str, Tensor]()
        num_bytes = 0
        for name, tensor in tensors:
            seen.append(name)
            # a twin is compared with its parameter, so it is loaded last
            (twins if weights.is_twin(name) else batch)[name] = tensor
            num_bytes += tensor.nbytes
            if num_bytes > _BATCH_BYTES:
                self._load(weights, batch)
                batch, num_bytes = {}, 0
        if was_incomplete:
            weights.require_all(seen)
        self._load(weights, {**batch, **twins})

    def _load(self, weights: Weights, batch: dict[str, Tensor]) -> None:
        weights.check(batch, partial=True)
        self.is_incomplete = True
        weights.load(batch, partial=True)
