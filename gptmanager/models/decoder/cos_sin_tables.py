"""`CosSinTables`: the cosines and sines of all positions, for each `Rope` of a network."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from gptmanager.errors import ConfigError, error_summary
from gptmanager.models.rope_scaling import Rope, rope_table


class CosSinTables:
    """The tables of all distinct `Rope`s of a network; see `rope_table`.

    `by_rope` maps each `Rope` to its table. `all` is a tuple of the same tables. Before `reserve`,
    `by_rope` is empty and `all` is None.
    """

    def __init__(self, ropes: Iterable[Rope | None], device: torch.device | str) -> None:
        self._ropes = [*dict.fromkeys(rope for rope in ropes if rope is not None)]
        self._device = device
        self.by_rope: dict[Rope | None, Tensor] = {}
        self.all: tuple[Tensor, ...] | None = None

    def reserve(self, num_positions: int) -> None:
        """Compute the tables for positions below `num_positions`, unless they exist already.

        Longer tables are kept, because another manager may run the same network. Raises ConfigError
        if values overflow float32 or if there is not enough memory.
        """
        if self.all is not None and all(len(it) >= num_positions for it in self.all):
            return
        made: dict[Rope | None, Tensor] = {}
        try:
            for rope in self._ropes:
                made[rope] = rope_table(rope, num_positions, self._device)
        except (RuntimeError, MemoryError) as error:  # torch raises either of them
            raise ConfigError(
                f"no memory for max_seq_len = {num_positions} positions: {error_summary(error)}"
            ) from error
        self.by_rope, self.all = made, tuple(made.values())
