"""`CpuBackend`: the kernels and the KV cache of a CPU, and its executor."""

from __future__ import annotations

import torch

from gptmanager.assembly.backend import Backend, StepOptions, reserve, torch_executor
from gptmanager.assembly.sizing import MemoryBudget, Sizes
from gptmanager.config import OptionalParams
from gptmanager.cuda.attention.provider_libraries import find_providers
from gptmanager.decoding.processors.logits import PostProcessing
from gptmanager.decoding.sampling.sampling import Sampler, sample_rows
from gptmanager.environment.machine.memory import free_memory_bytes
from gptmanager.executor.choice.token_chooser import Chooser, TokenChooser
from gptmanager.executor.rank_executor import RankExecutor
from gptmanager.executor.runner import Runner
from gptmanager.executor.sequence_tables import SequenceTables
from gptmanager.executor.staged_executor import NoChooser, StagedExecutor
from gptmanager.executor.torch_executor import TorchExecutor
from gptmanager.kernels import CpuKernels
from gptmanager.kernels.provided import ProvidedCpuKernels
from gptmanager.kernels.simd.dtypes import DTYPES
from gptmanager.kernels.simd.threads import keep_within_quota
from gptmanager.memory.kv_pool import KvPool
from gptmanager.models.model import Model, page_shapes, state_shapes


class CpuBackend(Backend):
    """The CPU. Pages have the dtype of the model, or float32 if no CPU kernel supports it."""

    bodies = (sample_rows,)

    def __init__(self, params: OptionalParams) -> None:
        self.device = torch.device("cpu")
        self.providers = find_providers(params.attention_provider, self.device)
        if self.providers or params.linear_provider is not None:
            self.kernels = provided = ProvidedCpuKernels()
            provided.use_linear(params.linear_provider)
        else:
            self.kernels = CpuKernels(deterministic=params.deterministic)
        keep_within_quota()

    def memory_budget(
        self, model: Model, params: OptionalParams, max_beam_width: int
    ) -> MemoryBudget:
        return MemoryBudget(free_memory_bytes(), self._dtype(model))

    def executor(
        self, model: Model, sizes: Sizes, options: StepOptions
    ) -> TorchExecutor | RankExecutor:
        pool = KvPool(
            *(page_shapes(model.spec), sizes.num_blocks, sizes.tokens_per_block),
            num_host_blocks=sizes.num_host_blocks,
            state_shapes=state_shapes(model.spec),
            num_lines=options.lines.count + sizes.num_snapshots,
            contiguous=sizes.contiguous,
            dtype=self._dtype(model),
        )
        lines = options.lines
        tables = SequenceTables(lines.count, sizes.max_seq_len, sizes.blocks_per_sequence)
        processing = options.processing or PostProcessing(lines)
        runner = Runner(model, pool, tables, self._adapter_pool(model, options))

        def executor_of(chooser: Chooser) -> TorchExecutor:
            return torch_executor(runner, chooser, sizes, options)

        def chooser(own: SequenceTables) -> TokenChooser:
            sampler = Sampler(lines.count, model.spec.vocab_size, own.tokens)
            return TokenChooser(lines, own, sampler, processing)

        executor: TorchExecutor | RankExecutor
        rank = options.rank
        if rank is None:
            executor = executor_of(chooser(tables))
        elif rank.layout.pipeline_parallel_size == 1:
            executor = rank.executor(
                executor_of(chooser(tables) if rank.chooses else NoChooser(lines))
            )
        elif rank.chooses:
            own = SequenceTables(lines.count, sizes.max_seq_len, 0)
            staged = StagedExecutor(executor_of(NoChooser(lines)), chooser(own), own)
            executor = rank.executor(staged)
        else:
            executor = rank.executor(StagedExecutor(executor_of(NoChooser(lines))))
        # last, so that the RoPE tables are not filled if an allocation above fails
        reserve(model, sizes.max_seq_len)
        return executor

    def _dtype(self, model: Model) -> torch.dtype:
        own = getattr(model.spec, "dtype", torch.float32)
        return own if own in DTYPES or own is torch.float64 else torch.float32
