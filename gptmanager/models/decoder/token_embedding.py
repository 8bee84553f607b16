"""`TokenEmbedding`: the residual before the first layer, from the tokens of a step."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from gptmanager.kernels.reference import Kernels
from gptmanager.memory.weights import Weights
from gptmanager.models.batch import Batch
from gptmanager.models.spec import ModelSpec


class TokenEmbedding:
    """The embeddings of tokens, and the learned positions if the network has them.

    `own`: the part of the vocabulary of which this rank has the embeddings.
    """

    def __init__(self, spec: ModelSpec, weights: Weights, kernels: Kernels, own: range) -> None:
        self._spec, self._kernels, self._own = spec, kernels, own
        self._table = weights["embedding.weight"]
        has_positions = spec.position_offset is not None
        self._positions = weights.tensor("positions.weight") if has_positions else None

    def of_batch(self, batch: Batch, sum_of_ranks: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the residual `[T, C]`. `sum_of_ranks` sums the embeddings over the ranks."""
        embedded = sum_of_ranks(self._look_up(batch.token_ids))
        if self._spec.embedding_scale != 1.0:
            embedded = self._kernels.scaled(embedded, self._spec.embedding_scale)
        if batch.prompt_index is not None and batch.prompt_embeddings is not None:
            own = batch.prompt_embeddings.to(embedded)
            embedded = embedded.index_copy(0, batch.prompt_index, own)
        if self._positions is not None:
            table = self._positions[self._spec.position_offset :]
            self._kernels.add_embedding(embedded, batch.positions, table)
        return embedded

    def _look_up(self, ids: Tensor) -> Tensor:
        """Return embeddings `[T, C]` of `ids [T]`; zeros for tokens in the share of other ranks."""
        own = self._own
        if len(own) == self._spec.vocab_size:
            return self._kernels.embedding(ids, self._table)
        are_others = (ids < own.start) | (ids >= own.stop)
        rows = self._kernels.embedding((ids - own.start).masked_fill(are_others, 0), self._table)
        return rows.masked_fill_(are_others.unsqueeze(1), 0)
