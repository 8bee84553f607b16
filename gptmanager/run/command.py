"""The command `gptmanager run`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gptmanager.run.live_view import LiveView
from gptmanager.run.serving import serve_file
from gptmanager.terminal.arguments import check_distinct, positive, seconds
from gptmanager.terminal.options import (
    add_json,
    add_manager_options,
    add_model,
    add_parser,
    optional_params,
)
from gptmanager.terminal.progress import ProgressBars
from gptmanager.terminal.report import print_report
from gptmanager.terminal.streams import tell

_HELP = """\
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
_EXAMPLES = """\
examples:
  gptmanager run --model examples/tiny_llama --requests examples/requests.jsonl --output out.jsonl
  gptmanager run --model examples/tiny_llama --requests examples/requests.jsonl \\
    --max-batch-size 4 --pace 0.05            # slowly, to see requests join and leave
  echo '{"prompt": "17 + 25 ="}' | gptmanager run --model examples/tiny_llama --requests - --json

exit status: 0 all answered, 1 some failed, 2 the call was wrong, 130 interrupted
"""


def add_command(commands: Any) -> None:
    parser = add_parser(
        commands,
        "run",
        _run,
        help="serve a file of requests and show them live",
        usage="gptmanager run --model DIR --requests FILE [options]",
        description=_HELP,
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    add_model(parser, required=True)
    add("--requests", required=True, metavar="FILE", help="JSON lines; -: the standard input")
    add("--output", type=Path, metavar="FILE", help="results as JSON lines, in the same order")
    add("--stats", type=Path, metavar="FILE", help="a statistics record an iteration, JSON lines")
    add("--record", type=Path, metavar="FILE", help="a recording, for `gptmanager picture`")
    add_json(parser, "print the summary as JSON, and failures only")
    told = "for lines that name none (default %(default)s)"
    add("--max-new-tokens", type=positive, default=64, metavar="N", help=told)
    add("--pace", type=seconds, default=0.0, metavar="S", help="at least S seconds an iteration")
    add_manager_options(parser)


def _run(options: argparse.Namespace) -> int:
    requests = None if options.requests == "-" else Path(options.requests)
    written = {f"--{name}": getattr(options, name) for name in ("output", "stats", "record")}
    check_distinct({"--requests": requests, **written})
    params = optional_params(options)
    params.recording_path = options.record
    if not options.json:
        params.on_progress = ProgressBars(options.region).tell
    params.callback_budget_s = 1.0 + options.pace  # the pace is kept by a callback
    summary, losses = serve_file(options, params, LiveView(options.region, quiet=options.json))
    print_report(summary, as_json=options.json)
    for loss in losses:
        tell(loss)
    return 1 if summary["failed"] or losses else 0
