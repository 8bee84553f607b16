"""`gptmanager run`: a file of requests through a manager, live, and a summary of how it went."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
from tokenizers import Tokenizer

from gptmanager.callbacks import (
    Generation,
    JsonLinesSink,
    RequestQueue,
    TextStream,
    fan_out,
    load_tokenizer,
)
from gptmanager.config import ModelType, OptionalParams, SchedulerConfig
from gptmanager.errors import ManagerDeadError
from gptmanager.manager.gpt_manager import GptManager
from gptmanager.memory.checkpoint_files import read_object
from gptmanager.models.read_spec import read_spec
from gptmanager.request.inference_request import InferenceRequest, NamedTensor
from gptmanager.run.live_view import LiveView, Progress, RunningRow
from gptmanager.run.requests_file import RequestLine, Results, built_apart, new_file, read_file

_REFRESH_S = 0.05


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
    """What a run amounted to, and a sentence for each file that is not whole."""

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


class FetchTimes:
    """A Get callback in front of another; keeps when each request was fetched.

    A request's metrics count from there, a client's patience from its submission.
    """

    def __init__(self, get: Callable[[int], Sequence[InferenceRequest]]) -> None:
        self._get = get
        self.by_id: dict[int, float] = {}  # seconds of time.monotonic()

    def __call__(self, max_num_requests: int) -> Sequence[InferenceRequest]:
        requests = self._get(max_num_requests)
        now = time.monotonic()
        for request in requests:
            self.by_id[request.request_id] = now
        return requests


class Recorder:
    """What a run's callbacks see, for the terminal's thread; appends and pops need no lock.

    `news` holds request ids with new tokens, with none when a request joins, with None when it
    has ended. Not `is_watched`: only ends are news.
    """

    def __init__(self, queue: RequestQueue, *, is_watched: bool) -> None:
        self.news: deque[tuple[int, list[int] | None]] = deque()
        self.fetched_at = FetchTimes(queue.get_inference_requests)
        self.submitted_at: dict[int, float] = {}
        self.ended_at = 0.0  # the last one
        self.batch_sizes: list[int] = []
        self.kv_use = 0.0
        self.max_kv_use = 0.0
        self._is_watched = is_watched

    def get_inference_requests(self, max_num_requests: int) -> Sequence[InferenceRequest]:
        requests = self.fetched_at(max_num_requests)
        if self._is_watched:
            self.news.extend((request.request_id, []) for request in requests)
        return requests

    def see_response(
        self, request_id: int, tensors: list[NamedTensor], is_final: bool, error: str
    ) -> None:
        if self._is_watched and not is_final:
            tokens = dict(tensors)["output_ids"].reshape(-1).tolist()
            self.news.append((request_id, tokens))

    def see_end(self, generation: Any) -> None:
        self.ended_at = time.monotonic()
        self.news.append((generation.request_id, None))

    def see_statistics(self, text: str) -> None:
        record = orjson.loads(text)
        self.batch_sizes.append(record["Scheduled Requests"])
        self.kv_use = record["Used KV cache blocks"] / record["Max KV cache blocks"]
        self.max_kv_use = max(self.max_kv_use, self.kv_use)


class Watch:
    """Submits the requests and follows them, on the terminal's thread."""

    def __init__(
        self,
        lines: Sequence[RequestLine],
        tokenizer: Tokenizer | None,
        recorder: Recorder,
        results: Results,
        view: LiveView,
    ) -> None:
        self._lines = lines
        self._tokenizer = tokenizer
        self._recorder = recorder
        self._results = results
        self._view = view
        self._progress = Progress(total=len(lines))
        self._rows: dict[int, RunningRow] = {}  # by line
        self._generations: dict[int, tuple[RequestLine, Generation]] = {}

    def follow(self, queue: RequestQueue) -> None:
        """Returns when every line has its result."""
        for line in self._lines:
            if line.build is None:
                self._submit(line, queue)
        built = built_apart([line for line in self._lines if line.build is not None])
        try:
            while self._progress.done < self._progress.total:
                time.sleep(_REFRESH_S)
                while not built.empty():
                    self._submit(built.get(), queue)
                self._take_news()
                self._view.draw(list(self._rows.values()), self._progress)
        except KeyboardInterrupt:
            self._view.note(f"{self._progress.done} of {self._progress.total} requests were done")
            raise

    def _submit(self, line: RequestLine, queue: RequestQueue) -> None:
        if line.request is None:
            self._answer(line, line.error)
            return
        self._recorder.submitted_at[line.request.request_id] = time.monotonic()
        try:
            generation = queue.submit(line.request)
        except ManagerDeadError as error:  # meanwhile
            self._answer(line, error)
            return
        self._generations[generation.request_id] = (line, generation)
        generation.add_done_callback(self._recorder.see_end)

    def _take_news(self) -> None:
        self._progress.batch_size = (self._recorder.batch_sizes or [0])[-1]
        self._progress.kv_use = self._recorder.kv_use
        while self._recorder.news:
            request_id, tokens = self._recorder.news.popleft()
            line, generation = self._generations[request_id]
            if tokens is None:
                self._answer(line, generation.exception() or generation.result())
            elif not tokens:
                row = self._rows[line.number] = self._row(line)
                self._view.join(row, self._progress)
            elif line.number in self._rows:
                self._rows[line.number].add(tokens)
                self._progress.output_tokens += len(tokens)

    def _answer(self, line: RequestLine, outcome: Any) -> None:
        result = self._results.add(line, outcome)
        row = self._rows.pop(line.number, None) or self._row(line)
        output_ids = result.get("output_ids", ())
        self._progress.done += 1
        self._progress.output_tokens += len(output_ids) - row.num_tokens
        row.num_tokens = len(output_ids)
        failed = "error" in result
        why = "ERROR" if failed else result["finish_reason"]
        text = result["error"] if failed else result.get("text", _words(output_ids))
        self._view.leave(row, why, text, self._progress, failed=failed)

    def _row(self, line: RequestLine) -> RunningRow:
        name = "?" if line.request_id is None else str(line.request_id)
        ids = [] if line.request is None else line.request.input_ids.tolist()
        if self._tokenizer is None:
            return RunningRow(name, _words(ids), _words)
        prompt = self._tokenizer.decode(ids) if line.prompt is None else line.prompt
        return RunningRow(name, prompt, TextStream(self._tokenizer, ids).push)


def summary(results: Sequence[Mapping[str, Any]], recorder: Recorder) -> dict[str, Any]:
    """What the run amounted to; latencies in milliseconds, as a client sees them."""
    served = [result for result in results if "error" not in result]
    metrics = [result["metrics"] for result in served]
    output_tokens = sum(len(result["output_ids"]) for result in served)
    submitted, fetched = recorder.submitted_at, recorder.fetched_at.by_id
    seconds = recorder.ended_at - min(submitted.values()) if submitted else 0.0
    ids = [result["request_id"] for result in served]
    sizes = recorder.batch_sizes
    return {
        "requests": len(results),
        "failed": len(results) - len(served),
        "seconds": round(seconds, 3),
        "prompt_tokens": sum(m["prompt_tokens"] for m in metrics),
        "output_tokens": output_tokens,
        "output_tokens_per_second": round(output_tokens / seconds, 1) if seconds else 0.0,
        **latencies(metrics, [fetched.get(i, np.nan) - submitted[i] for i in ids]),
        "mean_batch_size": round(float(np.mean(sizes)), 1) if sizes else 0.0,
        "max_kv_cache_use": round(recorder.max_kv_use, 4),
    }


def latencies(
    metrics: Sequence[Mapping[str, float]], waits: Sequence[float]
) -> dict[str, dict[str, float]]:
    """Percentiles of request metrics in milliseconds, counted from the submission.

    `waits`: seconds from each request's submission until Get returned it.
    """
    pairs = list(zip(metrics, waits, strict=True))
    return {
        "time_to_first_token_ms": _percentiles([m["first_token_s"] + wait for m, wait in pairs]),
        "time_per_output_token_ms": _percentiles(
            [
                (m["last_token_s"] - m["first_token_s"]) / (m["generated_tokens"] - 1)
                for m in metrics
                if m["generated_tokens"] > 1
            ]
        ),
        "queue_ms": _percentiles([m["queue_s"] + wait for m, wait in pairs]),
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """In milliseconds; empty if nothing was measured. NaN stands for what never happened."""
    values = [value * 1e3 for value in seconds if not np.isnan(value)]
    if not values:
        return {}
    cuts = np.percentile(values, (50, 90, 99)).tolist()
    return {name: round(cut, 2) for name, cut in zip(("p50", "p90", "p99"), cuts, strict=True)}


def _words(tokens: Sequence[int]) -> str:
    return "".join(f" {token}" for token in tokens)
