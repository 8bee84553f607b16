"""`RankLayout`: the part of the model that a rank has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The position of one rank among `tensor_parallel_size` x `pipeline_parallel_size` ranks.

    A stage is the group of ranks with the same layers. The first stage has the embedding, and the
    last one computes the logits. Rank 0 chooses the tokens and sends the responses. Rank 0
    is in the last stage, so logits never have to be sent to another stage.
    """

    rank: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    @property
    def size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def part(self) -> int:
        """The index of this rank's part of each layer, below `tensor_parallel_size`."""
        return self.rank % self.tensor_parallel_size

    @property
    def stage(self) -> int:
        """The index of this rank's range of layers, below `pipeline_parallel_size`."""
        return self.pipeline_parallel_size - 1 - self.rank // self.tensor_parallel_size

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.pipeline_parallel_size - 1

    @property
    def stage_ranks(self) -> range:
        """The ranks of this stage, by part."""
        first = self.rank - self.part
        return range(first, first + self.tensor_parallel_size)
