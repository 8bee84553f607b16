"""`RankLayout`: which part of the model a rank has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The place of one rank among `tensor_parallel_size` x `pipeline_parallel_size` ranks.

    Stages are groups of ranks with the same layers. The first one embeds, the last one has the
    logits. Rank 0 is in the last: it chooses tokens and answers the host, so that logits and
    tokens need not travel to it from another stage.
    """

    rank: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    @property
    def size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def part(self) -> int:
        """Which part of each layer, of `tensor_parallel_size`."""
        return self.rank % self.tensor_parallel_size

    @property
    def stage(self) -> int:
        """Which layers, of `pipeline_parallel_size` ranges in order."""
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

    @property
    def previous_stage_rank(self) -> int:
        """Where hidden states come from; of no meaning in the first stage."""
        return self.rank + self.tensor_parallel_size

    @property
    def next_stage_rank(self) -> int:
        """Where hidden states go; of no meaning in the last stage."""
        return self.rank - self.tensor_parallel_size
