"""The command line: `gptmanager COMMAND`, also as `python -m gptmanager`.

Decides what options mean and how a report is printed; the commands stand in modules of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import torch

from gptmanager import __version__, picture, replay, simulator
from gptmanager.bench import BenchOptions, Load, add_commands, bench
from gptmanager.config import (
    CapacitySchedulerPolicy,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.errors import ConfigError, GptManagerError, RecordingError
from gptmanager.run.live_view import LiveView, report_lines
from gptmanager.run.run import RunOptions, run
from gptmanager.terminal.arguments import check_distinct, folder, positive, span, threads
from gptmanager.terminal.printable import printable_lines

_BATCHING = {kind.name.lower().removesuffix("_batching"): kind for kind in ModelType}

_HELP = """\
Run GPT-style models behind four callbacks: in-flight batching over a paged KV cache.
"""
_EXAMPLES = """\
examples:
  gptmanager run --model examples/tiny_llama --requests examples/requests.jsonl
  gptmanager bench --num-requests 16 --peer transformers

`gptmanager COMMAND --help` tells what a command takes.
"""
_RUN_HELP = """\
Serve a file of requests and show them live.

A line of FILE is a JSON object:
  "prompt"          a text (the folder then needs a tokenizer.json), or
  "input_ids"       a list of token ids
  "max_new_tokens"  how long the answer may get (else --max-new-tokens)
  "stop"            a text or a list of texts that end it, as the tokens they encode to
  "request_id"      a number (else the number of the line)
and any input of a request by its name: "temperature", "top_k", "top_p", "random_seed", "end_id",
"priority", ... Without an end_id the checkpoint's generation_config.json says what ends a text.
A line that is wrong is answered with an error; the others run. So is a text that fits into no
request; a long one is encoded while others run.
"""
_RUN_EXAMPLES = """\
examples:
  gptmanager run --model examples/tiny_llama --requests examples/requests.jsonl --output out.jsonl
  gptmanager run --model examples/tiny_llama --requests examples/requests.jsonl \\
    --max-batch-size 4 --pace 0.05            # slowly, to see requests join and leave
  echo '{"prompt": "17 + 25 ="}' | gptmanager run --model examples/tiny_llama --requests - --json

exit status: 0 all answered, 1 some failed, 2 the call was wrong, 130 interrupted
"""
_BENCH_HELP = """\
Time a synthetic load: greedy requests of random tokens, submitted at once, that never end early.
Without --model: random weights of a small Llama (hidden 256, 8 layers, vocabulary 4096).
`gptmanager bench kernels` and `gptmanager bench e2e` are for one GPU, with options of their own.
"""
_BENCH_EXAMPLES = """\
examples:
  gptmanager bench --peer transformers        # both on the same weights and requests, in turn
  gptmanager bench --model DIR --num-requests 16 --prompt-len 100:200 --output-len 64

exit status: 0 all well, 1 something failed, 2 the call was wrong, 130 interrupted
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 all well, 1 something failed, 2 the call was wrong, 130 interrupted."""
    _open_what_is_closed()
    try:
        code = _call(arguments)
    except SystemExit as exit_:  # argparse has told what a call must be
        exit_.code = _flushed(exit_.code if isinstance(exit_.code, int) else 2)
        raise
    return _flushed(code)


def _call(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:  # argparse would show the usage of all commands
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2
    options.view = LiveView(sys.stderr, quiet=options.json)
    _start_log(options.view, options.verbose)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    try:
        code: int = options.command(options)
        return code
    except BrokenPipeError:  # whoever read has gone; nobody can be told
        return 1
    except (GptManagerError, OSError, MemoryError) as error:
        _tell(str(error) or "no memory for that")
        return 2 if isinstance(error, (ConfigError, RecordingError)) else 1
    except KeyboardInterrupt:
        _tell("interrupted")
        return 130


def _tell(text: str) -> None:
    with contextlib.suppress(OSError):  # the exit status tells, too
        print(printable_lines(f"gptmanager: {text}"), file=sys.stderr)


def _flushed(code: int) -> int:
    """`code`, or 1 where what was printed has not arrived."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            with contextlib.suppress(OSError, ValueError):  # or Python fails once more at its end
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            if stream is sys.stdout and not isinstance(error, BrokenPipeError):
                _tell(f"the standard output cannot be written: {error.strerror}")
            code = code or 1
    return code


def _open_what_is_closed() -> None:
    """`gptmanager ... >&-` leaves Python without a stream to write to."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))


def _start_log(view: LiveView, is_verbose: bool) -> None:
    handler = logging.StreamHandler(view)
    if not is_verbose:  # a refused request is shown with its error anyway
        handler.addFilter(lambda record: not record.msg.startswith("Cannot process new request"))
    handler.setFormatter(_PrintableFormatter("%(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO if is_verbose else logging.WARNING, handlers=[handler])


class _PrintableFormatter(logging.Formatter):
    """Requests and recordings say what they like, and a log says it too."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gptmanager",
        description=_HELP,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gptmanager {__version__}")
    parser.set_defaults(command=None, parser=parser, json=False, threads=None, verbose=False)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    _add_run(commands)
    _add_bench(commands)
    for part in (replay, simulator, picture):
        part.add_command(commands)
    for command in commands.choices.values():
        command.set_defaults(parser=command)
    return parser


def _add_run(commands: Any) -> None:
    parser = commands.add_parser(
        "run",
        help="serve a file of requests and show them live",
        usage="gptmanager run --model DIR --requests FILE [options]",
        description=_RUN_HELP,
        epilog=_RUN_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=_run)
    add = parser.add_argument
    add("--model", type=folder, required=True, metavar="DIR", help="a checkpoint folder")
    add("--requests", required=True, metavar="FILE", help="JSON lines; -: the standard input")
    add("--output", type=Path, metavar="FILE", help="results as JSON lines, in the same order")
    add("--stats", type=Path, metavar="FILE", help="a statistics record an iteration, JSON lines")
    add("--record", type=Path, metavar="FILE", help="a recording, for `gptmanager picture`")
    add("--json", action="store_true", help="print the summary as JSON, and failures only")
    add(
        "--max-new-tokens",
        type=positive,
        default=64,
        metavar="N",
        help="for lines that name none (default %(default)s)",
    )
    add("--pace", type=_seconds, default=0.0, metavar="S", help="at least S seconds an iteration")
    _add_manager_options(parser)


def _add_bench(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="time a synthetic load, beside a peer",
        usage="gptmanager bench [kernels | e2e] [options]",
        description=_BENCH_HELP,
        epilog=_BENCH_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=_bench)
    add = parser.add_argument
    add("--model", type=folder, metavar="DIR", help="a checkpoint folder")
    add("--num-requests", type=positive, default=64, metavar="N", help="(default %(default)s)")
    lengths: dict[str, Any] = {"type": span, "metavar": "A:B"}
    add("--prompt-len", default=(16, 256), help="tokens, from A to B (default 16:256)", **lengths)
    add("--output-len", default=(16, 128), help="tokens, from A to B (default 16:128)", **lengths)
    add("--repeats", type=positive, default=3, metavar="N", help="the best counts (default 3)")
    add("--peer", choices=("transformers",), help="run the same load on it too, in alternation")
    add("--json", action="store_true", help="print the report as JSON")
    _add_manager_options(parser)
    titles = {"title": "on one GPU", "metavar": "[kernels | e2e]"}
    kinds = parser.add_subparsers(prog="gptmanager bench", **titles)
    add_commands(kinds)
    for kind in kinds.choices.values():
        kind.set_defaults(parser=kind)


def _add_manager_options(parser: argparse.ArgumentParser) -> None:
    """The options of a manager, the same for every command that starts one."""
    add = parser.add_argument_group("manager").add_argument
    number: dict[str, Any] = {"type": positive, "metavar": "N"}
    add("--max-batch-size", default=256, help="requests (default %(default)s)", **number)
    add("--max-num-tokens", default=8192, help="an iteration (default %(default)s)", **number)
    add("--max-seq-len", help="tokens of a request (default: the checkpoint's)", **number)
    add("--kv-cache-tokens", help="size of the KV cache (default: by free memory)", **number)
    add("--kv-cache-dtype", choices=("fp8",), help="(default: the model's)")
    add("--tokens-per-block", default=64, help="of the KV cache (default %(default)s)", **number)
    add("--chunked-context", action="store_true", help="cut long contexts in chunks")
    policies = [policy.name.lower() for policy in CapacitySchedulerPolicy]
    default_policy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT.name.lower()
    add("--policy", choices=policies, default=default_policy, help="(default %(default)s)")
    schemes = list(_BATCHING)
    add("--batching", choices=schemes, default="inflight_fused", help="(default %(default)s)")
    add("--overlap", action="store_true", help="two micro batches of different requests in flight")
    dtypes = ("float32", "bfloat16", "float16")
    add("--device", metavar="NAME", help="cpu, cuda, cuda:1, or emulator (default cpu)")
    add("--dtype", choices=dtypes, help="(default: the checkpoint's)")
    add("--deterministic", action="store_true", help="bitwise the same in any batch")
    add("--seed", type=int, default=0, metavar="N", help="of requests without one (default 0)")
    add("--threads", type=threads, metavar="N", help="CPU threads (default: torch's choice)")
    add("--verbose", action="store_true", help="show the manager's log")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time in seconds")
    return seconds


def optional_params(options: argparse.Namespace) -> OptionalParams:
    return OptionalParams(
        kv_cache_config=KvCacheConfig(
            max_tokens=options.kv_cache_tokens,
            tokens_per_block=options.tokens_per_block,
            dtype=options.kv_cache_dtype,
        ),
        enable_chunked_context=True if options.chunked_context else None,
        max_batch_size=options.max_batch_size,
        max_num_tokens=options.max_num_tokens,
        max_seq_len=options.max_seq_len,
        enable_trt_overlap=options.overlap,
        device=options.device,
        dtype=options.dtype,
        deterministic=options.deterministic,
        seed=options.seed,
    )


def scheduler_config(options: argparse.Namespace) -> SchedulerConfig:
    return SchedulerConfig(CapacitySchedulerPolicy[options.policy.upper()])


def _run(options: argparse.Namespace) -> int:
    requests = None if options.requests == "-" else Path(options.requests)
    names = ("output", "stats", "record")
    written = {f"--{name}": getattr(options, name) for name in names}
    check_distinct({"--requests": requests, **written})
    params = optional_params(options)
    params.recording_path = options.record
    params.callback_budget_s = 1.0 + options.pace  # the pace is kept by a callback
    served = run(
        RunOptions(
            model=options.model,
            requests=options.requests,
            output=options.output,
            stats=options.stats,
            max_new_tokens=options.max_new_tokens,
            pace_s=options.pace,
            params=params,
            scheduler=scheduler_config(options),
            model_type=_BATCHING[options.batching],
        ),
        options.view,
    )
    _print(served.summary, as_json=options.json)
    for loss in served.losses:
        _tell(loss)
    return 1 if served.summary["failed"] or served.losses else 0


def _bench(options: argparse.Namespace) -> int:
    report = bench(
        BenchOptions(
            model=options.model,
            load=Load(options.num_requests, options.prompt_len, options.output_len),
            repeats=options.repeats,
            peer=options.peer,
            params=optional_params(options),
            scheduler=scheduler_config(options),
            model_type=_BATCHING[options.batching],
        )
    )
    _print(report, as_json=options.json)
    return 0


def _print(report: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(orjson.dumps(report).decode())
    else:
        gap = "\n" if sys.stdout.isatty() else ""  # below the live view
        print(gap + "\n".join(report_lines(report)))
