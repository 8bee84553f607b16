"""`Collectives`: what the network of a rank does with those of the others, in the middle of a step.

`GroupCollectives` stand on process groups of torch: on a CPU gloo's, on CUDA NCCL's, whose work is
enqueued on the current stream and may be recorded. They know nothing of layers and weights, nor of
how a group is made or how a failure is noticed.

Each rank of a stage calls the same methods in the same order with equal shapes and dtypes: any
that gloo and NCCL can send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed  # builds without it have the module, but no groups
from torch import Tensor

from gptmanager.ranks.layout import RankLayout
from gptmanager.ranks.small_tensors import MOST_BYTES, SmallTensors

# gloo's ring pays from here on: elements of a sum. Below, one exchange of all parts is faster.
_MIN_RING = 1 << 16

Group = Any  # a torch.distributed.ProcessGroup
Wait = Callable[[Any], None]


class Collectives(Protocol):
    """The collective operations of one rank. Errors are those of `wait` (`GroupCollectives`)."""

    layout: RankLayout

    def sum(self, partial: Tensor) -> Tensor:
        """Over the ranks of the stage, in place; the tensor itself."""
        ...

    def gather(self, columns: Tensor, widths: Sequence[int]) -> Tensor:
        """`[S, widths[part]]` of each part -> `[S, sum(widths)]` side by side.

        On part 0 of the stage, or on all of them if results are replicated; elsewhere `[S, 0]`.
        """
        ...

    def share(self, tensor: Tensor) -> None:
        """Fill it with what it is on part 0 of the stage."""
        ...

    def send(self, hidden: Tensor) -> None:
        """To the next stage, which receives it; nobody may write to it any more."""
        ...

    def receive(self, hidden: Tensor) -> Tensor:
        """Fill `hidden` with what the previous stage sends; the tensor itself."""
        ...

    def close(self) -> None:
        """No more is sent or received."""
        ...


class GroupCollectives:
    """`stage_group`: the ranks of the stage, by part. `from_previous` and `to_next`: two ranks
    each, the sender first; None where there is no such stage.

    `wait` is given each `Work`: it returns when that is done, or enqueued on CUDA's current
    stream, and raises what is to end the step. `replicates`: `gather` gives its result to each
    rank of the stage. `deterministic`: a sum of several parts has the same bits whatever else is
    in the tensor; a ring adds in an order that depends on the place of an element.
    `small_tensors`: on a CPU a quicker way for those; None: there is none.
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
        self._sent: tuple[Any, Tensor] | None = None  # and not waited for; its tensor must live

    def sum(self, partial: Tensor) -> Tensor:
        if self.layout.tensor_parallel_size == 1 or not partial.numel():
            return partial
        is_small = partial.device.type == "cpu" and partial.numel() < _MIN_RING
        if not (self._deterministic or is_small):
            self._wait(self._stage.allreduce([partial]))
            return partial
        first, *others = self._of_all(partial)
        total = first.to(torch.promote_types(first.dtype, torch.float32))
        for other in others:
            total += other
        return partial.copy_(total)

    def gather(self, columns: Tensor, widths: Sequence[int]) -> Tensor:
        if self.layout.tensor_parallel_size == 1:
            return columns
        parts: list[Tensor] = []
        if len(columns):
            # the parts of a gather are equally large
            columns = torch.nn.functional.pad(columns, (0, max(widths) - columns.shape[1]))
            parts = self._of_all(columns) if self._replicates else self._to_first(columns)
        if parts:
            own = [part[:, :width] for part, width in zip(parts, widths, strict=True)]
            return torch.cat(own, dim=1)
        has_result = self._replicates or self.layout.part == 0
        return columns.new_empty(len(columns), sum(widths) if has_result else 0)

    def share(self, tensor: Tensor) -> None:
        if self.layout.tensor_parallel_size > 1 and tensor.numel():
            self._wait(self._stage.broadcast([tensor]))

    def send(self, hidden: Tensor) -> None:
        if not hidden.numel():
            return
        assert self._to_next is not None
        # gloo's sender would wait until the next stage has come so far, which computes another
        # step meanwhile: it does so with the next tensor
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
        """No more is sent or received: the groups end, and with them their threads.

        Such a thread may still be about to let go of a tensor, which at the end of a process is too
        late. Nothing may be under way.
        """
        self._sent = None
        self._stage = self._from_previous = self._to_next = None

    def _finish_sending(self) -> None:
        if self._sent is not None:
            self._wait(self._sent[0])
        self._sent = None

    def _of_all(self, tensor: Tensor) -> list[Tensor]:
        small = self._small_tensors
        if small is not None and tensor.nbytes <= MOST_BYTES and tensor.device.type == "cpu":
            return small.of_all(tensor)
        parts = [torch.empty_like(tensor) for _ in self.layout.stage_ranks]
        self._wait(self._stage.allgather([parts], [tensor]))
        return parts

    def _to_first(self, tensor: Tensor) -> list[Tensor]:
        """Those of all parts on part 0, none elsewhere."""
        options, parts = torch.distributed.GatherOptions(), []
        options.rootRank = 0
        if self.layout.part == 0:
            parts = [torch.empty_like(tensor) for _ in self.layout.stage_ranks]
        self._wait(self._stage.gather([parts] if parts else [], [tensor], options))
        return parts
