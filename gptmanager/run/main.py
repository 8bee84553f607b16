"""`gptmanager run` once its arguments are read: a file of requests through a manager, live."""

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
from gptmanager.terminal.arguments import check_distinct
from gptmanager.terminal.options import (
    ManagerOptions,
    manager_options,
)
from gptmanager.terminal.progress import NOTES, ProgressBars
from gptmanager.terminal.streams import tell
from gptmanager.terminal.tables import print_report


def main(options: argparse.Namespace) -> int:
    """Return the exit status."""
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
        params.on_progress = ProgressBars(options.region, notes=NOTES).tell
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
