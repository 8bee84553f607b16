"""`PositionTables`: the tables of RoPE and of query temperatures, with a row for each position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gptmanager.errors import ConfigError, error_summary
from gptmanager.kernels.reference import Kernels
from gptmanager.models.decoder.layer_tensors import LayerTensors
from gptmanager.models.rope_scaling import Rope, rope_table
from gptmanager.models.spec import QueryTemperature


class PositionTables:
    """The tables of all distinct ropes and temperatures of `layers`.

    `by_rope` maps each `Rope` to its cosines and sines; see `rope_table`. `all` is a tuple of all
    tables, also those of the factors of queries. Before `reserve`, `by_rope` is empty and `all` is
    None.
    """

    def __init__(
        self, layers: Sequence[LayerTensors], dtype: torch.dtype, device: torch.device | str
    ) -> None:
        ropes, temperatures = ([getattr(it, n) for it in layers] for n in ("rope", "temperature"))
        self._ropes = [*dict.fromkeys(it for it in ropes if it is not None)]
        self._temperatures = [*dict.fromkeys(it for it in temperatures if it is not None)]
        self._wide = torch.float64 if dtype is torch.float64 else torch.float32
        self._device = device
        self.by_rope: dict[Rope | None, Tensor] = {}
        self._by_temperature: dict[QueryTemperature, Tensor] = {}
        self.all: tuple[Tensor, ...] | None = None

    def reserve(self, num_positions: int) -> None:
        """Compute the tables for positions below `num_positions`, unless they exist already.

        Longer tables are kept, because another manager may run the same network. Raises ConfigError
        if values overflow float32 or if there is not enough memory.
        """
        if self.all is not None and all(len(it) >= num_positions for it in self.all):
            return
        ropes: dict[Rope | None, Tensor] = {}
        factors: dict[QueryTemperature, Tensor] = {}
        try:
            for rope in self._ropes:
                ropes[rope] = rope_table(rope, num_positions, self._device)
            for temperature in self._temperatures:
                factors[temperature] = self._factors(temperature, num_positions)
        except (RuntimeError, MemoryError) as error:  # torch raises either of them
            raise ConfigError(
                f"no memory for max_seq_len = {num_positions} positions: {error_summary(error)}"
            ) from error
        self.by_rope, self._by_temperature = ropes, factors
        self.all = *ropes.values(), *factors.values()

    def scale(
        self,
        kernels: Kernels,
        queries: Tensor,
        positions: Tensor,
        temperature: QueryTemperature | None,
    ) -> None:
        """Scale `queries [T, H, D]`, in place, by the temperature, if any, of `positions [T]`."""
        if temperature is not None:
            factors = kernels.embedding(positions, self._by_temperature[temperature])
            kernels.scale_rows(queries.flatten(1), factors)

    def _factors(self, own: QueryTemperature, num_positions: int) -> Tensor:
        positions = torch.arange(num_positions, device=self._device).unsqueeze(1)
        steps = ((positions + own.offset) // own.length).to(self._wide)
        return 1 + own.beta * torch.log1p(steps)
