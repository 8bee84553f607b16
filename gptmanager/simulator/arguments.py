"""The arguments of `gptmanager simulate`."""

from __future__ import annotations

import argparse
from typing import Any

from gptmanager.config import CapacitySchedulerPolicy
from gptmanager.terminal.arguments import natural, path_argument, positive, rate, span, writable
from gptmanager.terminal.options import POLICIES, add_json, add_parser, add_scheduler, add_verbose

_HELP = """\
Run a load through the real scheduler and block accounting under a virtual clock, once for each
policy, and print the figures side by side. No model is needed.

The load comes from a recording, or it is synthetic: lengths are drawn from ranges, and requests
arrive all at once or at a rate. A step takes as long as the cost model says, in seconds:

  fixed + context_token * context tokens + context_pair * attended pairs of the contexts
        + generation_row * sequences in generation + kv_token * cached tokens that they read

Give the cost model with --cost, or fit it to a recording with --fit. Without either it is fitted to
the recording that the load comes from; a synthetic load has default numbers, which describe no
particular machine.
"""

_EXAMPLES = """\
examples:
  gptmanager simulate --num-requests 100000 --rate 50 --prompt-len 64:512 --output-len 16:256
  gptmanager simulate --recording run.jsonl --kv-cache-tokens 65536 --record simulated.jsonl
"""

_ARRIVALS = ("time", "iterations", "at_once")


def add_command(commands: Any) -> None:
    parser = add_parser(
        commands,
        "simulate",
        "gptmanager.simulator.main:main",
        help="run a load under other policies, without a model",
        usage="gptmanager simulate [options]",
        description=_HELP,
        statuses=("simulated", "a simulation failed"),
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    default = "guaranteed_no_evict,max_utilization"
    text = f"any of {', '.join(POLICIES)} (default {default})"
    add("--policies", type=_policies, metavar="A,B", default=_policies(default), help=text)
    add_scheduler(
        parser,
        "add a column for your create_scheduler, such as my_sched:make of my_sched.py in this "
        "folder",
    )
    add("--record", type=writable, metavar="FILE", help="write each simulated run as a recording")
    add_json(parser, "print the figures as JSON")
    add_verbose(parser, "loop")
    _add_load(parser)
    _add_machine(parser)


def _add_load(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("synthetic load").add_argument
    add("--num-requests", type=positive, metavar="N", help="requests (default 1000)")
    add("--prompt-len", type=span, metavar="A:B", help="tokens, from A to B (default 64:1024)")
    add("--output-len", type=span, metavar="A:B", help="tokens, from A to B (default 16:512)")
    text = "requests per second, Poisson (default: all at once)"
    add("--rate", type=rate, metavar="R", help=text)
    add("--seed", type=natural, metavar="N", help="seed of lengths and arrivals (default 0)")
    add = parser.add_argument_group("recorded load").add_argument
    add(
        "--recording",
        type=path_argument,
        metavar="FILE",
        help="use its requests, options and outputs",
    )
    text = (
        "time (default): when they arrived at the host; iterations: in their recorded iteration; "
        "at_once: at the start"
    )
    add("--arrivals", choices=_ARRIVALS, help=text)


def _add_machine(parser: argparse.ArgumentParser) -> None:
    cost = parser.add_argument_group("step cost").add_mutually_exclusive_group()
    text = "the numbers of the cost model, or a JSON file of them"
    cost.add_argument("--cost", metavar="NAME=S,...|FILE", help=text)
    text = "fit the cost model to this recording"
    cost.add_argument("--fit", type=path_argument, metavar="FILE", help=text)
    group = parser.add_argument_group("manager (default: as recorded, or as in OptionalParams)")
    for name, text in (
        ("max-batch-size", "requests in a batch"),
        ("max-active-requests", "requests that a scheduler sees (default: as many as fit a batch)"),
        ("max-num-tokens", "tokens in an iteration"),
        ("max-seq-len", "tokens of a request, prompt and output"),
        ("tokens-per-block", "tokens in a block of the KV cache"),
    ):
        group.add_argument(f"--{name}", type=positive, metavar="N", help=text)
    text = "tokens in the KV cache (default 262144)"
    group.add_argument("--kv-cache-tokens", type=positive, metavar="N", help=text)
    text = "compute long contexts in chunks"
    group.add_argument("--chunked-context", action=argparse.BooleanOptionalAction, help=text)
    text = "steps that start before the last result is known"
    group.add_argument("--run-ahead", type=int, choices=(0, 1), help=text)
    text = "pipeline stages (default 1, or as recorded)"
    group.add_argument("--pipeline-parallel-size", type=positive, metavar="N", help=text)


def _policies(text: str) -> list[CapacitySchedulerPolicy]:
    try:
        return [CapacitySchedulerPolicy[name.strip().upper()] for name in text.split(",")]
    except KeyError as error:
        raise argparse.ArgumentTypeError(
            f"{error.args[0].lower()!r} must be one of {', '.join(POLICIES)}"
        ) from None
