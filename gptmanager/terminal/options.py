"""Options that several commands share, and the parameters of a manager that they set."""

from __future__ import annotations

import argparse
from collections.abc import Callable
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
from gptmanager.terminal.arguments import checkpoint, integer, positive, threads
from gptmanager.terminal.redrawn_lines import RedrawnLines

POLICIES = tuple(policy.name.lower() for policy in CapacitySchedulerPolicy)
_STATUSES = """\
exit status:
  0  {}
  1  {}
  2  the call is wrong, or needs a file or a device that cannot be used
  {}
"""
_ENDED = "128 + n  ended by signal n: 130 by Ctrl-C, 143 by SIGTERM, 129 by SIGHUP"
_MAX_NUM_TOKENS = OptionalParams().max_num_tokens
_BATCHING = {kind.name.lower().removesuffix("_batching"): kind for kind in ModelType}


def add_parser(
    commands: Any,
    name: str,
    call: str,
    *,
    statuses: tuple[str, str],
    ended: str = _ENDED,
    epilog: str = "",
    **texts: Any,
) -> argparse.ArgumentParser:
    """Add a command to `commands`, the result of `add_subparsers`, and return its parser.

    `call` is MODULE:NAME of the function that runs the command and returns its exit status; the
    module is only imported when the command runs. For the help, `statuses` says what the statuses 0
    and 1 mean, and `ended` the status after a signal. `texts` are the keyword arguments help, usage
    and description of argparse, and `variables` of `Parser`.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"{epilog}\n{_STATUSES.format(*statuses, ended)}".lstrip(),
        **texts,
    )
    region = RedrawnLines(None)  # draws nothing; the caller of a command may set another region
    parser.set_defaults(command=call, parser=parser, region=region)
    return parser


def add_model(
    parser: Any, *, required: bool = False, read: Callable[[str], Any] = checkpoint
) -> None:
    """Add --model. By default, `read` converts its value to the path of a checkpoint."""
    parser.add_argument(
        "--model",
        type=read,
        required=required,
        metavar="PATH",
        help="a checkpoint folder, a GGUF file, or a name that `gptmanager models` lists",
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
    parser.add_argument("--dtype", choices=dtypes, help=f"dtype of the model (default: {default})")


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
    add("--max-batch-size", default=256, help="requests in a batch (default %(default)s)", **number)
    add("--max-num-tokens", help=f"tokens in an iteration (default {max_num_tokens})", **number)
    text = "tokens of a request, prompt and output (default: the checkpoint's limit)"
    add("--max-seq-len", help=text, **number)
    text = "tokens in the KV cache (default: as many as fit into the free memory)"
    add("--kv-cache-tokens", help=text, **number)
    text = "dtype of the KV cache (default: the model's)"
    add("--kv-cache-dtype", choices=("fp8",), help=text)
    text = "tokens in a block of the KV cache (default %(default)s)"
    add("--tokens-per-block", default=64, help=text, **number)
    add("--chunked-context", action="store_true", help="compute long contexts in chunks")
    default = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT.name.lower()
    text = "policy of the capacity scheduler (default %(default)s)"
    add("--policy", choices=POLICIES, default=default, help=text)
    text = "batching scheme (default %(default)s)"
    add("--batching", choices=list(_BATCHING), default="inflight_fused", help=text)
    text = "keep two micro batches of different requests in flight"
    add("--overlap", action="store_true", help=text)
    add_device(group)
    add_dtype(group, "the checkpoint's", "float64")
    bits = ("int8", "int4")
    text = (
        "dtype of the matrices: int8, int4, or fp8 on a GPU; none: as --dtype (default: none "
        "if --dtype is given, else as in the checkpoint)"
    )
    add("--weights-dtype", choices=(*bits, "fp8", "none"), help=text)
    text = "dtype of the output matrix with --weights-dtype int4 (default: int8)"
    add("--head-dtype", choices=bits, help=text)
    text = "what computes the network; auto: native if its architecture is known (default auto)"
    add("--model-backend", choices=("auto", "native", "transformers"), default="auto", help=text)
    text = "what computes attention; auto: the fastest, timed at the start (default own)"
    add("--attention-provider", choices=ATTENTION_PROVIDERS, default="own", help=text)
    add("--deterministic", action="store_true", help="make results bitwise equal in any batch")
    text = "ranks that share each layer; torchrun starts them (default 1)"
    add("--tensor-parallel-size", help=text, **number)
    text = "stages that share the layers; torchrun starts their ranks (default 1)"
    add("--pipeline-parallel-size", help=text, **number)
    text = "seed for requests without a seed of their own (default 0)"
    add("--seed", type=integer, default=0, metavar="N", help=text)
    text = "CPU threads (default: by the number of cores)"
    add("--threads", type=threads, metavar="N", help=text)
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
