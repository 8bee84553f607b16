"""The command `gptmanager bench`, and those below it."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from gptmanager.bench.engine import Figures
from gptmanager.bench.gpu_commands import add_end_to_end, add_kernels, tell_start
from gptmanager.bench.load import Load
from gptmanager.bench.throughput import BenchOptions, bench
from gptmanager.terminal.arguments import positive, span
from gptmanager.terminal.options import (
    add_json,
    add_manager_options,
    add_model,
    add_parser,
    manager_options,
)
from gptmanager.terminal.progress import ProgressBars
from gptmanager.terminal.tables import print_report

_HELP = """\
Time a synthetic load: greedy requests of random tokens, submitted at once, that never end early.
Without --model: random weights of a small Llama (hidden 256, 8 layers, vocabulary 4096).
`gptmanager bench kernels` and `gptmanager bench e2e` are for one GPU, with options of their own.
"""
_EXAMPLES = """\
examples:
  gptmanager bench --peer transformers        # both on the same weights and requests, in turn
  gptmanager bench --model DIR --num-requests 16 --prompt-len 100:200 --output-len 64

exit status: 0 all well, 1 something failed, 2 the call was wrong, 130 interrupted
"""


def add_command(commands: Any) -> None:
    parser = add_parser(
        commands,
        "bench",
        _bench,
        help="time a synthetic load, beside a peer",
        usage="gptmanager bench [kernels | e2e] [options]",
        description=_HELP,
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    add_model(parser)
    add("--num-requests", type=positive, default=64, metavar="N", help="(default %(default)s)")
    lengths: dict[str, Any] = {"type": span, "metavar": "A:B"}
    add("--prompt-len", default=(16, 256), help="tokens, from A to B (default 16:256)", **lengths)
    add("--output-len", default=(16, 128), help="tokens, from A to B (default 16:128)", **lengths)
    add("--repeats", type=positive, default=3, metavar="N", help="the best counts (default 3)")
    add("--peer", choices=("transformers",), help="run the same load on it too, in alternation")
    add_json(parser)
    add_manager_options(parser)
    below = parser.add_subparsers(
        prog="gptmanager bench", title="on one GPU", metavar="[kernels | e2e]"
    )
    add_kernels(below)
    add_end_to_end(below)


def _bench(options: argparse.Namespace) -> int:
    bars = ProgressBars(options.region, patience_s=0)

    def ran(name: str, figures: Figures) -> None:
        options.region.write(f"{name:12} {figures.tokens_per_second:10,.1f} output tokens/s\n")

    given = manager_options(options)
    given.params.on_progress = bars.tell
    report = bench(
        BenchOptions(
            model=options.model,
            load=Load(options.num_requests, options.prompt_len, options.output_len),
            repeats=options.repeats,
            peer=options.peer,
            params=given.params,
            scheduler=given.scheduler,
            model_type=given.model_type,
        ),
        on_start=partial(tell_start, bars, "runs"),
        on_run=ran,
    )
    bars.close()
    print_report(report, as_json=options.json)
    return 0
