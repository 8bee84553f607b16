"""`Collectives`: the collective operations of a model that is split over ranks, within a step.

`GroupCollectives` implements them with process groups of torch: gloo on a CPU, NCCL on CUDA. NCCL's
work is enqueued on the current stream and may be captured in a CUDA graph. `world` creates process
groups, and `watch` notices failed ranks.

Each rank of a stage calls the same methods in the same order, with equal shapes and equal dtypes.
The process group must support the dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed  # in torch builds without groups, the module exists, too
from torch import Tensor

from gptmanager.ranks.layout import RankLayout
from gptmanager.ranks.small_tensors import MOST_BYTES, SmallTensors

# From this number of elements on, gloo's ring is faster than one exchange of all parts.
_MIN_RING = 1 << 16

Group = Any  # a torch.distributed.ProcessGroup
Wait = Callable[[Any], None]


class Collectives(Protocol):
    """The collective operations of one rank; they raise an error if another rank has failed."""

    layout: RankLayout

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Sum `partial` over the ranks of the stage, in place. Return `partial`."""
        ...

    def gather(self, columns: Tensor, widths: Sequence[int]) -> Tensor:
        """Concatenate the columns of all parts: `[S, widths[part]]` -> `[S, sum(widths)]`.

        A part is one rank of the stage. If results are replicated, all parts get the result.
        Otherwise part 0 gets the result, and the other parts get `[S, 0]`.
        """
        ...

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite `tensor` with its values on part 0 of the stage."""
        ...

    def send(self, hidden: Tensor) -> None:
        """Send `hidden` to the next stage. The caller must not write to `hidden` afterwards."""
        ...

    def receive(self, hidden: Tensor) -> Tensor:
        """Overwrite `hidden` with the tensor from the previous stage. Return `hidden`."""
        ...

    def close(self) -> None:
        """Release the connections. No other method may be called afterwards."""
        ...


class GroupCollectives:
    """Collectives on process groups of torch.

    `stage_group` has the ranks of the stage, by part; it is None for a single part. `from_previous`
    and `to_next` have two ranks each, the sender first, and are None at the ends of the pipeline.

    `wait` is called with each `Work` of torch. `wait` returns when the work is done, or is enqueued
    on the current CUDA stream. If the work fails, `wait` raises the error that ends the step. If
    `replicates`, `gather` returns its result on each rank of the stage. With `deterministic`, the
    sum of an element has the same bits wherever the element is in the tensor; in a ring, the order
    of addition depends on the position. `small_tensors` is a faster exchange of small tensors on a
    CPU, or None.
    """

    def __init__(
        self,
        layout: RankLayout,
        stage_group: Group,
        from_previous: Group | None,
        to_next: Group | None,
        wait: Wait,
        *,
        replicates: bool = False,
        deterministic: bool = False,
        small_tensors: SmallTensors | None = None,
    ) -> None:
        self.layout = layout
        self._small_tensors = small_tensors
        self._stage, self._from_previous, self._to_next = stage_group, from_previous, to_next
        self._wait = wait
        self._replicates, self._deterministic = replicates, deterministic
        # the work of the last `send`, and its tensor, which must live until the work is done
        self._sent: tuple[Any, Tensor] | None = None

    def all_reduce(self, partial: Tensor) -> Tensor:
        if self.layout.tensor_parallel_size == 1 or not partial.numel():
            return partial
        is_small = partial.device.type == "cpu" and partial.numel() < _MIN_RING
        if not (self._deterministic or is_small):
            self._wait(self._stage.allreduce([partial]))
            return partial
        first, *others = self._all_gather(partial)
        total = first.to(torch.promote_types(first.dtype, torch.float32))
        for other in others:
            total += other
        return partial.copy_(total)

    def gather(self, columns: Tensor, widths: Sequence[int]) -> Tensor:
        if self.layout.tensor_parallel_size == 1:
            return columns
        parts: list[Tensor] = []
        if len(columns):
            # a gather needs parts of equal size
            columns = torch.nn.functional.pad(columns, (0, max(widths) - columns.shape[1]))
            parts = (
                self._all_gather(columns) if self._replicates else self._gather_to_first(columns)
            )
        if parts:
            own = [part[:, :width] for part, width in zip(parts, widths, strict=True)]
            return torch.cat(own, dim=1)
        has_result = self._replicates or self.layout.part == 0
        return columns.new_empty(len(columns), sum(widths) if has_result else 0)

    def broadcast(self, tensor: Tensor) -> None:
        if self.layout.tensor_parallel_size > 1 and tensor.numel():
            self._wait(self._stage.broadcast([tensor]))

    def send(self, hidden: Tensor) -> None:
        if not hidden.numel():
            return
        assert self._to_next is not None
        # With gloo, waiting here would last until the next stage receives the tensor, and that
        # stage computes another step meanwhile. So wait before the next tensor is sent.
        self._finish_sending()
        self._sent = self._to_next.broadcast([hidden]), hidden
        if hidden.device.type != "cpu":
            self._finish_sending()

    def receive(self, hidden: Tensor) -> Tensor:
        if hidden.numel():
            assert self._from_previous is not None
            self._wait(self._from_previous.broadcast([hidden]))
        return hidden

    def close(self) -> None:
        """Release the groups, which ends their threads. No operation may be in progress.

        A thread of a group may still have to release a tensor, which must happen before the process
        exits.
        """
        self._sent = None
        self._stage = self._from_previous = self._to_next = None

    def _finish_sending(self) -> None:
        if self._sent is not None:
            self._wait(self._sent[0])
        self._sent = None

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        small = self._small_tensors
        if small is not None and tensor.nbytes <= MOST_BYTES and tensor.device.type == "cpu":
            return small.all_gather(tensor)
        parts = [torch.empty_like(tensor) for _ in self.layout.stage_ranks]
        self._wait(self._stage.allgather([parts], [tensor]))
        return parts

    def _gather_to_first(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all parts on part 0, and an empty list on other parts."""
        options, parts = torch.distributed.GatherOptions(), []
        options.rootRank = 0
        if self.layout.part == 0:
            parts = [torch.empty_like(tensor) for _ in self.layout.stage_ranks]
        self._wait(self._stage.gather([parts] if parts else [], [tensor], options))
        return parts
