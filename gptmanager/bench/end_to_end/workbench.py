"""`Workbench`: the device, the model and the running manager of the end-to-end benchmark.

The workbench chooses the model, its dtype, the managers' parameters, and the scale of the
benchmark. The default scale is smaller on a CPU than on a GPU.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptmanager.bench.end_to_end.dense_reference import unsupported_reason
from gptmanager.bench.end_to_end.device_trace import trace_device
from gptmanager.bench.end_to_end.serving_parts import Pressure, Target
from gptmanager.bench.engine import IterationLog, Session
from gptmanager.bench.load import (
    LLAMA_8B,
    SMALL_LLAMA,
    RandomLlama,
    Request,
    Source,
    read_checkpoint,
    read_config,
    uniform_requests,
)
from gptmanager.bench.roofline import Ceilings, ModelShape, measure_ceilings
from gptmanager.bench.timing import Budget, ClockTimer, DeviceTimer
from gptmanager.config import KvCacheConfig, OptionalParams, ProgressCallback
from gptmanager.models.read_spec import read_dtype

ON_CPU = ("cpu", "emulator")
_MODEL_FIELDS = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
# (prompt tokens, output tokens, requests)
SATURATED = ((128, 128, 4096), (1000, 1000, 512), (2048, 128, 768))


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of the benchmark. Lengths are in tokens.

    `steps`: generation steps that are timed per case. A case is a batch size and a context length.
    All `batches` are timed with the first of `contexts`, and all batches but the largest with each
    other context. `peer_requests`: how many requests also run through transformers. `copy_bytes`,
    `matmul_width`: see `measure_ceilings`. `saturated`: loads that fill the KV cache, in the format
    of `SATURATED`. `kv_cache_tokens`: the size of the KV cache, or None for the default of
    `GptManager`.
    """

    requests: int
    lengths: tuple[int, int]  # lengths of prompts and outputs, both ends included
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    steps: int
    peer_requests: int
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    copy_bytes: int
    matmul_width: int
    pressure: Pressure
    saturated: tuple[tuple[int, int, int], ...] = ()
    kv_cache_tokens: int | None = None


GPU_SCALE = Scale(256, (100, 1024), (1, 32, 128, 256), (1024, 4096), 64, 64, 256, 8192, 8192,
                  4 << 30, 8192, Pressure(512, 128, 1024, (64, 512), 65536), SATURATED)  # fmt: skip
CPU_SCALE = Scale(16, (16, 128), (1, 8), (128,), 16, 16, 64, 1024, 1024, 64 << 20, 1024,
                  Pressure(24, 16, 128, (8, 64), 1024), kv_cache_tokens=16384)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EndToEndOptions:
    """The options of `bench_end_to_end`.

    `device` is as in `OptionalParams`. `model` is a checkpoint; if it is None, the weights are
    random. `dtype` is by default the checkpoint's; random weights are bfloat16 on a GPU and float32
    on a CPU. The defaults of `scale` and `run_ahead` depend on the device. `ablations` are keys of
    `benchmark.ABLATIONS`.
    """

    device: str = "cuda"
    model: Path | None = None
    scale: Scale | None = None
    only: tuple[str, ...] = ()
    dtype: str | None = None
    run_ahead: int | None = None
    quick: bool = False
    minutes: float | None = None
    seed: int = 0
    command: tuple[str, ...] = ()
    ablations: tuple[str, ...] = ()


class Workbench:
    """Loads a model once, and starts managers for it, one at a time. Call `load` first.

    Each manager calls `on_progress` while it loads.
    """

    source: Source  # the checkpoint that managers load
    config: dict[str, Any]
    weights: Mapping[str, Tensor] | None  # for the reference, if it supports the model
    ceilings: Ceilings
    shape: ModelShape | None

    def __init__(
        self, options: EndToEndOptions, on_progress: ProgressCallback | None = None
    ) -> None:
        self.options = options
        self.device = torch.device("cpu" if options.device in ON_CPU else options.device)
        self.scale = options.scale or (CPU_SCALE if self.device.type == "cpu" else GPU_SCALE)
        self.startups: list[dict[str, Any]] = []  # for each manager: batch size, seconds to start
        self.changes: Mapping[str, Any] = {}  # overrides of a manager's parameters
        self._on_progress = on_progress
        self._session: Session | None = None
        self._log = IterationLog()

    def load(self, budget: Budget) -> dict[str, Any]:
        """Load the model and measure the ceilings. Return the report's fields about both.

        Times are measured with the clock of `budget`.
        """
        started = budget.used
        self.source, self.config, self.weights = self._model()
        weights_s = budget.used - started
        dtype = read_dtype(self.config, self.dtype)  # managers read it the same way
        timer = ClockTimer() if self.device.type == "cpu" else DeviceTimer()
        sizes = (self.scale.copy_bytes, self.scale.matmul_width)
        self.ceilings = measure_ceilings(timer, self.device, dtype, *sizes)
        self.shape = ModelShape.of(self.config, dtype.itemsize, dtype.itemsize)
        return {
            "construction": {"weights_s": round(weights_s, 1), "managers": self.startups},
            "model": {
                **{name: self.config.get(name) for name in _MODEL_FIELDS},
                "dtype": str(dtype).removeprefix("torch."),
                "weights": str(self.options.model or "random"),
            },
            "ceilings": self.ceilings.report(),
            "prepared_s": round(budget.used - started, 1),
        }

    def target(self, max_batch_size: int | None = None) -> Target:
        """Return the running manager with its limits. Start a manager if none runs."""
        size = max_batch_size or self.scale.max_batch_size
        if self._session is None:
            started = time.perf_counter()
            self._session = Session(self.source, self.params(size), log=self._log)
            made = time.perf_counter()
            self._session.warm_up()
            took = {"made_s": made - started, "first_request_s": time.perf_counter() - made}
            took = {name: round(seconds, 2) for name, seconds in took.items()}
            self.startups.append({"max_batch_size": size, **self.changes, **took})
        return Target(
            session=self._session,
            log=self._log,
            vocab_size=self.config["vocab_size"],
            max_num_tokens=self.scale.max_num_tokens,
            max_batch_size=size,
            ceilings=self.ceilings,
            shape=self.shape,
            trace=trace_device if self.device.type == "cuda" else None,
        )

    def close(self) -> None:
        """Shut down the running manager, if any, and release its memory."""
        session, self._session = self._session, None
        if session is not None:
            session.close()
        gc.collect()
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # the error that broke the context, which was reported
                torch.cuda.empty_cache()

    def params(self, max_batch_size: int) -> OptionalParams:
        """Return the parameters of a manager, with the current `changes`."""
        limit = self.config.get("max_position_embeddings") or self.scale.max_seq_len
        return OptionalParams(
            kv_cache_config=KvCacheConfig(max_tokens=self.scale.kv_cache_tokens),
            max_batch_size=max_batch_size,
            max_num_tokens=self.scale.max_num_tokens,
            max_seq_len=min(self.scale.max_seq_len, limit),
            run_ahead=self.options.run_ahead,
            device=self.options.device,
            dtype=self.dtype,
            black_box_iterations=0,
            on_progress=self._on_progress,
            **self.changes,
        )

    @property
    def dtype(self) -> str | None:
        """The name of the weights' dtype; None means the checkpoint's."""
        if self.options.dtype is not None or self.options.model is not None:
            return self.options.dtype
        return "float32" if self.device.type == "cpu" else "bfloat16"

    @property
    def is_goal_shape(self) -> bool:
        """Whether the goals are set for this model and this scale."""
        return self.config is LLAMA_8B and self.scale is GPU_SCALE

    @property
    def requests(self) -> Sequence[Request]:
        """The requests of the load."""
        lengths = self.scale.lengths
        return uniform_requests(self.scale.requests, lengths, lengths, self.config["vocab_size"])

    def _model(self) -> tuple[Source, dict[str, Any], Mapping[str, Tensor] | None]:
        """Return the managers' source, the config, and weights if the reference can use them."""
        if self.options.model is not None:
            config = read_config(self.options.model)
            if unsupported_reason(config):
                return self.options.model, config, None
            dtype = read_dtype(config, self.dtype)
            _, read = read_checkpoint(self.options.model)
            weights = {name: weight.to(self.device, dtype) for name, weight in read.items()}
            return self.options.model, config, weights
        config = SMALL_LLAMA if self.device.type == "cpu" else LLAMA_8B
        dtype = getattr(torch, self.dtype or "float32")
        drawn = RandomLlama(config, self.options.seed, dtype=dtype, device=self.device)
        return (config, drawn), config, drawn
