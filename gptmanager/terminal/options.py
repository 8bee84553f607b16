"""Options that several commands share, and the parameters of a manager that they set."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from gptmanager.config import (
    ATTENTION_PROVIDERS,
    CapacitySchedulerPolicy,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    ParallelConfig,
    SchedulerConfig,
)
from gptmanager.terminal.arguments import checkpoint, positive, threads
from gptmanager.terminal.redrawn_lines import RedrawnLines

POLICIES = tuple(policy.name.lower() for policy in CapacitySchedulerPolicy)
_MAX_NUM_TOKENS = OptionalParams().max_num_tokens
_BATCHING = {kind.name.lower().removesuffix("_batching"): kind for kind in ModelType}


def add_parser(commands: Any, name: str, call: str, **texts: Any) -> argparse.ArgumentParser:
    """Add a command to `commands`, the result of `add_subparsers`, and return its parser.

    `call` is MODULE:NAME of the function that runs the command and returns its exit status; it is
    only imported when the command runs. `texts` are the keyword arguments help, usage, description
    and epilog of argparse, and `variables` of `Parser`.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name, formatter_class=argparse.RawDescriptionHelpFormatter, **texts
    )
    region = RedrawnLines(None)  # draws nothing; the caller of a command may set another
    parser.set_defaults(command=call, parser=parser, region=region)
    return parser


def add_model(parser: Any, *, required: bool = False) -> None:
    """Add --model, which is converted to the path of a checkpoint."""
    parser.add_argument(
        "--model",
        type=checkpoint,
        required=required,
        metavar="PATH",
        help="a checkpoint folder, a GGUF file, or a name of `gptmanager models`",
    )


def add_json(parser: argparse.ArgumentParser, help: str = "print the report as JSON") -> None:
    """Add --json, a switch."""
    parser.add_argument("--json", action="store_true", help=help)


def add_verbose(parser: Any, log_of: str) -> None:
    """Add --verbose, a switch that shows the log of `log_of`, such as "manager"."""
    parser.add_argument("--verbose", action="store_true", help=f"show the {log_of}'s log")


def add_device(parser: Any, **more: Any) -> None:
    """Add --device. `more` has further keyword arguments of `add_argument`."""
    default = more.get("default", "cpu")
    text = f"cpu, cuda, cuda:1, or emulator (default {default})"
    parser.add_argument("--device", metavar="NAME", help=text, **more)


def add_dtype(parser: Any, default: str, *more: str) -> None:
    """Add --dtype. `default` describes the default; `more` are further allowed dtypes."""
    dtypes = ("float32", "bfloat16", "float16", *more)
    parser.add_argument("--dtype", choices=dtypes, help=f"(default: {default})")


def add_scheduler(parser: argparse.ArgumentParser, help: str) -> None:
    """Add --scheduler, which names an object as MODULE:NAME."""
    parser.add_argument("--scheduler", metavar="MODULE:NAME", help=help)


def add_manager_options(
    parser: argparse.ArgumentParser, max_num_tokens: int | str = _MAX_NUM_TOKENS
) -> None:
    """Add the options of a manager, for every command that starts one.

    `max_num_tokens` describes the default of --max-num-tokens.
    """
    group = parser.add_argument_group("manager")
    add = group.add_argument
    number: dict[str, Any] = {"type": positive, "metavar": "N"}
    add("--max-batch-size", default=256, help="requests (default %(default)s)", **number)
    add("--max-num-tokens", help=f"per iteration (default {max_num_tokens})", **number)
    add("--max-seq-len", help="tokens per request (default: the checkpoint's)", **number)
    add("--kv-cache-tokens", help="size of the KV cache (default: set by free memory)", **number)
    add("--kv-cache-dtype", choices=("fp8",), help="(default: the model's)")
    add("--tokens-per-block", default=64, help="per KV cache block (default %(default)s)", **number)
    add("--chunked-context", action="store_true", help="compute long contexts in chunks")
    default = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT.name.lower()
    add("--policy", choices=POLICIES, default=default, help="(default %(default)s)")
    schemes = list(_BATCHING)
    add("--batching", choices=schemes, default="inflight_fused", help="(default %(default)s)")
    add("--overlap", action="store_true", help="two micro batches of different requests in flight")
    add_device(group)
    add_dtype(group, "the checkpoint's", "float64")
    bits = ("int8", "int4")
    text = (
        "8 or 4 bits per weight, fp8 on a GPU; none: --dtype for all weights (default: as in the "
    )
    text += "checkpoint, unless --dtype is given)"
    add("--weights-dtype", choices=(*bits, "fp8", "none"), help=text)
    text = "the type of the output matrix if the weights are int4 (default: int8)"
    add("--head-dtype", choices=bits, help=text)
    text = "what computes the network (default auto: native if its architecture is known)"
    add("--model-backend", choices=("auto", "native", "transformers"), default="auto", help=text)
    text = "what computes attention; auto: the fastest, timed at the start (default own)"
    add("--attention-provider", choices=ATTENTION_PROVIDERS, default="own", help=text)
    add("--deterministic", action="store_true", help="bitwise equal results in any batch")
    add("--tensor-parallel-size", help="ranks that share each layer, under torchrun", **number)
    add("--pipeline-parallel-size", help="stages that share the layers, under torchrun", **number)
    add("--seed", type=int, default=0, metavar="N", help="seed of requests without one (default 0)")
    add("--threads", type=threads, metavar="N", help="CPU threads (default: set by cores)")
    add_verbose(group, "manager")


class ManagerOptions(NamedTuple):
    """A manager's parameters, from the options of `add_manager_options`."""

    model_type: ModelType
    scheduler: SchedulerConfig
    params: OptionalParams


def manager_options(options: argparse.Namespace) -> ManagerOptions:
    """Return the parameters that the parsed options of `add_manager_options` set."""
    parts, stages = options.tensor_parallel_size, options.pipeline_parallel_size
    params = OptionalParams(
        parallel_config=ParallelConfig(parts or 1, stages or 1) if parts or stages else None,
        kv_cache_config=KvCacheConfig(
            max_tokens=options.kv_cache_tokens,
            tokens_per_block=options.tokens_per_block,
            dtype=options.kv_cache_dtype,
        ),
        enable_chunked_context=True if options.chunked_context else None,
        max_batch_size=options.max_batch_size,
        max_num_tokens=options.max_num_tokens or _MAX_NUM_TOKENS,
        max_seq_len=options.max_seq_len,
        enable_trt_overlap=options.overlap,
        device=options.device,
        dtype=options.dtype,
        weights_dtype=options.weights_dtype,
        head_dtype=options.head_dtype,
        model_backend=options.model_backend,
        attention_provider=options.attention_provider,
        deterministic=options.deterministic,
        seed=options.seed,
    )
    scheduler = SchedulerConfig(CapacitySchedulerPolicy[options.policy.upper()])
    return ManagerOptions(_BATCHING[options.batching], scheduler, params)
