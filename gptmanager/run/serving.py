"""`gptmanager run`: a file of requests through a manager, live, and a summary of how it went."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

from gptmanager.callbacks import JsonLinesSink, RequestQueue, fan_out, load_tokenizer
from gptmanager.config import OptionalParams
from gptmanager.manager.gpt_manager import GptManager
from gptmanager.memory.checkpoint_files import read_object
from gptmanager.models.read_spec import read_spec
from gptmanager.run.live_view import LiveView
from gptmanager.run.requests_file import read_file
from gptmanager.run.results_file import Results, new_file
from gptmanager.run.watch import Recorder, Watch, summary
from gptmanager.terminal.options import model_type, scheduler_config


def serve_file(
    options: argparse.Namespace, params: OptionalParams, view: LiveView
) -> tuple[dict[str, Any], list[str]]:
    """Serve every line of the file: a summary, and a sentence for each file that is not whole.

    Raises ConfigError for bad options.
    """
    has_tokenizer = os.path.lexists(options.model / "tokenizer.json")
    tokenizer = load_tokenizer(options.model) if has_tokenizer else None
    config = read_object(options.model / "config.json")
    spec = read_spec(config, max_seq_len=params.max_seq_len)
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
        manager = stack.enter_context(_manager(options, params, queue, recorder, sinks))
        queue.attach(manager)
        Watch(lines, tokenizer, recorder, results, view).follow(queue)
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
    params: OptionalParams,
    queue: RequestQueue,
    recorder: Recorder,
    sinks: Sequence[JsonLinesSink],
) -> GptManager:
    poll = queue.poll_stop_signal

    def paced_poll() -> Any:
        time.sleep(options.pace)  # slows the loop down for a person to watch
        return poll()

    return GptManager(
        options.model,
        model_type(options),
        1,
        scheduler_config(options),
        recorder.get_inference_requests,
        fan_out(queue.send_response, recorder.see_response),
        paced_poll if options.pace else poll,
        fan_out(recorder.see_statistics, *sinks),
        params,
    )
