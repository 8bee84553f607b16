"""The configuration of a manager: enums, and plain mutable dataclasses.

TensorRT-LLM's optional parameters, which have camelCase names, are snake_case fields here, with the
defaults that TensorRT-LLM documents. Setting an unknown name raises AttributeError. The module
`assembly.options` checks the values.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal, NamedTuple

ATTENTION_PROVIDERS = ("own", "flashinfer", "flash_attn", "auto")
DEVICE = re.compile(r"cpu|cuda(:\d+)?|emulator")  # names of devices
ProgressCallback = Callable[[str, int, int], None]  # kind of work, amount done, total amount


class ModelType(IntEnum):
    """The batching scheme.

    V1: a batch runs in lock-step until its last request has ended. INFLIGHT_BATCHING: requests join
    and leave between iterations; context rows and generation rows run in two passes of the network.
    INFLIGHT_FUSED_BATCHING: like INFLIGHT_BATCHING, but all rows run in one pass.
    """

    V1 = 0
    INFLIGHT_BATCHING = 1
    INFLIGHT_FUSED_BATCHING = 2


class CapacitySchedulerPolicy(IntEnum):
    """The policy by which active requests get memory in an iteration.

    MAX_UTILIZATION: as many requests run as fit in memory; running requests may be paused.
    GUARANTEED_NO_EVICT: a request starts if the memory for its longest output is free, and is never
    paused. STATIC_BATCH: like GUARANTEED_NO_EVICT, but requests start only when no request runs.
    """

    MAX_UTILIZATION = 0
    GUARANTEED_NO_EVICT = 1
    STATIC_BATCH = 2


class ContextChunkingPolicy(IntEnum):
    """The policy by which contexts are cut into chunks.

    FIRST_COME_FIRST_SERVED: if not all contexts fit in an iteration, each context, in order, gets
    as many tokens as possible. EQUAL_PROGRESS: if not all contexts fit, they get chunks of about
    equal size. FORCE_CHUNK: each context gets one chunk unit, even if all contexts would fit.
    """

    FIRST_COME_FIRST_SERVED = 0
    EQUAL_PROGRESS = 1
    FORCE_CHUNK = 2


class FinishReason(IntEnum):
    """The reason why a sequence ended, as sent in `finish_reasons`."""

    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5


@dataclass(slots=True)
class SchedulerConfig:
    """The scheduler of a manager.

    `create_scheduler`, if given, is called with the keyword arguments `max_num_requests,
    kv_cache_manager, max_batch_size, max_num_tokens, micro_batch_scheduler` and returns a
    `gptmanager.scheduler.RequestScheduler`.
    """

    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    context_chunking_policy: ContextChunkingPolicy | None = None
    create_scheduler: Callable[..., Any] | None = None


@dataclass(slots=True)
class KvCacheConfig:
    """The size and the features of the paged KV cache. Lengths are in tokens, sizes in bytes.

    `host_swap`: whether evicted blocks move to `host_cache_size` bytes of CPU memory. "always"
    moves them. "auto" moves them if copying a block twice, at `host_bytes_per_s`, takes less time
    than computing its tokens again, at `recompute_tokens_per_s`.

    `enable_block_reuse`: None means True, unless the batching is V1, or the model keeps a recurrent
    state for each sequence and `state_snapshots` is 0. `state_snapshots`: the number of copies of
    such states that cached blocks may have; None means two for each running sequence, at least 32,
    but at most a quarter of the free memory. `dtype`: the dtype of keys and values; None means the
    model's dtype. "fp8" stores 8-bit floats (e4m3) and uses the checkpoint's scales. "fp8" is
    rejected on the CPU.
    """

    max_tokens: int | None = None
    max_attention_window: int | None = None
    sink_token_length: int | None = None
    free_gpu_memory_fraction: float | None = None
    enable_block_reuse: bool | None = False
    use_uvm: bool = False
    host_cache_size: int | None = None
    onboard_blocks: bool = True
    cross_kv_cache_fraction: float | None = None
    secondary_offload_min_priority: int | None = None
    event_buffer_max_size: int = 0
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    tokens_per_block: int = 64
    host_swap: Literal["auto", "always"] = "auto"
    host_bytes_per_s: float = 10e9
    recompute_tokens_per_s: float = 20e3
    dtype: Literal["fp8"] | None = None
    state_snapshots: int | None = None


@dataclass(slots=True)
class PeftCacheManagerConfig:
    """The size of the LoRA cache.

    `host_cache_size` is in bytes, and `device_cache_percent` is a fraction, 0 to 1, of the device's
    free memory. `optimal_adapter_size` and `max_adapter_size` are LoRA ranks.
    """

    num_host_module_layer: int = 0
    num_device_module_layer: int = 0
    optimal_adapter_size: int = 8
    max_adapter_size: int = 64
    num_put_workers: int = 1
    num_ensure_workers: int = 1
    num_copy_streams: int = 1
    max_pages_per_block_host: int = 24
    max_pages_per_block_device: int = 24
    device_cache_percent: float = 0.05
    host_cache_size: int = 1 << 30


@dataclass(slots=True)
class ParallelConfig:
    """One model over several processes (ranks), each with its own manager.

    `tensor_parallel_size` ranks share each layer, and `pipeline_parallel_size` groups of ranks
    share the layers; there are as many ranks as both sizes multiplied. `timeout_s`: a rank that
    does not answer within this time counts as failed. `respond_on_all_ranks`: whether SendResponse
    and ReturnBatchManagerStats are called on each rank, not only on rank 0.
    `replicate_logits_post_processors`: whether each rank that has logits calls the post-processors
    of its own host.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    timeout_s: float = 30.0
    respond_on_all_ranks: bool = False
    replicate_logits_post_processors: bool = False


@dataclass(frozen=True, slots=True)
class PromptLookup:
    """Draft tokens by prompt lookup (Saxena 2023), for outputs that repeat earlier text.

    The last `max_ngram` tokens of the text are searched for in the text before them. If there is no
    match, fewer tokens are searched for, down to `min_ngram`. The draft is the tokens after the
    latest match, at most `max_draft_tokens`.
    """

    max_draft_tokens: int = 10
    max_ngram: int = 3
    min_ngram: int = 2


class Delivered(NamedTuple):
    """The part of a request's output that its host has received; see `OptionalParams.restore_cb`.

    `num_tokens`: the number of received tokens of a streaming request, without the prompt. `final`:
    whether the host has received the final response.
    """

    num_tokens: int
    final: bool = False


@dataclass(slots=True)
class OptionalParams:
    """The optional parameters of a manager, which docs/manager.md describes one by one.

    Lengths are in tokens, times in seconds, sizes in bytes. Get is the callback
    GetInferenceRequests.

    Sizes. `max_seq_len`: None means the checkpoint's `max_position_embeddings`.
    `max_active_requests`: "auto" means `max_batch_size` times the number of micro batches. None
    means no limit, so Get is called with -1. `max_waiting_requests`: the number of requests that
    may wait in addition to the batch; further requests are refused with a CapacityError. None means
    no limit.

    The step. `device`: None means the CPU. `run_ahead`: None means 0 on the CPU, 0 with
    `enable_trt_overlap`, 0 with pipeline stages, and otherwise 1. `cuda_graphs`: whether steps on a
    device are captured at the start and later replayed. Steps with contexts are captured only for
    small models. `weights_dtype`: "int8" quantizes the network's matrices to 8 bits, "fp8" to 8-bit
    floats (only on a GPU), "int4" to 4 bits. With "int4", the output matrix has `head_dtype` (None
    means 8 bits). On a device, "int4" is rejected for models with experts. "none" keeps matrices in
    `dtype`. None means "none", except that on the CPU a quantized checkpoint stays quantized if
    `dtype` is None: 4-bit matrices in 4 bits, all others in 8. `model_backend`: "native" computes
    the network in this package, "transformers" in the transformers library. "auto" means "native"
    if the architecture is in the table of families, otherwise "transformers".
    `speculative_decoding_config`: draft tokens for requests with one beam; None means no drafts.

    Providers. `attention_provider`: "own", or the attention of another library on a GPU,
    "flashinfer" or "flash_attn". "auto" times "own" and all installed libraries at the start, and
    takes the fastest. If steps with contexts are captured, "auto" means "own" without a trial. On
    any device the host may pass a `gptmanager.kernels.AttentionProvider` instead.
    `linear_provider`: a `gptmanager.kernels.LinearProvider` of the host, for matmuls. With
    `deterministic`, "auto" means "own", and all other providers are refused.

    The host. `idle_poll_s`: the time between two calls of Get while the manager is idle. If it is
    None, an idle manager calls Get only after `notify()`. `callback_budget_s`: a callback that
    takes longer is logged; None means no limit. `max_get_failures`: the number of times that Get
    may fail in a row, with growing pauses; one more failure ends the manager.

    Failures. `max_step_failures`: the number of failed iterations in a row that ends the manager;
    before that, a failure ends only the requests that have started. With a `parallel_config` the
    first failure ends the manager. An error of the scheduler or of the journal always ends it.
    `step_budget_s`: an iteration that takes longer counts as a hang, and the stacks of all threads
    are logged; None means no limit. `on_hang`: with "fail" a hang also ends the manager, and the
    watchdog's thread sends a final error for each request.

    Logits post-processors. `logits_post_processor_batched`: an object with a method
    `process_batch`, or a callable with its signature. It serves all requests without a
    post-processor of their own. `logits_post_processor_budget_s`: a call that takes longer is
    logged; None means no limit. `check_logits_post_processor_streams`: for debugging. A
    post-processor that uses another CUDA stream than the model's ends its request, and each call
    waits for the device.

    Recordings. `recording_path`: the file to which the whole run is recorded, for `gptmanager
    replay`. Without it the last `black_box_iterations` iterations are kept in memory, in about
    `black_box_bytes`, and written to `black_box_path` when the loop fails. If `black_box_path` is
    None, they are written to a new file in the temporary folder, and the log names the file. With
    `black_box_iterations` 0 no iterations are kept.

    The journal. `journal_path`: a folder; the requests that are unfinished when the process dies
    continue in the next manager on this folder (docs/reliability.md). `journal_sync`: when records
    are forced to the disk. "always" means before each response is sent. A number means in the
    background, at intervals of this number of milliseconds. "never" leaves the time to the system.
    `journal_on_full`: while the disk is full, "refuse" new requests, or "continue" without a
    journal. `journal_max_resumes`: how many managers in a row may resume a request without sending
    a token of it.
    `restore_cb(request_id)`: returns a `Delivered`, the part of the request's output that the host
    has received, or None. `restore_processor_cb(request_id, client_id)`: returns the logits
    post-processor of a request that continues.
    """

    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    enable_trt_overlap: bool = False
    run_ahead: int | None = None
    enable_chunked_context: bool | None = None
    peft_cache_manager_config: PeftCacheManagerConfig = field(
        default_factory=PeftCacheManagerConfig
    )
    parallel_config: ParallelConfig | None = None
    max_batch_size: int = 256
    max_num_tokens: int = 8192
    max_seq_len: int | None = None
    max_active_requests: int | Literal["auto"] | None = "auto"
    idle_poll_s: float | None = 0.01
    exclude_input_in_output: bool = False
    gather_context_logits: bool = False
    gather_generation_logits: bool = False
    normalize_log_probs: bool = True
    device: str | None = None
    dtype: str | None = None
    weights_dtype: Literal["int8", "int4", "fp8", "none"] | None = None
    head_dtype: Literal["int8", "int4"] | None = None
    model_backend: Literal["auto", "native", "transformers"] = "auto"
    attention_provider: Any = "own"
    linear_provider: Any = None
    deterministic: bool = False
    cuda_graphs: bool = True
    seed: int = 0
    callback_budget_s: float | None = 1.0
    step_budget_s: float | None = None
    on_hang: Literal["log", "fail"] = "log"
    max_waiting_requests: int | None = None
    max_get_failures: int = 10
    max_step_failures: int = 3
    logits_post_processor_budget_s: float | None = 0.1
    check_logits_post_processor_streams: bool = False
    recording_path: str | os.PathLike[str] | None = None
    black_box_iterations: int = 64
    black_box_bytes: int = 64 << 20
    black_box_path: str | os.PathLike[str] | None = None
    journal_path: str | os.PathLike[str] | None = None
    journal_sync: float | Literal["always", "never"] = 20
    journal_on_full: Literal["refuse", "continue"] = "refuse"
    journal_max_resumes: int = 5
    restore_cb: Callable[[int], Delivered | None] | None = None
    restore_processor_cb: Callable[[int, int | None], Any] | None = None
    on_progress: ProgressCallback | None = None
    device_ids: list[int] | None = None
    decoding_mode: str | None = None
    decoding_config: Any = None
    speculative_decoding_config: PromptLookup | None = None
    guided_decoding_config: Any = None
    logits_post_processor_batched: Any = None
    gpu_weights_percent: float = 1.0
    max_beam_width: int | None = None
    scheduler_config: SchedulerConfig | None = None
    extended_runtime_perf_knob_config: Any = None
    debug_config: Any = None
    max_seq_idle_microseconds: int | None = None
    max_num_sequences: int | None = None
