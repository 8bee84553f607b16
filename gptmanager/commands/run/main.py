"""`gptmanager run`, after its arguments are parsed: runs a file of requests and shows them live."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import orjson

from gptmanager.callbacks import JsonLinesSink, RequestQueue, broadcast, fan_out, load_tokenizer
from gptmanager.callbacks.text.checkpoint import has_tokenizer
from gptmanager.callbacks.text.stop_strings import checked_stops
from gptmanager.commands.follow import follow, is_follower
from gptmanager.commands.run.chat_prompts import ChatPrompts
from gptmanager.commands.run.progress_display import ProgressDisplay
from gptmanager.commands.run.requests_file import read_file, read_requests
from gptmanager.commands.run.results_file import Results, new_file
from gptmanager.commands.run.watch import Recorder, Watch, summary
from gptmanager.errors import ConfigError
from gptmanager.manager.gpt_manager import GptManager
from gptmanager.models.hf.sizes import read_sizes
from gptmanager.terminal.arguments import check_distinct
from gptmanager.terminal.options import (
    ManagerOptions,
    manager_options,
)
from gptmanager.terminal.printable import printable_lines
from gptmanager.terminal.progress import NOTES, ProgressBars
from gptmanager.terminal.sampling import SAMPLING_VALUES, given_sampling
from gptmanager.terminal.streams import print_message, print_output
from gptmanager.terminal.tables import print_report

_STDOUT = Path("-")


def main(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    requests = None if options.requests in (None, "-") else Path(options.requests)
    written = {f"--{name}": getattr(options, name) for name in ("output", "stats", "record")}
    to_stdout = written["--output"] == _STDOUT
    if to_stdout:
        del written["--output"]
        if options.json:
            raise ConfigError("--json and --output - both print the answers: pass one of them")
    check_distinct({"--requests": requests, **written})
    given = manager_options(options)
    params = given.params
    if is_follower(params):
        follow(options.model, params, given.scheduler, given.model_type)
        return 0
    params.recording_path = options.record
    if not options.json:
        params.on_progress = ProgressBars(options.region, notes=NOTES).update
    params.callback_budget_s = 1.0 + options.pace  # `paced_poll` sleeps in a callback
    is_quiet = options.json or options.prompt is not None
    view = ProgressDisplay(options.region, quiet=is_quiet)
    summary, answers, losses = serve_file(options, given, view)
    if options.json:
        extra = {} if options.output else {"answers": answers}
        print_report({**summary, **extra}, as_json=True)
    elif options.prompt is not None and options.output is None:
        _print_texts(answers)
    elif not to_stdout:
        print_report(summary, as_json=False)
    for loss in losses:
        print_message(loss)
    return 1 if summary["failed"] or losses else 0


def serve_file(
    options: argparse.Namespace, given: ManagerOptions, view: ProgressDisplay
) -> tuple[dict[str, Any], list[dict[str, Any]], list[str]]:
    """Run all requests of the --requests file, or the one request of --prompt.

    Returns a summary, the answers in the order of the file's lines, and a sentence for each output
    file that is incomplete. Raises ConfigError for invalid options.
    """
    sizes = read_sizes(options.model, given.params.model_backend, given.params.max_seq_len)
    tokenizer = load_tokenizer(options.model) if has_tokenizer(options.model) else None
    chats = ChatPrompts(options.model)
    sampling = {
        SAMPLING_VALUES[name].tensor: value for name, value in given_sampling(options).items()
    }
    stop = checked_stops(options.stop)
    defaults = {"request_output_len": options.max_new_tokens, "stop": stop, **sampling}
    limits: dict[str, Any] = {"defaults": defaults, "max_tokens": sizes.max_seq_len}
    if options.prompt is None:
        own: dict[str, Any] = {"chats": chats, "model": options.model, **limits}
        lines = read_file(options.requests, tokenizer, **own)
    else:
        line = orjson.dumps({"prompt": options.prompt})
        lines = list(read_requests([line], tokenizer, **limits))
    if not lines:
        name = "the standard input" if options.requests == "-" else options.requests
        view.note(f"{name} has no requests")
    with ExitStack() as stack:
        stack.callback(chats.close)
        # open the output files first: an unusable path is reported before the model is loaded
        file: Any = None
        if options.output is not None:
            is_stdout = options.output == _STDOUT
            file = sys.stdout.buffer if is_stdout else new_file("--output", options.output)
            if not is_stdout:
                stack.enter_context(file)
        sinks = []
        if options.stats is not None:
            new_file("--stats", options.stats).close()
            sinks.append(stack.enter_context(JsonLinesSink(options.stats)))
        results = stack.enter_context(closing(Results(lines, tokenizer, file)))
        stack.callback(view.close)
        view.note(f"loading {options.model}")
        queue = stack.enter_context(
            RequestQueue.for_checkpoint(options.model, max_pending=None, tokenizer=tokenizer)
        )
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
    return summary(answers, recorder), answers, losses


def _print_texts(answers: Sequence[dict[str, Any]]) -> None:
    """Print the text of each answer, or its token ids without a tokenizer.

    Failed requests are left out, because the display has shown their errors already.
    """
    for answer in answers:
        if "error" not in answer:
            ids = " ".join(map(str, answer["output_ids"]))
            print_output(printable_lines(answer.get("text", ids)))


def _manager(
    options: argparse.Namespace,
    given: ManagerOptions,
    queue: RequestQueue,
    recorder: Recorder,
    sinks: Sequence[JsonLinesSink],
) -> GptManager:
    poll: Any = queue.poll_stop_signal

    def paced_poll() -> Any:
        time.sleep(options.pace)  # slows the loop down so that a person can follow
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
