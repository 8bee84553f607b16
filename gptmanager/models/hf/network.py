"""`TransformersModel`: a network from transformers as a `Model`, with our attention and matmuls."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from gptmanager.kernels.attention.attention_arguments import AttentionShape
from gptmanager.kernels.gemm.packed_matrix import Quantized
from gptmanager.kernels.reference import Ints, Kernels
from gptmanager.memory.kv_pool import KvPool, PageShape
from gptmanager.models.batch import Batch
from gptmanager.models.hf.attention import (
    PagedStep,
    StepHolder,
    attend,
    describe_mask,
    hold,
    note_call,
)
from gptmanager.models.hf.experts import find_experts, replace_experts
from gptmanager.models.hf.fixed_rope import fix_rotations
from gptmanager.models.hf.library import register
from gptmanager.models.hf.linears import find_linears, num_bytes, replace_linears
from gptmanager.models.hf.probe import check_forward, probe


@dataclass(frozen=True, slots=True)
class TransformersSpec:
    """The sizes of a network for a manager. `pages` has the shape of each layer's KV cache pages.

    `num_kv_heads` and `head_dim` are the sizes of the layer with the largest pages. All head sizes
    may be padded, see `Kernels.padded_head_dim`.
    """

    vocab_size: int
    max_position_embeddings: int
    max_seq_len: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    dtype: torch.dtype
    pages: tuple[PageShape, ...]


class TransformersModel:
    """A causal language model of transformers. Its steps are not captured in CUDA graphs.

    `network` must be on the CPU. The constructor replaces its attention, its linear layers and its
    experts with ours, and moves it to `device`. `kernels` must be for this device. `kind_of` maps
    the name of a linear layer, or of a module of experts, to its quantization, or to None.
    `max_seq_len` is by default the config's `max_position_embeddings`. If paged attention does not
    support a feature of the network, the constructor raises a ConfigError that names this feature.
    """

    def __init__(
        self,
        network: nn.Module,
        kernels: Kernels,
        *,
        kind_of: Callable[[str], Quantized | None] = lambda name: None,
        max_seq_len: int | None = None,
        device: torch.device | str = "cpu",
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.network, self._kernels = network.eval().requires_grad_(False), kernels
        config: Any = network.config
        config = config.get_text_config()
        self._holder = StepHolder()
        self._lock = threading.Lock()  # the network's modules hold one step, also of two managers
        register(attend, note_call, describe_mask)
        hold(network, self._holder)
        calls = [
            call._replace(shape=_padded(call.shape, kernels))
            for call in probe(network, self._holder, config.num_hidden_layers)
        ]
        self.attention_shapes = tuple(dict.fromkeys(call.shape for call in calls))
        longest = config.max_position_embeddings
        fix_rotations(network, max_seq_len or longest)
        largest = max(self.attention_shapes, key=lambda it: it.num_kv_heads * it.head_dim)
        self.spec = TransformersSpec(
            vocab_size=config.vocab_size,
            max_position_embeddings=longest,
            max_seq_len=max_seq_len or longest,
            num_layers=len(calls),
            num_kv_heads=largest.num_kv_heads,
            head_dim=largest.head_dim,
            hidden_size=config.hidden_size,
            dtype=next(network.parameters()).dtype,
            pages=tuple(
                PageShape(it.shape.num_kv_heads, it.shape.head_dim)
                for it in sorted(calls, key=lambda call: call.layer)
            ),
        )
        done, total = count(1), len(find_experts(network)) + len(find_linears(network))
        options: Any = kernels, kind_of, lambda: on_progress(next(done), total), device
        experts = replace_experts(network, *options)
        kernels.warm_up_layers(["experts"] if experts else [])
        self.matrices = experts + replace_linears(network, *options)
        hold(network, self._holder)
        self.nbytes = num_bytes(network, self.matrices)
        if str(device) != "cpu":
            network.to(device)
            check_forward(network, self._holder, device)
        self._selects = "logits_to_keep" in inspect.signature(network.forward).parameters

    def plan(
        self, row_starts: Ints, kv_lengths: Ints, num_context_rows: int, fixed: int = 0
    ) -> tuple[Ints, ...]:
        if fixed:  # steps cannot be captured, because code of transformers may wait for the device
            return ()
        return self._kernels.plan(self.attention_shapes, row_starts, kv_lengths, num_context_rows)

    @torch.inference_mode()
    def forward(self, batch: Batch, kv_pool: KvPool) -> Tensor:
        """Write the batch's keys and values; return logits `[S, vocab]`."""
        rows = self._kernels.begin(
            self.attention_shapes,
            batch.rows,
            batch.plan,
            num_tokens=len(batch.token_ids),
            tokens_per_block=kv_pool.tokens_per_block,
        )
        step = PagedStep(self._kernels, rows, batch.positions, kv_pool.layers)
        options: dict[str, Any] = {"logits_to_keep": batch.sample_index} if self._selects else {}
        with self._lock, self._holder.during(step), self._prompt_embeddings(batch):
            found = self.network(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                **options,
            )
        logits: Tensor = found.logits[0]
        return logits if self._selects else logits.index_select(0, batch.sample_index)

    @contextmanager
    def _prompt_embeddings(self, batch: Batch) -> Iterator[None]:
        """Let the network use the batch's prompt embeddings, if any, within the `with` block.

        The network still gets the tokens of the batch, because some architectures (Gemma 3n and 4)
        look them up in a second table. Without tokens, they would compute other requests wrongly.
        """
        index, given = batch.prompt_index, batch.prompt_embeddings
        if index is None or given is None:
            yield
            return

        def replaced(module: nn.Module, _: Any, embedded: Tensor) -> Tensor:
            return embedded.index_copy(1, index, given.to(embedded)[None])

        network: Any = self.network
        hook = network.get_input_embeddings().register_forward_hook(replaced)
        try:
            yield
        finally:
            hook.remove()


def _padded(shape: AttentionShape, kernels: Kernels) -> AttentionShape:
    return shape._replace(head_dim=kernels.padded_head_dim(shape.head_dim))
