"""`Backend`: the device of a model and its KV cache, and the executor that runs steps there.

A backend selects the kernels, the dtype of pages and the memory budget for its device. This module
knows nothing about scheduling.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from gptmanager.assembly.adapter_sizing import AdapterSizes
from gptmanager.assembly.attention_choice import Agree, choose
from gptmanager.assembly.attention_trial import OWN, Seconds, StepLimits
from gptmanager.assembly.loading import Check, load, matrices_of
from gptmanager.assembly.ranks import Ranks
from gptmanager.assembly.sizing import MemoryBudget, Sizes, wanted_seq_len
from gptmanager.config import OptionalParams
from gptmanager.cuda.attention.provider_libraries import find_providers
from gptmanager.cuda.device.downloads import Downloads
from gptmanager.cuda.device.graphs import ladder, token_ladder
from gptmanager.cuda.device.streams import DeviceStream, EmulatedStream, Stream
from gptmanager.cuda.device.uploads import Uploads
from gptmanager.cuda.kernels import CudaKernels, ProvidedCudaKernels
from gptmanager.decoding.lines import Lines
from gptmanager.decoding.processors.logits import PostProcessing
from gptmanager.decoding.sampling.device_sampling import DeviceSampler
from gptmanager.decoding.sampling.sampling import Sampler, sample_rows
from gptmanager.environment.machine.memory import free_memory_bytes
from gptmanager.executor.captured_steps import step_shapes
from gptmanager.executor.choice.device_chooser import DeviceChooser
from gptmanager.executor.choice.token_chooser import Chooser, TokenChooser
from gptmanager.executor.device_runner import DeviceRunner
from gptmanager.executor.packed_rows import StepShape
from gptmanager.executor.rank_executor import RankExecutor, RankPlace
from gptmanager.executor.runner import Runner
from gptmanager.executor.sequence_tables import DeviceTables, SequenceTables
from gptmanager.executor.staged_executor import NoChooser, StagedExecutor
from gptmanager.executor.torch_executor import TorchExecutor
from gptmanager.kernels import AttentionProvider, CpuKernels, Kernels
from gptmanager.kernels.provided import ProvidedCpuKernels, ProvidedKernels
from gptmanager.kernels.simd.dtypes import DTYPES
from gptmanager.kernels.simd.threads import keep_within_quota
from gptmanager.memory.adapter_pool import AdapterPool
from gptmanager.memory.cuda_kv_pool import CudaKvPool
from gptmanager.memory.kv_pool import KvPool
from gptmanager.models.hf.network import TransformersModel
from gptmanager.models.model import Model, page_shapes, state_shapes


def place(params: OptionalParams, local_rank: int | None = None) -> Backend:
    """Return the backend for `OptionalParams.device`.

    If the device is "cuda" without a number, its number is `local_rank`, the rank's number on this
    machine. Raise ConfigError if the device does not exist.
    """
    kind = (params.device or "cpu").partition(":")[0]
    if kind == "cpu":
        return CpuBackend(params)
    name = params.device or ""
    if name == "cuda" and local_rank is not None:
        name = f"cuda:{local_rank}"
    stream: Stream = EmulatedStream() if kind == "emulator" else DeviceStream(name)
    return DeviceBackend(stream, params)


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
            num_lines=options.lines.count,
            contiguous=sizes.contiguous,
            dtype=self._dtype(model),
        )
        lines = options.lines
        tables = SequenceTables(lines.count, sizes.max_seq_len, sizes.blocks_per_sequence)
        processing = options.processing or PostProcessing(lines)
        runner = Runner(model, pool, tables, self._adapter_pool(model, options))

        def torch_executor(chooser: Chooser) -> TorchExecutor:
            return _torch_executor(runner, chooser, sizes, options)

        def chooser(own: SequenceTables) -> TokenChooser:
            sampler = Sampler(lines.count, model.spec.vocab_size, own.tokens)
            return TokenChooser(lines, own, sampler, processing)

        executor: TorchExecutor | RankExecutor
        rank = options.rank
        if rank is None:
            executor = torch_executor(chooser(tables))
        elif rank.layout.pipeline_parallel_size == 1:
            executor = rank.executor(
                torch_executor(chooser(tables) if rank.chooses else NoChooser(lines))
            )
        elif rank.chooses:
            own = SequenceTables(lines.count, sizes.max_seq_len, 0)
            staged = StagedExecutor(torch_executor(NoChooser(lines)), chooser(own), own)
            executor = rank.executor(staged)
        else:
            executor = rank.executor(StagedExecutor(torch_executor(NoChooser(lines))))
        # last, so that the RoPE tables are not filled if an allocation above fails
        _reserve(model, sizes.max_seq_len)
        return executor

    def _dtype(self, model: Model) -> torch.dtype:
        own = getattr(model.spec, "dtype", torch.float32)
        return own if own in DTYPES or own is torch.float64 else torch.float32


class DeviceBackend(Backend):
    """A CUDA device, or the emulator. Pages have the spec's `kv_cache_dtype`, or its `dtype`."""

    stream: Stream
    kernels: CudaKernels

    def __init__(self, stream: Stream, params: OptionalParams) -> None:
        self.device = stream.device
        self.providers = find_providers(params.attention_provider, self.device)
        if self.providers or params.linear_provider is not None:
            self.kernels = provided = ProvidedCudaKernels(stream.launcher)
            provided.use_linear(params.linear_provider)
        else:
            self.kernels = CudaKernels(stream.launcher, deterministic=params.deterministic)
        self.stream = stream
        features = stream.launcher.features
        self._cuda_graphs = params.cuda_graphs and features.graphs
        captures_mixed = self._cuda_graphs and features.mixed_graphs
        self._token_sizes = stream.token_sizes if captures_mixed else ()
        self._max_num_tokens = params.max_num_tokens
        self._seconds = stream.seconds if isinstance(stream, DeviceStream) else None
        self._on_progress = params.on_progress

    def load(
        self,
        source: Any,
        params: OptionalParams,
        ranks: Ranks | None = None,
        check: Check = lambda spec: None,
    ) -> Model:
        self.stream.catch_up()  # a host has filled its tensors on this thread's current stream
        with self.stream:  # a network of transformers runs once, to see whether it can
            model = super().load(source, params, ranks, check)
            if isinstance(self.stream, DeviceStream):
                name = torch.cuda.get_device_name(self.device)
                agree = () if ranks is None else (ranks.share_matmuls,)
                self.kernels.measure_matmuls(matrices_of(model), name, self.stream.timer, *agree)
        if ranks is not None:
            self._token_sizes = ()  # the sizes to capture must be the same on all ranks
        if isinstance(model, TransformersModel):
            self._cuda_graphs, self._token_sizes = False, ()  # its steps are not captured
        return model

    def memory_budget(
        self, model: Model, params: OptionalParams, max_beam_width: int
    ) -> MemoryBudget:
        """Return the memory that remains next to the largest step and the largest CUDA graphs.

        Both run here with a KV cache of one block, to measure their memory.
        """
        self._reserve(model, wanted_seq_len(params, model.spec))
        rows = params.max_batch_size * max_beam_width
        peak = self._peak_bytes(model, params, rows)
        gc.collect()  # all memory of the measurement must be free again
        # the measured steps lack the sampler's marks: 4 bytes for each row and token id
        marks = rows * model.spec.vocab_size * torch.float32.itemsize
        free = self.stream.free_bytes() - peak - marks
        return MemoryBudget(free, self._dtype(model), shared=self.device.type == "cpu")

    def executor(
        self, model: Model, sizes: Sizes, options: StepOptions
    ) -> TorchExecutor | RankExecutor:
        self._reserve(model, sizes.max_seq_len)
        rows = options.max_batch_size * options.lines.max_beam_width
        runner, chooser = self._parts(
            *(model, sizes, options, ladder(rows) if self._cuda_graphs else ()),
            shapes=self._shapes(model, rows),
        )
        rank = options.rank
        if rank is None:
            return _torch_executor(runner, chooser, sizes, options)
        own = chooser if rank.chooses else NoChooser(options.lines)
        return rank.executor(_torch_executor(runner, own, sizes, options))

    def _parts(
        self,
        model: Model,
        sizes: Sizes,
        options: StepOptions,
        graph_sizes: Sequence[int],
        shapes: Sequence[StepShape] = (),
    ) -> tuple[DeviceRunner, DeviceChooser]:
        """Build the parts that run steps, and allocate their memory on the device."""
        lines, stream, vocab_size = options.lines, self.stream, model.spec.vocab_size
        pool = CudaKvPool(
            stream.launcher,
            *(page_shapes(model.spec), sizes.num_blocks, sizes.tokens_per_block),
            num_host_blocks=sizes.num_host_blocks,
            state_shapes=state_shapes(model.spec),
            num_lines=lines.count,
            dtype=self._dtype(model),
            device=self.device,
        )
        uploads = Uploads(stream)
        downloads = Downloads(stream, 8 * lines.count)  # token and log probability of each line
        processing = options.processing or PostProcessing(lines, stream=stream)
        with stream:
            tables = DeviceTables(
                lines.count, sizes.max_seq_len, sizes.blocks_per_sequence, stream.device
            )
            sampler = DeviceSampler(
                *(lines.count, vocab_size, tables.tokens, stream.launcher, stream.device),
                dtype=getattr(model.spec, "dtype", torch.float32),
            )
            chooser = DeviceChooser(
                *(lines, tables, sampler, processing), uploads=uploads, downloads=downloads
            )
            runner = DeviceRunner(
                *(model, pool, tables, stream, uploads, downloads),
                adapter_pool=self._adapter_pool(model, options),
                graph_sizes=graph_sizes,
                shapes=shapes,
                has_beams=lines.max_beam_width > 1,
                chooser=chooser if options.rank is None else None,
                on_progress=self._on_progress,
            )
            stream.synchronize()
        return runner, chooser

    def _reserve(self, model: Model, num_positions: int) -> None:
        _reserve(model, num_positions)
        self.stream.catch_up()  # the position tables were filled on this thread's current stream

    def _peak_bytes(self, model: Model, params: OptionalParams, rows: int) -> int:
        """Return the peak bytes of steps with `rows` sampled rows, plus those of their CUDA graphs.

        The two peaks are added, because a graph keeps its memory while other steps run.
        """
        longest = wanted_seq_len(params, model.spec)
        block = params.kv_cache_config.tokens_per_block
        sizes = Sizes(1, block, longest, longest - 1, False, False, longest)

        def runner() -> DeviceRunner:
            return self._parts(model, sizes, StepOptions(Lines(1)), ())[0]

        largest = self.stream.peak_bytes(lambda: runner().run_largest(params.max_num_tokens, rows))
        if not self._cuda_graphs:
            return largest
        shapes = self._shapes(model, rows)[-1:]
        return largest + self.stream.peak_bytes(
            lambda: runner().run_captured(ladder(rows)[-1], shapes)
        )

    def _dtype(self, model: Model) -> torch.dtype:
        own = getattr(model.spec, "dtype", torch.float32)
        return getattr(model.spec, "kv_cache_dtype", None) or own


def _torch_executor(
    runner: Runner, chooser: Chooser, sizes: Sizes, options: StepOptions
) -> TorchExecutor:
    # Ranks must run the same batches, but may run out of memory at different ones. A batch that
    # fails in the middle may have changed recurrent states, so it cannot run again in parts.
    splits = options.rank is None and not state_shapes(runner.model.spec)
    return TorchExecutor(
        *(runner, chooser),
        attention_window=sizes.window,
        fused=options.fused,
        splits_batches=splits,
    )


def _reserve(model: Model, num_positions: int) -> None:
    reserve = getattr(model, "reserve_positions", None)  # a caller's own model may lack it
    if reserve is not None:
        reserve(num_positions)
