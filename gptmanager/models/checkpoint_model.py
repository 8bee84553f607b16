"""`CheckpointModel`: the network that a `ModelSpec` describes, over weights and kernels.

One decoder, pre-normalized, with a residual stream; every choice in it is a value of the spec.
Knows nothing of families, config files and tensor names in checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from gptmanager.errors import ConfigError, error_summary
from gptmanager.kernels.attention.attention_arguments import AttentionShape, Pages, RowSpans
from gptmanager.kernels.captured_step import StepCapture
from gptmanager.kernels.gemm.packed_matrix import Matrix
from gptmanager.kernels.lora.adapter_arguments import StepAdapters
from gptmanager.kernels.reference import Ints, Kernels
from gptmanager.memory.kv_pool import KvPool
from gptmanager.memory.weights import Weights
from gptmanager.models.batch import Batch
from gptmanager.models.lora_modules import adapter_share, lora_modules
from gptmanager.models.rope import rope_table
from gptmanager.models.spec import ModelSpec
from gptmanager.models.splits import rank_spec, vocabulary_shares
from gptmanager.ranks.collectives import Collectives
from gptmanager.ranks.layout import RankLayout
from gptmanager.request.adapter import AdapterShare, LoraModule


class Affine(NamedTuple):
    weight: Matrix
    bias: Tensor | None


class Norm(NamedTuple):
    weight: Tensor
    bias: Tensor | None


class _Layer(NamedTuple):
    """One layer's tensors, resolved once; `next_norm` is the one that follows the layer.

    `number`: among those of this rank.
    """

    number: int
    qkv: Affine
    q_norm: Tensor | None
    k_norm: Tensor | None
    attention: AttentionShape
    cache_scales: Tensor | None
    out: Affine
    mlp_norm: Norm
    up: Affine
    down: Affine
    next_norm: Norm


class CheckpointModel:
    """A `PlanningModel` with weights of a checkpoint, or what one of several ranks has of it.

    `spec`: of the whole network; `self.spec` is that of this rank's share of it. `collectives`:
    what it does with other ranks; None: it is alone. A rank without logits gives `[S, 0]`.
    `weights.load(tensors)` replaces them in place, by the checkpoint's tensor names; what was
    computed with the old ones, the KV cache included, is then stale.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        kernels: Kernels,
        device: torch.device | str,
        collectives: Collectives | None = None,
    ) -> None:
        self.whole_spec = spec
        self._collectives = collectives
        layout = RankLayout() if collectives is None else collectives.layout
        self.spec = spec = rank_spec(spec, layout)
        self.weights = weights
        self._kernels = kernels
        layers = range(spec.first_layer, spec.first_layer + spec.num_layers)
        num_layers = self.whole_spec.num_layers
        self._layers = [_resolve_layer(spec, weights, i, num_layers) for i in layers]
        self._shapes = tuple(dict.fromkeys(layer.attention for layer in self._layers))
        self._gelu: Literal["none", "tanh"] = "tanh" if spec.activation == "gelu_tanh" else "none"
        self._first_norm = _norm(weights, f"layers.{layers.start}.attention_norm")
        self._tokens, self._widths = vocabulary_shares(spec, layout)
        self._embedding = weights["embedding.weight"] if layout.is_first_stage else None
        head = "embedding.weight" if spec.tied_embeddings else "lm_head.weight"
        self._lm_head = weights[head] if layout.is_last_stage else None
        self._positions = None
        if spec.rope is None and layout.is_first_stage:
            self._positions = weights.tensor("positions.weight")
        self._device = device
        self._cos_sin: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes

    def reserve_positions(self, num_positions: int) -> None:
        """Make what is as long as the longest sequence, which needs no more than these.

        Otherwise the first `forward` makes it, for `max_seq_len`. ConfigError where the config's
        numbers leave float32, or there is no memory.
        """
        try:
            self._make_cos_sin(num_positions)
        except (RuntimeError, MemoryError) as error:  # torch has both
            raise ConfigError(
                f"no memory for max_seq_len = {num_positions} positions: {error_summary(error)}"
            ) from error

    def _make_cos_sin(self, num_positions: int) -> None:
        """Cosines and sines of these positions, and of no others."""
        rope, table = self.spec.rope, self._cos_sin
        if rope is None or (table is not None and len(table) == num_positions):
            return
        table = self._cos_sin = None  # or both would be there for a while
        self._cos_sin = rope_table(rope, self.spec.head_dim, num_positions, self._device)

    @property
    def adapter_modules(self) -> dict[int, LoraModule]:
        """Return the modules of a layer that adapters may change, by id; see `lora_modules`."""
        return lora_modules(self.whole_spec)

    @property
    def adapter_share(self) -> AdapterShare | None:
        """Return the part of adapters that this rank keeps; None: all of them."""
        if self._collectives is None:
            return None
        return adapter_share(self.whole_spec, self._collectives.layout)

    def plan(
        self, row_starts: Ints, kv_lengths: Ints, num_context_rows: int, fixed: bool = False
    ) -> tuple[Ints, ...]:
        return self._kernels.plan(self._shapes, row_starts, kv_lengths, num_context_rows, fixed)

    @torch.inference_mode()
    def forward(self, batch: Batch, kv_pool: KvPool) -> Tensor:
        """Write the batch's keys and values; logits `[S, vocab]` in the weights' dtype.

        On a rank that has none they are `[S, 0]`.
        """
        if self._cos_sin is None:
            self._make_cos_sin(self.spec.max_seq_len)
        rows = self._kernels.begin(
            self._shapes,
            RowSpans(batch.row_starts, batch.kv_lengths, batch.slots, batch.block_tables),
            batch.plan,
            num_tokens=len(batch.token_ids),
            tokens_per_block=kv_pool.tokens_per_block,
        )
        adapters = self._kernels.begin_adapters(batch.adapters)
        residual = self._begin(batch)
        hidden = self._norm(residual, self._first_norm)
        last = None if self._lm_head is None else self._layers[-1]
        for layer, keys, values in zip(
            self._layers, kv_pool.keys.unbind(), kv_pool.values.unbind(), strict=True
        ):
            pages = Pages(keys, values, layer.cache_scales)
            hidden = self._attend(layer, hidden, batch.positions, pages, rows, adapters)
            # nothing reads the other tokens from here on
            if layer is last and not batch.all_sampled:
                hidden = hidden.index_select(0, batch.sample_index)
                residual = residual.index_select(0, batch.sample_index)
                if adapters is not None:
                    own = adapters.rows.index_select(0, batch.sample_index)
                    adapters = replace(adapters, rows=own)
                    adapters = self._kernels.begin_adapters(adapters)
            hidden = self._feed_forward(layer, hidden, residual, adapters)
        return self._end(hidden, residual, len(batch.sample_index))

    def new_step_capture(self) -> StepCapture | None:
        """For `forward_captured` over one KV cache; None where steps are not recorded: with other
        ranks, or where somebody has put another `forward` before this one.
        """
        is_own = type(self).forward is CheckpointModel.forward and "forward" not in vars(self)
        return self._kernels.new_step_capture() if is_own and self._collectives is None else None

    @torch.inference_mode()
    def forward_captured(self, batch: Batch, kv_pool: KvPool, capture: StepCapture) -> Tensor:
        """`forward` of rows that have one token each, all sampled; without embeddings of prompts,
        adapters and a plan. `capture`: of this model and pool, and of the batch's block tables.
        """
        inputs = batch.token_ids, batch.positions, batch.row_starts, batch.kv_lengths, batch.slots

        def compute(own: Sequence[Tensor]) -> Tensor:
            ids, positions, starts, lengths, slots = own
            changed = replace(
                batch,
                token_ids=ids,
                positions=positions,
                row_starts=starts,
                kv_lengths=lengths,
                slots=slots,
            )
            return self.forward(changed, kv_pool)

        return capture.run(inputs, self._cos_sin, compute)

    def _begin(self, batch: Batch) -> Tensor:
        """The residual `[T, C]` that the first layer here takes: of the stage before, if any."""
        if self._embedding is not None:
            return self._embed(batch, self._embedding)
        num_tokens, ids = len(batch.token_ids), batch.token_ids
        residual = ids.new_empty((num_tokens, self.spec.hidden_size), dtype=self.spec.dtype)
        assert self._collectives is not None
        return self._collectives.receive(residual)

    def _end(self, hidden: Tensor, residual: Tensor, num_sampled: int) -> Tensor:
        """Logits of the last stage's `hidden`, or the residual goes to the next one."""
        if self._lm_head is not None:
            columns = self._kernels.linear(hidden, self._lm_head)
            if self._collectives is None:
                return columns
            return self._collectives.gather(columns, self._widths)
        assert self._collectives is not None
        self._collectives.send(residual)
        return residual.new_empty(num_sampled, 0)

    def _sum(self, partial: Tensor) -> Tensor:
        """Over the ranks that share this layer."""
        return partial if self._collectives is None else self._collectives.all_reduce(partial)

    def _embed(self, batch: Batch, table: Matrix) -> Tensor:
        embedded = self._sum(self._look_up(batch.token_ids, table))
        if batch.prompt_index is not None and batch.prompt_embeddings is not None:
            own = batch.prompt_embeddings.to(embedded)
            embedded = embedded.index_copy(0, batch.prompt_index, own)
        if self._positions is not None:
            self._kernels.add_embedding(embedded, batch.positions, self._positions)
        return embedded

    def _look_up(self, ids: Tensor, table: Matrix) -> Tensor:
        """Rows of the embedding `table`; zeros for the tokens that other ranks have."""
        own = self._tokens
        if len(own) == self.spec.vocab_size:
            return self._kernels.embedding(ids, table)
        are_others = (ids < own.start) | (ids >= own.stop)
        rows = self._kernels.embedding((ids - own.start).masked_fill(are_others, 0), table)
        return rows.masked_fill_(are_others.unsqueeze(1), 0)

    def _project(
        self, hidden: Tensor, layer: _Layer, matrix: str, adapters: StepAdapters | None
    ) -> Tensor:
        """The product with one of the layer's matrices, and what adapters add to it."""
        affine: Affine = getattr(layer, matrix)
        result = self._kernels.linear(hidden, *affine)
        if adapters is not None:
            self._kernels.add_adapters(result, hidden, adapters, layer.number, matrix)
        return result

    def _attend(
        self,
        layer: _Layer,
        hidden: Tensor,
        positions: Tensor,
        pages: Pages,
        rows: RowSpans,
        adapters: StepAdapters | None,
    ) -> Tensor:
        """`[T, C]` normalized -> `[T, H * D]`: the mixed values, before the output projection."""
        queries = self._kernels.rope_and_write(
            self._project(hidden, layer, "qkv", adapters),
            positions,
            self._cos_sin,
            layer.q_norm,
            layer.k_norm,
            self.spec.norm_eps,
            pages,
            rows,
        )
        return self._kernels.attention(queries, pages, rows, layer.attention)

    def _feed_forward(
        self, layer: _Layer, attended: Tensor, residual: Tensor, adapters: StepAdapters | None
    ) -> Tensor:
        """`[T, H * D]` -> `[T, C]` normalized for what follows; adds to the residual in place."""
        hidden = self._sum(self._project(attended, layer, "out", adapters))
        hidden = self._add_norm(hidden, residual, layer.mlp_norm)
        if self.spec.activation != "silu":
            hidden = self._kernels.gelu(self._project(hidden, layer, "up", adapters), self._gelu)
        elif adapters is None:
            hidden = self._kernels.linear_silu_mul(hidden, *layer.up)
        else:  # which add to what the activation takes
            hidden = self._kernels.linear_silu_mul_adapted(
                hidden, *layer.up, adapters, layer.number, "up"
            )
        hidden = self._sum(self._project(hidden, layer, "down", adapters))
        return self._add_norm(hidden, residual, layer.next_norm)

    def _norm(self, hidden: Tensor, norm: Norm) -> Tensor:
        if self.spec.norm == "rms":
            return self._kernels.rms_norm(hidden, norm.weight, self.spec.norm_eps)
        return self._kernels.layer_norm(hidden, *norm, self.spec.norm_eps)

    def _add_norm(self, hidden: Tensor, residual: Tensor, norm: Norm) -> Tensor:
        if self.spec.norm == "rms":
            return self._kernels.add_rms_norm(hidden, residual, norm.weight, self.spec.norm_eps)
        return self._kernels.add_layer_norm(hidden, residual, *norm, self.spec.norm_eps)


def _affine(weights: Weights, module: str) -> Affine:
    return Affine(weights[f"{module}.weight"], _bias(weights, module))


def _norm(weights: Weights, module: str) -> Norm:
    return Norm(weights.tensor(f"{module}.weight"), _bias(weights, module))


def _bias(weights: Weights, module: str) -> Tensor | None:
    name = f"{module}.bias"
    return weights.tensor(name) if name in weights else None


def _resolve_layer(spec: ModelSpec, weights: Weights, index: int, num_layers: int) -> _Layer:
    """Layer `index` of the `num_layers` of the whole network."""
    prefix = f"layers.{index}"
    is_last = index == num_layers - 1
    next_norm = "final_norm" if is_last else f"layers.{index + 1}.attention_norm"
    return _Layer(
        number=index - spec.first_layer,
        qkv=_affine(weights, f"{prefix}.qkv"),
        q_norm=weights.tensor(f"{prefix}.q_norm.weight") if spec.qk_norm else None,
        k_norm=weights.tensor(f"{prefix}.k_norm.weight") if spec.qk_norm else None,
        attention=spec.attention_shape(index),
        cache_scales=(
            weights.tensor(f"{prefix}.cache_scales").view(2, spec.num_kv_heads)
            if spec.kv_cache_dtype is torch.float8_e4m3fn
            else None
        ),
        out=_affine(weights, f"{prefix}.out"),
        mlp_norm=_norm(weights, f"{prefix}.mlp_norm"),
        up=_affine(weights, f"{prefix}.up"),
        down=_affine(weights, f"{prefix}.down"),
        next_norm=_norm(weights, next_norm),
    )
