"""`assemble`: builds the model, the executor and the blueprint of a loop, and sizes its memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from gptmanager.assembly.adapter_sizing import AdapterSizes, adapter_sizes
from gptmanager.assembly.backend import Backend, StepOptions
from gptmanager.assembly.blueprint import Blueprint
from gptmanager.assembly.cpu_backend import CpuBackend
from gptmanager.assembly.device_backend import DeviceBackend
from gptmanager.assembly.ranks import Ranks
from gptmanager.assembly.sizing import MemoryBudget, Sizes, size
from gptmanager.assembly.stateful import refuse_for_states, settle_reuse, without_states
from gptmanager.config import CapacitySchedulerPolicy, ModelType, OptionalParams, SchedulerConfig
from gptmanager.cuda.device.streams import DeviceStream, EmulatedStream, Stream
from gptmanager.decoding.lines import Lines
from gptmanager.decoding.processors.logits import PostProcessing
from gptmanager.environment.machine.memory import free_memory_bytes
from gptmanager.errors import ConfigError, response_text
from gptmanager.executor.rank_executor import RankExecutor
from gptmanager.executor.torch_executor import TorchExecutor
from gptmanager.lifecycle.watchdog import CallbackTimer
from gptmanager.memory.checkpoint.digest import checkpoint_digest
from gptmanager.models.model import Dimensions, Model

# parts of the messages of torch and NumPy if memory is short, or a size is too large to address
_ALLOCATION_ERRORS = ("allocate memory", "is too big", "Maximum allowed dimension", "overflow")

ConnectRanks = Callable[[Any, SchedulerConfig, ModelType, int], Ranks | None]


@dataclass(frozen=True, slots=True)
class Assembly:
    """The parts that a loop is built from.

    `device` is the name of the device that runs the steps. `weights_version` returns a number that
    changes with the weights. `checkpoint` is the digest of the checkpoint if there is a
    journal, otherwise "".
    """

    blueprint: Blueprint
    executor: TorchExecutor | RankExecutor
    device: str
    weights_version: Callable[[], int]
    ranks: Ranks | None = None
    checkpoint: str = ""


def assemble(
    source: Any,
    params: OptionalParams,
    scheduler_config: SchedulerConfig,
    model_type: ModelType,
    max_beam_width: int,
    processor_timer: CallbackTimer,
    connect_ranks: ConnectRanks = lambda *_: None,
) -> Assembly:
    """Load the model, then size and allocate the KV cache.

    `processor_timer` times logits post-processors. `connect_ranks` is a partial call of
    `ranks.connect`, which lacks the arguments from `source` on. Raise ConfigError, which quotes
    the sizes, if memory is short, and RankError if another rank has failed.
    """
    ranks = connect_ranks(source, scheduler_config, model_type, max_beam_width)
    arguments = source, params, scheduler_config, model_type, max_beam_width, processor_timer
    try:
        return _assemble(*arguments, ranks)
    except BaseException as error:
        if ranks is not None:
            ranks.fail(error)
        raise


def _assemble(
    source: Any,
    params: OptionalParams,
    scheduler_config: SchedulerConfig,
    model_type: ModelType,
    max_beam_width: int,
    processor_timer: CallbackTimer,
    ranks: Ranks | None,
) -> Assembly:
    if model_type is ModelType.V1:  # a block holds a whole sequence, which only "own" supports
        params = replace(params, attention_provider="own")
        policy = CapacitySchedulerPolicy.STATIC_BATCH
        scheduler_config = replace(scheduler_config, capacity_scheduler_policy=policy)
    backend = place(params, None if ranks is None else ranks.local_rank)
    check = functools.partial(refuse_for_states, params, max_beam_width)
    model = backend.load(source, params, ranks, check)
    params = settle_reuse(params, model.spec, model_type)
    backend.choose_attention(model, params, *(() if ranks is None else (ranks.agree,)))
    budget = backend.memory_budget(model, params, max_beam_width)
    wanted = params, scheduler_config, model.spec, model_type, max_beam_width
    sizes, adapters = _sizes(wanted, model, budget, ranks)
    blueprint = Blueprint(
        *(params, scheduler_config, sizes, model.spec.vocab_size),
        model_type=model_type,
        max_beam_width=max_beam_width,
        hidden_size=getattr(model.spec, "hidden_size", 0),
        adapters=adapters,
    )
    lines = Lines(blueprint.num_slots, max_beam_width)
    try:
        processing = PostProcessing(
            lines,
            batched=params.logits_post_processor_batched,
            budget_s=params.logits_post_processor_budget_s,
            watches_streams=params.check_logits_post_processor_streams,
            timer=processor_timer,
            stream=backend.stream,
        )
        fused = model_type is not ModelType.INFLIGHT_BATCHING
        own = None if ranks is None else ranks.place(params)
        options = StepOptions(lines, params.max_batch_size, fused, processing, adapters, own)
        executor = backend.executor(model, sizes, options)
    except (RuntimeError, MemoryError, ValueError) as error:
        is_memory_error = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not is_memory_error and not any(text in str(error) for text in _ALLOCATION_ERRORS):
            raise
        raise ConfigError(
            f"no memory for steps of max_batch_size = {params.max_batch_size} sequences of "
            f"max_seq_len = {sizes.max_seq_len} tokens, in addition to a KV cache of "
            f"{sizes.num_blocks} blocks and {sizes.num_host_blocks} on the host: "
            f"{response_text(error)}"
        ) from error
    return Assembly(
        blueprint,
        executor,
        device="cpu" if backend.stream is None else backend.stream.name,
        weights_version=_weights_version(model),
        ranks=ranks,
        checkpoint="" if params.journal_path is None else checkpoint_digest(source),
    )


def _sizes(
    wanted: tuple[OptionalParams, SchedulerConfig, Dimensions, ModelType, int],
    model: Model,
    budget: MemoryBudget,
    ranks: Ranks | None,
) -> tuple[Sizes, AdapterSizes | None]:
    """Return the sizes of the KV cache and of the adapter cache, equal on all ranks."""
    budget, num_snapshots = without_states(budget, model.spec, wanted[0])
    host = MemoryBudget(free_memory_bytes())
    if ranks is not None:
        budget, host = ranks.least_budget(budget), ranks.least_budget(host)
    config = wanted[0].peft_cache_manager_config
    adapters = adapter_sizes(config, model, budget.free_bytes, host.free_bytes)
    if adapters is not None and not budget.shared:
        budget = budget._replace(free_bytes=budget.free_bytes - adapters.device_bytes)
    sizes = replace(size(*wanted, budget), num_snapshots=num_snapshots)
    if ranks is not None:
        sizes = size(*wanted, ranks.least_blocks(budget, sizes))
        ranks.check_equal("sizes", (sizes, adapters and adapters.cache))
    return sizes, adapters


def _weights_version(model: Any) -> Callable[[], int]:
    weights: Any = getattr(model, "weights", None)
    # a model without a version gets `int`: int() is always 0
    return functools.partial(getattr, weights, "version") if hasattr(weights, "version") else int


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
