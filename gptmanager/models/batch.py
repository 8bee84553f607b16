"""`Batch`: the packed inputs of one forward pass, without padding."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gptmanager.kernels.lora.adapter_arguments import StepAdapters


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """T tokens of R sequences ("rows"), the logits of S are wanted; context rows come first.

    `token_ids` int64 `[T]`; `positions` int64 `[T]`, absolute.
    `row_starts` int32 `[R + 1]`: row r owns the packed tokens `row_starts[r]:row_starts[r + 1]`.
    `kv_lengths` int32 `[R]`: positions in the KV cache once this step's are written.
    `slots` int32 `[R]`: the row's line in `block_tables` int32 `[slots, blocks]` and in
    `token_table` int32 `[slots, max_seq_len]` (all tokens known so far, this step's included).
    `sample_index` int64 `[S]`: the packed tokens that need logits: one for each sampling row,
    then those of prompts with logits that a host asked for. `sample_rows` int64 `[S]`: their rows.
    `all_sampled`: `sample_index` is known to be all T in their order, so that none must be picked.
    `prompt_embeddings` float32 `[n, hidden]` replace the embeddings of the packed tokens
    `prompt_index` int64 `[n]`; their `token_ids` mean nothing. None: of none.
    `adapters`: those of the packed tokens, its `rows` `[T]`; None: of none.
    `plan`: what the model planned for these rows, int32 each (`PlanningModel`).
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
