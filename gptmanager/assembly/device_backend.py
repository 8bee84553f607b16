"""`DeviceBackend`: the kernels and the KV cache of a GPU or the emulator, and its executor."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch

from gptmanager.assembly.backend import Backend, StepOptions, reserve, torch_executor
from gptmanager.assembly.loading import Check, matrices_of
from gptmanager.assembly.ranks import Ranks
from gptmanager.assembly.sizing import MemoryBudget, Sizes, wanted_seq_len
from gptmanager.config import OptionalParams
from gptmanager.cuda.attention.provider_libraries import find_providers
from gptmanager.cuda.device.downloads import Downloads
from gptmanager.cuda.device.graphs import ladder
from gptmanager.cuda.device.streams import DeviceStream, Stream
from gptmanager.cuda.device.uploads import Uploads
from gptmanager.cuda.kernels import CudaKernels, ProvidedCudaKernels
from gptmanager.decoding.lines import Lines
from gptmanager.decoding.processors.logits import PostProcessing
from gptmanager.decoding.sampling.device_sampling import DeviceSampler
from gptmanager.executor.choice.device_chooser import DeviceChooser
from gptmanager.executor.device_runner import DeviceRunner
from gptmanager.executor.packed_rows import StepShape
from gptmanager.executor.rank_executor import RankExecutor
from gptmanager.executor.sequence_tables import DeviceTables
from gptmanager.executor.staged_executor import NoChooser
from gptmanager.executor.torch_executor import TorchExecutor
from gptmanager.memory.cuda_kv_pool import CudaKvPool
from gptmanager.models.hf.network import TransformersModel
from gptmanager.models.model import Model, page_shapes, state_shapes


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
            return torch_executor(runner, chooser, sizes, options)
        own = chooser if rank.chooses else NoChooser(options.lines)
        return rank.executor(torch_executor(runner, own, sizes, options))

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
            num_lines=lines.count + sizes.num_snapshots,
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
        reserve(model, num_positions)
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
