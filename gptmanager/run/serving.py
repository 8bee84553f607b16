"""`gptmanager run`: a file of requests through a manager, live, and a summary of how it went."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from gptmanager.callbacks import JsonLinesSink, RequestQueue, fan_out, load_tokenizer
from gptmanager.config import ModelType, OptionalParams, SchedulerConfig
from gptmanager.manager.gpt_manager import GptManager
from gptmanager.memory.checkpoint_files import read_object
from gptmanager.models.read_spec import read_spec
from gptmanager.run.live_view import LiveView
from gptmanager.run.requests_file import read_file
from gptmanager.run.results_file import Results, new_file
from gptmanager.run.watch import Recorder, Watch, summary


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the command line says. `pace_s`: seconds that an iteration takes at least."""

    model: Path
    requests: str  # a path, or "-"
    output: Path | None = None
    stats: Path | None = None
    max_new_tokens: int = 64
    pace_s: float = 0.0
    params: OptionalParams = field(default_factory=OptionalParams)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    model_type: ModelType = ModelType.INFLIGHT_FUSED_BATCHING


class Served(NamedTuple):
    """The summary of a run, and a sentence for each file that is not whole."""

    summary: dict[str, Any]
    losses: tuple[str, ...] = ()


def serve_file(options: RunOptions, view: LiveView) -> Served:
    """Serve every line of the file. Raises ConfigError for bad options."""
    has_tokenizer = os.path.lexists(options.model / "tokenizer.json")
    tokenizer = load_tokenizer(options.model) if has_tokenizer else None
    config = read_object(options.model / "config.json")
    spec = read_spec(config, max_seq_len=options.params.max_seq_len)
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
        exclude_input = options.params.exclude_input_in_output
        queue = stack.enter_context(
            RequestQueue.for_checkpoint(
                options.model, max_pending=None, exclude_input_in_output=exclude_input
            )
        )
        recorder = Recorder(queue, is_watched=not view.quiet)
        manager = stack.enter_context(_manager(options, queue, recorder, sinks))
        queue.attach(manager)
        Watch(lines, tokenizer, recorder, results, view).follow(queue)
    losses = [
        f"--stats {options.stats}: {sink.num_dropped} records could not be written"
        for sink in sinks
        if sink.num_dropped
    ]
    if manager.recording_error:
        losses.append(f"--record {options.params.recording_path}: {manager.recording_error}")
    answers = [results.by_number[line.number] for line in lines]
    return Served(summary(answers, recorder), tuple(losses))


def _manager(
    options: RunOptions, queue: RequestQueue, recorder: Recorder, sinks: Sequence[JsonLinesSink]
) -> GptManager:
    poll = queue.poll_stop_signal

    def paced_poll() -> Any:
        time.sleep(options.pace_s)  # slows the loop down for a person to watch
        return poll()

    return GptManager(
        options.model,
        options.model_type,
        1,
        options.scheduler,
        recorder.get_inference_requests,
        fan_out(queue.send_response, recorder.see_response),
        paced_poll if options.pace_s else poll,
        fan_out(recorder.see_statistics, *sinks),
        options.params,
    )
