"""The command line: `gptmanager run | bench`, also as `python -m gptmanager`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import torch

from gptmanager import __version__
from gptmanager.bench import BenchOptions, Load, bench
from gptmanager.config import (
    CapacitySchedulerPolicy,
    KvCacheConfig,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.errors import GptManagerError, response_text
from gptmanager.run import RunOptions, run

_RUN_HELP = """\
Serve a file of requests and show them live.

Each line of FILE is a JSON object: "prompt" (text; the model folder then needs a tokenizer.json)
or "input_ids", "max_new_tokens", and any input of a request by its name ("temperature",
"runtime_top_k", "random_seed", "end_id", "priority", ...); "stop" takes texts. end_id comes from
the checkpoint's generation_config.json if a line names none. A line that is wrong is answered
with an error; the others run.
"""

_RUN_EXAMPLE = """\
example:
  gptmanager run --model examples/tiny_llama --requests examples/requests.jsonl --output out.jsonl
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 all well, 1 something failed, 2 the call was wrong, 130 interrupted."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO if options.verbose else logging.ERROR,
        format="%(levelname)s %(message)s",
    )
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        code: int = options.command(options)
        return code
    except GptManagerError as error:
        print(f"gptmanager: {response_text(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gptmanager: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gptmanager", description="Run GPT-style models behind four callbacks."
    )
    parser.add_argument("--version", action="version", version=f"gptmanager {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands)
    _add_bench(commands)
    return parser


def _add_run(commands: Any) -> None:
    parser = commands.add_parser(
        "run",
        help="serve a file of requests and show them live",
        description=_RUN_HELP,
        epilog=_RUN_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=_run)
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint folder")
    parser.add_argument("--requests", required=True, metavar="FILE", help="JSON lines; -: stdin")
    parser.add_argument("--output", type=Path, metavar="FILE", help="results as JSON lines")
    parser.add_argument("--stats", type=Path, metavar="FILE", help="statistics as JSON lines")
    parser.add_argument("--json", action="store_true", help="only the summary, as JSON, on stdout")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=64,
        help="for lines that name none (default %(default)s)",
    )
    parser.add_argument(
        "--pace", type=float, default=0.0, metavar="S", help="slow each iteration down, to watch"
    )
    _add_manager_options(parser)


def _add_bench(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="time a synthetic load, beside a peer",
        description="Time a synthetic load of greedy requests that never end early. Without "
        "--model: random weights of a small Llama (hidden 256, 8 layers).",
    )
    parser.set_defaults(command=_bench)
    parser.add_argument("--model", type=Path, help="a checkpoint folder")
    parser.add_argument("--num-requests", type=int, default=64, help="(default %(default)s)")
    parser.add_argument(
        "--prompt-len", type=_span, default=(16, 256), metavar="A:B", help="(default 16:256)"
    )
    parser.add_argument(
        "--output-len", type=_span, default=(16, 128), metavar="A:B", help="(default 16:128)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="the best counts (default 3)")
    parser.add_argument("--peer", choices=("transformers",), help="run the same load on it too")
    parser.add_argument("--json", action="store_true", help="the report as JSON on stdout")
    _add_manager_options(parser)


def _span(text: str) -> tuple[int, int]:
    """`16:256`, or one number for both ends."""
    low, _, high = text.partition(":")
    span = (int(low), int(high or low))
    if not 1 <= span[0] <= span[1]:
        raise argparse.ArgumentTypeError(f"{text!r} is no range of positive lengths")
    return span


def _add_manager_options(parser: argparse.ArgumentParser) -> None:
    """The options of a manager, the same for every command that starts one."""
    group = parser.add_argument_group("manager")
    group.add_argument("--max-batch-size", type=int, default=256, help="(default %(default)s)")
    group.add_argument("--max-num-tokens", type=int, default=8192, help="(default %(default)s)")
    group.add_argument("--max-seq-len", type=int, help="(default: the checkpoint's)")
    group.add_argument("--kv-cache-tokens", type=int, help="size of the KV cache in tokens")
    group.add_argument("--tokens-per-block", type=int, default=64, help="(default %(default)s)")
    group.add_argument("--chunked-context", action="store_true", help="cut long contexts in chunks")
    group.add_argument(
        "--policy",
        choices=[policy.name.lower() for policy in CapacitySchedulerPolicy],
        default=CapacitySchedulerPolicy.GUARANTEED_NO_EVICT.name.lower(),
        help="capacity scheduler policy (default %(default)s)",
    )
    group.add_argument("--dtype", choices=("float32", "bfloat16", "float16"))
    group.add_argument("--deterministic", action="store_true", help="bitwise the same in any batch")
    group.add_argument("--seed", type=int, default=0, help="(default %(default)s)")
    group.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    group.add_argument("--verbose", action="store_true", help="show the manager's log")


def optional_params(options: argparse.Namespace) -> OptionalParams:
    return OptionalParams(
        kv_cache_config=KvCacheConfig(
            max_tokens=options.kv_cache_tokens, tokens_per_block=options.tokens_per_block
        ),
        enable_chunked_context=True if options.chunked_context else None,
        max_batch_size=options.max_batch_size,
        max_num_tokens=options.max_num_tokens,
        max_seq_len=options.max_seq_len,
        dtype=options.dtype,
        deterministic=options.deterministic,
        seed=options.seed,
    )


def scheduler_config(options: argparse.Namespace) -> SchedulerConfig:
    return SchedulerConfig(CapacitySchedulerPolicy[options.policy.upper()])


def _run(options: argparse.Namespace) -> int:
    summary = run(
        RunOptions(
            model=options.model,
            requests=options.requests,
            output=options.output,
            stats=options.stats,
            max_new_tokens=options.max_new_tokens,
            pace_s=options.pace,
            quiet=options.json,
            params=optional_params(options),
            scheduler=scheduler_config(options),
        )
    )
    if options.json:
        print(orjson.dumps(summary).decode())
    else:
        print_summary(summary)
    return 1 if summary["failed"] else 0


def _bench(options: argparse.Namespace) -> int:
    report = bench(
        BenchOptions(
            model=options.model,
            load=Load(options.num_requests, options.prompt_len, options.output_len),
            repeats=options.repeats,
            peer=options.peer,
            params=optional_params(options),
            scheduler=scheduler_config(options),
        )
    )
    if options.json:
        print(orjson.dumps(report).decode())
    else:
        print_summary(report)
    return 0


def print_summary(summary: dict[str, Any]) -> None:
    """A name and a value a line."""
    for name, value in summary.items():
        if isinstance(value, dict):
            value = "  ".join(f"{key} {inner}" for key, inner in value.items()) or "-"
        print(f"{name.replace('_', ' '):28} {value}")
