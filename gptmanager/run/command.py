"""`gptmanager run`: a file of requests through a manager, live, and a summary of how it went."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from gptmanager.callbacks import JsonLinesSink, RequestQueue, broadcast, fan_out, load_tokenizer
from gptmanager.manager.gpt_manager import GptManager
from gptmanager.memory.checkpoint_files import read_object
from gptmanager.models.read_spec import read_spec
from gptmanager.run.follow import follow, is_follower
from gptmanager.run.live_view import LiveView
from gptmanager.run.requests_file import read_file
from gptmanager.run.results_file import Results, new_file
from gptmanager.run.watch import Recorder, Watch, summary
from gptmanager.terminal.arguments import check_distinct, positive, seconds
from gptmanager.terminal.options import (
    ManagerOptions,
    add_json,
    add_manager_options,
    add_model,
    add_parser,
    manager_options,
)
from gptmanager.terminal.progress import ProgressBars
from gptmanager.terminal.streams import tell
from gptmanager.terminal.tables import print_report

_HELP = """\
Serve a file of requests and show them live.

A line of FILE is a JSON object:
  "prompt"          a text (the folder then needs a tokenizer.json), or
  "input_ids"       a list of token ids
  "max_new_tokens"  how long the answer may get (else --max-new-tokens)
  "lora"            the folder of an adapter that PEFT has saved
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

  torchrun --nproc-per-node 2 -m gptmanager run --tensor-parallel-size 2 \\
    --model examples/tiny_llama --requests examples/requests.jsonl   # one model, two processes

exit status: 0 all answered, 1 some failed, 2 the call was wrong, 130 interrupted, 143 terminated
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
    given = manager_options(options)
    params = given.params
    if is_follower(params):
        follow(options.model, params, given.scheduler, given.model_type)
        return 0
    params.recording_path = options.record
    if not options.json:
        params.on_progress = ProgressBars(options.region).tell
    params.callback_budget_s = 1.0 + options.pace  # the pace is kept by a callback
    summary, losses = serve_file(options, given, LiveView(options.region, quiet=options.json))
    print_report(summary, as_json=options.json)
    for loss in losses:
        tell(loss)
    return 1 if summary["failed"] or losses else 0


def serve_file(
    options: argparse.Namespace, given: ManagerOptions, view: LiveView
) -> tuple[dict[str, Any], list[str]]:
    """Serve every line of the file: a summary, and a sentence for each file that is not whole.

    Raises ConfigError for bad options.
    """
    has_tokenizer = os.path.lexists(options.model / "tokenizer.json")
    tokenizer = load_tokenizer(options.model) if has_tokenizer else None
    config = read_object(options.model / "config.json")
    spec = read_spec(config, max_seq_len=given.params.max_seq_len)
    lines = read_file(
        options.requests,
        tokenizer,
        max_new_tokens=options.max_new_tokens,
        max_tokens=spec.max_seq_len,
    )
    if not lines:
        name = "the standard input" if options.requests == "-" else options.requests
        view.note(f"{name} holds no requests")
    with ExitStack() as stack:
        # files first: a path that cannot be is told before anything slow
        file = None
        if options.output is not None:
            file = stack.enter_context(new_file("--output", options.output))
        sinks = []
        if options.stats is not None:
            new_file("--stats", options.stats).close()
            sinks.append(stack.enter_context(JsonLinesSink(options.stats)))
        results = stack.enter_context(closing(Results(lines, tokenizer, file)))
        stack.callback(view.close)
        view.note(f"loading {options.model}")
        queue = stack.enter_context(RequestQueue.for_checkpoint(options.model, max_pending=None))
        recorder = Recorder(queue, is_watched=not view.quiet)
        manager = stack.enter_context(_manager(options, given, queue, recorder, sinks))
        queue.attach(manager)
        Watch(recorder, results, view).follow(queue)
    losses = [
        f"--stats {options.stats}: {sink.num_dropped} records could not be written"
        for sink in sinks
        if sink.num_dropped
    ]
    if manager.recording_error:
        losses.append(f"--record {options.record}: {manager.recording_error}")
    answers = [results.by_number[line.number] for line in lines]
    return summary(answers, recorder), losses


def _manager(
    options: argparse.Namespace,
    given: ManagerOptions,
    queue: RequestQueue,
    recorder: Recorder,
    sinks: Sequence[JsonLinesSink],
) -> GptManager:
    poll: Any = queue.poll_stop_signal

    def paced_poll() -> Any:
        time.sleep(options.pace)  # slows the loop down for a person to watch
        return queue.poll_stop_signal()

    get: Any = recorder.get_inference_requests
    poll = paced_poll if options.pace else poll
    if given.params.parallel_config is not None:
        get, poll = broadcast(get, poll)
    return GptManager(
        options.model,
        given.model_type,
        1,
        given.scheduler,
        get,
        fan_out(queue.send_response, recorder.see_response),
        poll,
        fan_out(recorder.see_statistics, *sinks),
        given.params,
    )
