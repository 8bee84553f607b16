"""`Backend`: the device of a model and its KV cache, and the executor that runs steps there.

A backend selects the kernels, the dtype of pages and the memory budget for its device. This module
knows nothing about scheduling.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from gptmanager.assembly.adapter_sizing import AdapterSizes
from gptmanager.assembly.attention_choice import Agree, choose
from gptmanager.assembly.attention_trial import OWN, Seconds, StepLimits
from gptmanager.assembly.loading import Check, load
from gptmanager.assembly.ranks import Ranks
from gptmanager.assembly.sizing import MemoryBudget, Sizes, wanted_seq_len
from gptmanager.config import OptionalParams
from gptmanager.cuda.device.graphs import token_ladder
from gptmanager.cuda.device.streams import Stream
from gptmanager.decoding.lines import Lines
from gptmanager.decoding.processors.logits import PostProcessing
from gptmanager.executor.captured_steps import step_shapes
from gptmanager.executor.choice.token_chooser import Chooser
from gptmanager.executor.packed_rows import StepShape
from gptmanager.executor.rank_executor import RankExecutor, RankPlace
from gptmanager.executor.runner import Runner
from gptmanager.executor.torch_executor import TorchExecutor
from gptmanager.kernels import AttentionProvider, Kernels
from gptmanager.kernels.provided import ProvidedKernels
from gptmanager.kernels.simd.dtypes import DTYPES
from gptmanager.memory.adapter_pool import AdapterPool
from gptmanager.models.model import Model, state_shapes


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Options of the executor.

    `fused` is explained at `TorchExecutor`. If `processing` is None, the backend creates one.
    `adapters` is None if no adapters are used, and `rank` is None if there is a single rank.
    """

    lines: Lines
    max_batch_size: int = 1
    fused: bool = True
    processing: PostProcessing | None = None
    adapters: AdapterSizes | None = None
    rank: RankPlace | None = None


class Backend(ABC):
    """A device, the kernels for it, and an executor that uses both."""

    device: torch.device
    kernels: Kernels
    bodies: Sequence[Callable[[int], None]] = ()  # functions to compile besides the kernels
    stream: Stream | None = None  # steps are enqueued on it; if None, they run at once
    providers: Sequence[AttentionProvider] = ()  # for `choose_attention`, which empties it
    _cuda_graphs, _max_num_tokens = False, 0
    _token_sizes: Sequence[int] = ()  # numbers of tokens of captured steps with contexts
    _seconds: Seconds | None = None  # times a function on the GPU; None without a GPU

    def load(
        self,
        source: Any,
        params: OptionalParams,
        ranks: Ranks | None = None,
        check: Check = lambda spec: None,
    ) -> Model:
        """Load a checkpoint, or return `source` if it is a model. Raise ConfigError otherwise.

        If there are several `ranks`, each loads its part of the checkpoint. `check` is explained
        at `assembly.loading.load`.
        """
        collectives = None if ranks is None else ranks.collectives
        return load(source, params, self.kernels, self.device, self.bodies, collectives, check)

    def choose_attention(
        self, model: Model, params: OptionalParams, agree: Agree = lambda names: names
    ) -> None:
        """Select what computes attention, by the option `attention_provider`.

        `agree` is explained at `attention_choice.choose`.
        """
        is_auto = isinstance(params.attention_provider, str) and params.attention_provider == "auto"
        if not isinstance(self.kernels, ProvidedKernels) or not self.providers:
            if is_auto:  # a rank that has providers waits for this call
                agree((OWN, OWN))
            return
        graphs = self._cuda_graphs, bool(self._shapes(model, params.max_batch_size))
        sizes = params.max_batch_size, params.max_num_tokens, wanted_seq_len(params, model.spec)
        limits = StepLimits(*sizes, params.kv_cache_config.tokens_per_block, *graphs)
        dtype = getattr(model.spec, "dtype", torch.float32)
        given = self.kernels, self.providers, getattr(model, "attention_shapes", ())
        with self.stream or nullcontext(), torch.inference_mode():
            choose(*given, dtype, limits, self._seconds if is_auto else None, agree, self.device)
        self.providers = ()
        if self.kernels.has_providers:
            self._token_sizes = ()

    def _adapter_pool(self, model: Model, options: StepOptions) -> AdapterPool | None:
        sizes = options.adapters
        if sizes is None:
            return None
        return AdapterPool(
            *(sizes.cache, sizes.pages_per_host_block, sizes.torch_dtype, self.device),
            modules=dict(sizes.modules),
            num_layers=sizes.num_layers,
            share=getattr(model, "adapter_share", None),
            warm_up=self.kernels.warm_up_adapters if sizes.torch_dtype in DTYPES else lambda: None,
        )

    def _shapes(self, model: Model, rows: int) -> tuple[StepShape, ...]:
        """Return the shapes for which steps with contexts are captured."""
        sizes = token_ladder(self._token_sizes, self._max_num_tokens, model.nbytes)
        return step_shapes(sizes, rows)

    @abstractmethod
    def memory_budget(
        self, model: Model, params: OptionalParams, max_beam_width: int
    ) -> MemoryBudget:
        """Return the memory for the KV cache; a device keeps memory free for its largest step."""

    @abstractmethod
    def executor(
        self, model: Model, sizes: Sizes, options: StepOptions
    ) -> TorchExecutor | RankExecutor:
        """Build the executor, with a KV cache of the given sizes."""


def torch_executor(
    runner: Runner, chooser: Chooser, sizes: Sizes, options: StepOptions
) -> TorchExecutor:
    """Return the executor of a step, with the parts that a backend has built."""
    # Ranks must run the same batches, but may run out of memory at different ones. A batch that
    # fails in the middle may have changed recurrent states, so it cannot run again in parts.
    splits = options.rank is None and not state_shapes(runner.model.spec)
    return TorchExecutor(
        *(runner, chooser),
        attention_window=sizes.window,
        fused=options.fused,
        splits_batches=splits,
    )


def reserve(model: Model, num_positions: int) -> None:
    """Let the model prepare tables for this number of positions, if it has tables."""
    own = getattr(model, "reserve_positions", None)  # a caller's own model may lack it
    if own is not None:
        own(num_positions)
