"""`Batch`: the packed inputs of one forward pass, without padding."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gptmanager.kernels.attention.attention_arguments import RowLengths, RowSpans
from gptmanager.kernels.lora.adapter_arguments import StepAdapters


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """T tokens of R sequences ("rows"). S of the tokens get logits.

    `token_ids` int64 `[T]`; `positions` int64 `[T]`, absolute. `row_starts` int32 `[R + 1]`: row r
    has the packed tokens `row_starts[r]:row_starts[r + 1]`. `kv_lengths` int32 `[R]`: number of
    positions of each row in the KV cache, including those of this step. `slots` int32 `[R]`: the
    index of each row in the first dimension of `block_tables` int32 `[slots, blocks]` and of
    `token_table` int32 `[slots, max_seq_len]`, which has all known tokens, including those of this
    step. `sample_index` int64 `[S]`: indices of the packed tokens that need logits. First are the
    tokens after which a token is chosen: one for each sampling row, and one for each draft token.
    Then follow prompt tokens for which a request wants logits. `sample_rows` int64 `[S]`: the row
    of each token in `sample_index`. `num_context_rows`: the number of rows in the context phase,
    which are the first rows. `prompt_embeddings` float32 `[n, hidden]` replace the embeddings of
    the packed tokens with the indices `prompt_index` int64 `[n]`; the `token_ids` of these tokens
    are ignored. Both are None without prompt embeddings. `adapters`: the adapters of the packed
    tokens, or None without adapters. `plan`: the tensors that `PlanningModel.plan` returned for
    these rows. `all_sampled`: `sample_index` is 0 to T - 1, so no tokens have to be selected.
    `lengths`: `row_starts` and `kv_lengths` as NumPy arrays, for code that plans on the CPU; None
    in a captured step.
    """

    token_ids: Tensor
    positions: Tensor
    row_starts: Tensor
    kv_lengths: Tensor
    slots: Tensor
    block_tables: Tensor
    token_table: Tensor
    sample_index: Tensor
    sample_rows: Tensor
    num_context_rows: int
    prompt_index: Tensor | None = None
    prompt_embeddings: Tensor | None = None
    adapters: StepAdapters | None = None
    plan: tuple[Tensor, ...] = ()
    all_sampled: bool = False
    lengths: RowLengths | None = None

    @property
    def rows(self) -> RowSpans:
        """The rows for attention, as `Kernels.begin` accepts them."""
        tables = self.row_starts, self.kv_lengths, self.slots, self.block_tables
        return RowSpans(*tables, self.num_context_rows, self.lengths)
