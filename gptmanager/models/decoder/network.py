"""`CheckpointModel`: the forward pass of the decoder that a `ModelSpec` describes.

This module does not know families, config files or tensor names of checkpoints: the spec has all
that differs between decoders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gptmanager.kernels.attention.attention_arguments import RowSpans
from gptmanager.kernels.capture.captured_step import Begin, StepCapture, ignore
from gptmanager.kernels.lora.adapter_arguments import StepAdapters
from gptmanager.kernels.reference import Ints, Kernels
from gptmanager.memory.kv_pool import KvPool
from gptmanager.memory.weights import Weights
from gptmanager.models.batch import Batch
from gptmanager.models.decoder.attention_inputs import norm_heads, without_heads
from gptmanager.models.decoder.expert_mixture import mix_apart, mix_experts
from gptmanager.models.decoder.latent_attention import attend_to_latents, latent_tensors
from gptmanager.models.decoder.layer_tensors import (
    Affine,
    DenseLayer,
    ExpertLayer,
    LayerTensors,
    Norm,
    find_norm,
    layer_tensors,
)
from gptmanager.models.decoder.lora_modules import adapter_share, lora_modules
from gptmanager.models.decoder.position_tables import PositionTables
from gptmanager.models.decoder.recurrent_layer import recurrent_layer
from gptmanager.models.decoder.split_norms import norm_over_ranks
from gptmanager.models.decoder.token_embedding import TokenEmbedding
from gptmanager.models.decoder.token_inputs import TokenInputTensors, of_sampled
from gptmanager.models.spec import ModelSpec
from gptmanager.models.splits import rank_spec, vocabulary_shares
from gptmanager.ranks.collectives import Collectives
from gptmanager.ranks.layout import RankLayout
from gptmanager.request.adapter_modules import AdapterShare, LoraModule

# the tensors of a batch that differ between replays of a captured step
_CAPTURED = ("token_ids", "positions", "row_starts", "kv_lengths", "slots")


class CheckpointModel:
    """A `PlanningModel` with the weights of a checkpoint, or with one rank's share of them.

    `spec` describes the whole network; `self.spec` describes this rank's share. `collectives`:
    communication with the other ranks; None for a single rank. `weights.load(tensors)` overwrites
    weights in place; `tensors` have the checkpoint's names. Results of the old weights, including
    the KV cache, are then stale.
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
        own = range(spec.first_layer, spec.first_layer + spec.num_layers)
        self._layers = [layer_tensors(spec, weights, index, device) for index in own]
        self._latents = [latent_tensors(spec, weights, index) for index in own]
        self._gate_widths = [spec.layers[index].attention.gate_width for index in own]
        self._recurrent = [recurrent_layer(spec, weights, index) for index in own]
        shapes = (spec.attention_shape(it) for it in own if spec.layers[it].attention.attends)
        self.attention_shapes = tuple(dict.fromkeys(shapes))
        self._has_experts = any(isinstance(layer.mlp, ExpertLayer) for layer in self._layers)
        if spec.dtype is not torch.float64:
            kinds = {it.kind.name for it in self._recurrent if it is not None}
            has = {"experts": self._has_experts, "latents": any(self._latents)}
            kernels.warm_up_layers(kinds.union(kind for kind in has if has[kind]))
        own_tokens, self._widths = vocabulary_shares(spec, layout)
        self._embedding, self._embedding_norm = None, None
        if layout.is_first_stage:
            self._embedding = TokenEmbedding(spec, weights, kernels, own_tokens)
            if spec.norms.embedding:
                self._embedding_norm = find_norm(spec, weights, "embedding_norm", device)
        head = "embedding.weight" if spec.tied_embeddings else "lm_head.weight"
        self._lm_head = None
        if layout.is_last_stage:
            bias = weights.tensor("lm_head.bias") if spec.head_bias else None
            self._lm_head = Affine(weights[head], bias)
        self._token_inputs = None
        if spec.token_inputs is not None:
            self._token_inputs = TokenInputTensors(spec, spec.token_inputs, weights, kernels)
        self._tables = PositionTables(self._layers, spec.dtype, device)

    @property
    def nbytes(self) -> int:
        """The size in bytes of the weights."""
        return self.weights.nbytes

    def reserve_positions(self, num_positions: int) -> None:
        """Create the tables by position for sequences of up to `num_positions` tokens.

        Without a call, the first `forward` creates the tables for the spec's `max_seq_len` tokens.
        Raises ConfigError if values overflow float32 or memory does not suffice.
        """
        self._tables.reserve(num_positions)

    @property
    def adapter_modules(self) -> dict[int, LoraModule]:
        """Return the modules of a layer that adapters may change, by id; see `lora_modules`."""
        return lora_modules(self.whole_spec)

    @property
    def adapter_share(self) -> AdapterShare | None:
        """Return which part of each adapter this rank keeps; None without other ranks."""
        if self._collectives is None:
            return None
        return adapter_share(self.whole_spec, self._collectives.layout)

    def plan(
        self, row_starts: Ints, kv_lengths: Ints, num_context_rows: int, fixed: int = 0
    ) -> tuple[Ints, ...]:
        """Return `Batch.plan` for these rows, see `PlanningModel.plan`."""
        waits = self._has_experts and not self._kernels.plans_experts
        kinds = (it.kind for it in self._recurrent if it is not None)
        if waits or (fixed and not all(it.is_captured(self._kernels) for it in kinds)):
            return ()  # ops wait for the device, so the step cannot be captured
        return self._kernels.plan(
            self.attention_shapes, row_starts, kv_lengths, num_context_rows, fixed
        )

    @torch.inference_mode()
    def forward(self, batch: Batch, kv_pool: KvPool) -> Tensor:
        """Write the batch's keys and values; return logits `[S, vocab]` in the dtype of `spec`.

        A rank that computes no logits returns `[S, 0]`.
        """
        if self._tables.all is None:
            self._tables.reserve(self.spec.max_seq_len)
        rows = self._kernels.begin(
            *(self.attention_shapes, batch.rows, batch.plan),
            num_tokens=len(batch.token_ids),
            tokens_per_block=kv_pool.tokens_per_block,
        )
        adapters = self._kernels.begin_adapters(batch.adapters)
        residual = self._begin(batch)
        inputs = own.of_batch(batch, residual) if (own := self._token_inputs) else None
        hidden = self._norm(residual, self._layers[0].attention_norm)
        last = None if self._lm_head is None else self._layers[-1]
        for layer in self._layers:
            attended = self._attend(layer, hidden, batch.positions, kv_pool, rows, adapters)
            # only the sampled tokens are needed from here on
            if layer is last and not batch.all_sampled:
                attended = attended.index_select(0, batch.sample_index)
                residual = residual.index_select(0, batch.sample_index)
                inputs = of_sampled(inputs, batch.sample_index)
                if self.spec.parallel:
                    hidden = hidden.index_select(0, batch.sample_index)
                if adapters is not None:
                    sampled = adapters.rows.index_select(0, batch.sample_index)
                    adapters = replace(adapters, rows=sampled)
                    adapters = self._kernels.begin_adapters(adapters)
            hidden = self._feed_forward(layer, attended, hidden, residual, adapters, inputs)
        return self._end(hidden, residual, len(batch.sample_index))

    def new_step_capture(self) -> StepCapture | None:
        """Return a capture for `forward_captured` over one KV cache.

        Returns None for kernels without captures, for several ranks, or an overridden `forward`.
        """
        is_own = type(self).forward is CheckpointModel.forward and "forward" not in vars(self)
        return self._kernels.new_step_capture() if is_own and self._collectives is None else None

    @torch.inference_mode()
    def forward_captured(
        self, batch: Batch, kv_pool: KvPool, capture: StepCapture, begin: Begin = ignore
    ) -> Tensor:
        """Run `forward` as a captured step. Each row must have one token, which is sampled. Prompt
        embeddings, adapters and a plan are not supported.

        `capture`: from `new_step_capture`, for this pool and the batch's block tables. `begin`: see
        `StepCapture.run`.
        """
        inputs = [getattr(batch, name) for name in _CAPTURED]

        def compute(own: Sequence[Tensor]) -> Tensor:
            changes: dict[str, Any] = dict(zip(_CAPTURED, own, strict=True))
            return self.forward(replace(batch, **changes), kv_pool)

        return capture.run(inputs, self._tables.all, compute, begin)

    def _begin(self, batch: Batch) -> Tensor:
        """Return the first layer's residual `[T, C]`, received from the previous stage if any."""
        if self._embedding is not None:
            return self._norm(self._embedding.of_batch(batch, self._sum), self._embedding_norm)
        num_tokens, ids = len(batch.token_ids), batch.token_ids
        residual = ids.new_empty((num_tokens, self.spec.hidden_size), dtype=self.spec.dtype)
        assert self._collectives is not None
        return self._collectives.receive(residual)

    def _end(self, hidden: Tensor, residual: Tensor, num_sampled: int) -> Tensor:
        """Return the logits of `hidden`, or send the residual to the next stage if any."""
        if self._lm_head is None:
            assert self._collectives is not None
            self._collectives.send(residual)
            return residual.new_empty(num_sampled, 0)
        logits = self._kernels.linear(hidden, *self._lm_head)
        if self.spec.logit_scale != 1.0 or self.spec.logit_softcap:
            logits = self._kernels.scaled(logits, self.spec.logit_scale, self.spec.logit_softcap)
        if self._collectives is None:
            return logits
        return self._collectives.gather(logits, self._widths)

    def _sum(self, partial: Tensor) -> Tensor:
        """Return the sum of `partial` over the ranks that share this layer."""
        return partial if self._collectives is None else self._collectives.all_reduce(partial)

    def _project(
        self,
        hidden: Tensor,
        affine: Affine,
        layer: LayerTensors,
        matrix: str,
        adapters: StepAdapters | None,
    ) -> Tensor:
        """Return `hidden` projected by a layer's `matrix`, including the outputs of adapters."""
        result = self._kernels.linear(hidden, *affine)
        if adapters is not None:
            self._kernels.add_adapters(result, hidden, adapters, layer.number, matrix)
        return result

    def _attend(
        self,
        layer: LayerTensors,
        hidden: Tensor,
        positions: Tensor,
        kv_pool: KvPool,
        rows: RowSpans,
        adapters: StepAdapters | None,
    ) -> Tensor:
        """Run attention on the normalized residual; return the input of the output projection.

        Returns `hidden` itself in a layer without attention.
        """
        if layer.out is None:
            return hidden
        norms, recurrent, gates = self.spec.norms, self._recurrent[layer.number], None
        if recurrent is not None:
            own = [self._project(hidden, it, layer, n, adapters) for it, n in recurrent.matrices]
            return recurrent.attend(self._kernels, own, kv_pool, rows)
        pages = layer.pages.of(kv_pool)
        latent = self._latents[layer.number]
        if latent is not None:
            given = layer, latent, hidden, positions, self._tables, pages, rows
            return attend_to_latents(self._kernels, *given)
        assert layer.qkv is not None
        qkv = self._project(hidden, layer.qkv, layer, layer.qkv_name, adapters)
        if self.spec.qkv_limit:
            self._kernels.clamp(qkv, self.spec.qkv_limit)
        if width := self._gate_widths[layer.number]:
            gates, qkv = qkv[:, :width], qkv[:, width:]
        if layer.pages.keys_as_values:
            width = layer.attention.num_heads * layer.attention.head_dim
            qkv = self._kernels.joined(qkv, qkv[:, width:])
        self._norm_heads(layer, qkv)
        queries = self._kernels.rope_and_write(
            qkv,
            positions,
            self._tables.by_rope.get(layer.rope),
            layer.q_norm,
            layer.k_norm,
            norms.eps,
            pages if layer.pages.is_own else without_heads(pages),
            rows,
            layer.attention.late_norm,
            layer.attention.plus_one,
        )
        self._tables.scale(self._kernels, queries, positions, layer.temperature)
        mixed = self._kernels.attention(queries, pages, rows, layer.attention, layer.sinks)
        return mixed if gates is None else self._kernels.gated(mixed, gates)

    def _norm_heads(self, layer: LayerTensors, qkv: Tensor) -> None:
        norms = self.spec.norms
        if self._collectives is not None and norms.query_key == "all_heads":
            whole = self.whole_spec.layers[self.spec.first_layer + layer.number].attention
            norm_over_ranks(qkv, layer.head_norms, norms.eps, whole, self._collectives)
        else:
            norm_heads(self._kernels, qkv, layer.head_norms, norms)

    def _feed_forward(
        self,
        layer: LayerTensors,
        attended: Tensor,
        hidden: Tensor,
        residual: Tensor,
        adapters: StepAdapters | None,
        inputs: Tensor | None,
    ) -> Tensor:
        """Apply the output projection to `attended` and run the MLP; add both to the residual.

        The addition is in place. Returns the normalized residual `[T, C]` for the next layer.
        `attended` `[T, H * D]`: the output of attention. `hidden` `[T, C]`: the input of attention.
        In a layer without attention or without an MLP, the other one's output alone is added.
        """
        if layer.out is None:
            assert layer.mlp is not None
            out = self._mlp(layer, layer.mlp, attended, adapters)
            return self._join(self._sum(out), residual, None, layer.next_norm)
        out = self._project(attended, layer.out, layer, layer.out_name, adapters)
        if layer.mlp is None:
            return self._join(self._sum(out), residual, None, layer.next_norm)
        if self.spec.parallel:
            if layer.mlp_norm is not None:
                hidden = self._norm(residual, layer.mlp_norm)
            self._kernels.add_to(out, self._mlp(layer, layer.mlp, hidden, adapters))
            return self._join(self._sum(out), residual, None, layer.next_norm)
        hidden = self._join(self._sum(out), residual, layer.attention_out_norm, layer.mlp_norm)
        own = layer.mlp
        if isinstance(own, ExpertLayer) and own.norms is not None and own.shared is not None:
            shared = self._sum(self._mlp(layer, own.shared, hidden, adapters))
            given = residual, shared, self.spec.norms.eps, self._sum
            out = mix_apart(self._kernels, own, own.norms, *given)
        else:
            out = self._sum(self._mlp(layer, own, hidden, adapters))
        if layer.end is None:
            return self._join(out, residual, layer.mlp_out_norm, layer.next_norm)
        self._join(out, residual, layer.mlp_out_norm, None)
        if self._token_inputs is not None and inputs is not None:
            self._token_inputs.add(layer, residual, inputs)
        if layer.end.scale is not None:
            self._kernels.scale_rows(residual, layer.end.scale)
        return self._norm(residual, layer.next_norm)

    def _mlp(
        self,
        layer: LayerTensors,
        own: DenseLayer | ExpertLayer,
        hidden: Tensor,
        adapters: StepAdapters | None,
    ) -> Tensor:
        if isinstance(own, ExpertLayer):
            shared = own.shared and self._mlp(layer, own.shared, hidden, adapters)
            return mix_experts(self._kernels, own, hidden, shared)
        mlp = own.mlp
        if mlp.activation != "silu" or not mlp.gated:
            up = self._project(hidden, own.up, layer, own.up_name, adapters)
            if own.xielu is not None:
                activated = self._kernels.xielu(up, own.xielu)
            else:
                activated = self._kernels.activate(up, mlp.activation, mlp.gated)
        elif adapters is None:
            activated = self._kernels.linear_silu_mul(hidden, *own.up)
        else:  # adapters add to the input of the activation
            activated = self._kernels.linear_silu_mul_adapted(
                hidden, *own.up, adapters, layer.number, own.up_name
            )
        return self._project(activated, own.down, layer, own.down_name, adapters)

    def _norm(self, hidden: Tensor, norm: Norm | None) -> Tensor:
        norms = self.spec.norms
        if norm is None:
            return hidden
        if norms.kind == "rms":
            return self._kernels.rms_norm(hidden, norm.weight, norms.eps, norms.plus_one)
        return self._kernels.layer_norm(hidden, *norm, norms.eps, norms.plus_one)

    def _join(
        self, out: Tensor, residual: Tensor, after: Norm | None, following: Norm | None
    ) -> Tensor:
        """Add `out`, normalized by `after` and scaled, to the residual. Return the residual
        normalized by `following`.
        """
        norms = self.spec.norms
        if after is not None:
            out = self._norm(out, after)
        if self.spec.residual_scale != 1.0:
            out = self._kernels.scaled(out, self.spec.residual_scale)
        if following is None:
            self._kernels.add_to(residual, out)
            return residual
        if norms.kind == "rms":
            weight = following.weight
            return self._kernels.add_rms_norm(out, residual, weight, norms.eps, norms.plus_one)
        return self._kernels.add_layer_norm(out, residual, *following, norms.eps, norms.plus_one)
