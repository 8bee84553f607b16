"""`gptmanager run`: a file of requests through a manager, live, and a summary of how it went."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import orjson
from tokenizers import Tokenizer

from gptmanager.api import NamedTensor
from gptmanager.callbacks import (
    Generation,
    JsonLinesSink,
    RequestQueue,
    TextStream,
    fan_out,
    load_tokenizer,
)
from gptmanager.config import ModelType, OptionalParams, SchedulerConfig
from gptmanager.errors import ConfigError, response_text
from gptmanager.live_view import LiveView, Progress, RunningRow
from gptmanager.manager import GptManager
from gptmanager.requests_file import RequestLine, read_requests

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
    quiet: bool = False
    params: OptionalParams = field(default_factory=OptionalParams)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)


@dataclass(slots=True)
class Events:
    """What the loop thread tells the terminal's thread; appends and pops need no lock."""

    responses: deque[tuple[int, list[int], bool]] = field(default_factory=deque)
    batch_sizes: list[int] = field(default_factory=list)
    kv_use: float = 0.0
    max_kv_use: float = 0.0

    def send(self, request_id: int, tensors: list[NamedTensor], final: bool, error: str) -> None:
        tokens: list[int] = []
        by_name = dict(tensors)
        if "output_offset" in by_name:
            tokens = by_name["output_ids"].flatten().tolist()
        self.responses.append((request_id, tokens, final))

    def record(self, text: str) -> None:
        record = orjson.loads(text)
        self.batch_sizes.append(record["Scheduled Requests"])
        self.kv_use = record["Used KV cache blocks"] / record["Max KV cache blocks"]
        self.max_kv_use = max(self.max_kv_use, self.kv_use)


def run(options: RunOptions) -> dict[str, Any]:
    """Serve every line of the file; returns the summary. Raises ConfigError for bad options."""
    tokenizer = load_tokenizer(options.model) if has_tokenizer(options.model) else None
    lines = _read(options, tokenizer)
    events = Events()
    with ExitStack() as stack:
        queue = stack.enter_context(
            RequestQueue.for_checkpoint(
                options.model,
                max_pending=None,
                exclude_input_in_output=options.params.exclude_input_in_output,
            )
        )
        record = [events.record]
        if options.stats is not None:
            record.append(stack.enter_context(JsonLinesSink(options.stats)))
        manager = stack.enter_context(
            GptManager(
                options.model,
                ModelType.INFLIGHT_FUSED_BATCHING,
                1,
                options.scheduler,
                queue.get_inference_requests,
                fan_out(events.send, queue.send_response),
                _paced(queue.poll_stop_signal, options.pace_s),
                fan_out(*record),
                options.params,
            )
        )
        queue.attach(manager)
        watch = Watch(lines, tokenizer, events, LiveView(sys.stderr, quiet=options.quiet))
        generations = {
            line.number: queue.submit(line.request) for line in lines if line.request is not None
        }
        try:
            watch.until_done(generations)
        finally:
            watch.view.close()
        seconds = time.monotonic() - watch.progress.started
    results = [_result(line, generations.get(line.number), tokenizer) for line in lines]
    if options.output is not None:
        with options.output.open("wb") as output:
            for result in results:
                output.write(orjson.dumps(result) + b"\n")
    return summary(results, seconds, events.batch_sizes, events.max_kv_use)


class Watch:
    """Follows a run on the terminal's thread."""

    def __init__(
        self,
        lines: list[RequestLine],
        tokenizer: Tokenizer | None,
        events: Events,
        view: LiveView,
    ) -> None:
        self.view = view
        self.progress = Progress(total=sum(line.request is not None for line in lines))
        self._events = events
        self._tokenizer = tokenizer
        self._lines = {line.request_id: line for line in lines if line.request is not None}
        self._rows: dict[int, RunningRow] = {}
        self._texts: dict[int, TextStream] = {}
        self._generations: dict[int, Generation] = {}

    def until_done(self, generations: dict[int, Generation]) -> None:
        self._generations = {g.request_id: g for g in generations.values()}
        while True:
            done = all(generation.done() for generation in generations.values())
            self._take_events()
            self.view.draw(list(self._rows.values()), self.progress)
            if done:
                return
            time.sleep(_REFRESH_S)

    def _take_events(self) -> None:
        self.progress.batch_size = (self._events.batch_sizes or [0])[-1]
        self.progress.kv_use = self._events.kv_use
        while self._events.responses:
            request_id, tokens, is_final = self._events.responses.popleft()
            row = self._rows.get(request_id) or self._join(request_id)
            row.num_tokens += len(tokens)
            self.progress.output_tokens += len(tokens)
            row.text += self._text(request_id, tokens)
            if is_final:
                self._leave(row)

    def _join(self, request_id: int) -> RunningRow:
        line = self._lines[request_id]
        row = RunningRow(request_id, line.prompt or f"{line.request.input_ids.tolist()}")
        self._rows[request_id] = row
        if self._tokenizer is not None:
            ids = line.request.input_ids.reshape(-1).tolist()
            self._texts[request_id] = TextStream(self._tokenizer, ids)
        self.view.join(row, self.progress)
        return row

    def _leave(self, row: RunningRow) -> None:
        del self._rows[row.request_id]
        self.progress.done += 1
        generation = self._generations[row.request_id]
        error = generation.exception()
        if error is not None:
            self.view.leave(row, response_text(error), self.progress)
            return
        result = generation.result()
        if not row.num_tokens:  # it did not stream
            row.num_tokens = len(result.generated_ids[0])
            self.progress.output_tokens += row.num_tokens
            row.text = self._text(row.request_id, list(result.generated_ids[0]))
        self.view.leave(row, result.finish_reasons[0].name, self.progress)

    def _text(self, request_id: int, tokens: list[int]) -> str:
        if self._tokenizer is None:
            return "".join(f" {token}" for token in tokens)
        return self._texts[request_id].push(tokens)


def has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer.json").is_file()


def summary(
    results: list[dict[str, Any]], seconds: float, batch_sizes: list[int], max_kv_use: float
) -> dict[str, Any]:
    """What the run amounted to; latencies in milliseconds at the 50th, 90th and 99th percentile."""
    served = [result for result in results if "error" not in result]
    output_tokens = sum(len(result["output_ids"]) for result in served)
    metrics = [result["metrics"] for result in served]
    per_token = [
        (m["last_token_s"] - m["first_token_s"]) / (m["generated_tokens"] - 1)
        for m in metrics
        if m["generated_tokens"] > 1
    ]
    return {
        "requests": len(results),
        "failed": len(results) - len(served),
        "seconds": round(seconds, 3),
        "prompt_tokens": int(sum(m["prompt_tokens"] for m in metrics)),
        "output_tokens": output_tokens,
        "output_tokens_per_second": round(output_tokens / max(seconds, 1e-9), 1),
        "time_to_first_token_ms": percentiles([m["first_token_s"] for m in metrics]),
        "time_per_output_token_ms": percentiles(per_token),
        "queue_ms": percentiles([m["queue_s"] for m in metrics]),
        "mean_batch_size": round(float(np.mean(batch_sizes)), 1) if batch_sizes else 0.0,
        "max_kv_cache_use": round(max_kv_use, 4),
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    values = [value for value in seconds if value == value]
    if not values:
        return {}
    cuts = np.percentile(values, (50, 90, 99)) * 1e3
    return {
        name: round(float(cut), 2) for name, cut in zip(("p50", "p90", "p99"), cuts, strict=True)
    }


def _read(options: RunOptions, tokenizer: Tokenizer | None) -> list[RequestLine]:
    def read(lines: BinaryIO) -> list[RequestLine]:
        return list(read_requests(lines, tokenizer, max_new_tokens=options.max_new_tokens))

    if options.requests == "-":
        return read(sys.stdin.buffer)
    try:
        with open(options.requests, "rb") as lines:
            return read(lines)
    except OSError as error:
        raise ConfigError(f"--requests {options.requests!r}: {error.strerror}") from error


def _paced(poll: Callable[[], Any], pace_s: float) -> Callable[[], Any]:
    """Slows the loop down for a person to watch."""
    if not pace_s:
        return poll

    def paced_poll() -> Any:
        time.sleep(pace_s)
        return poll()

    return paced_poll


def _result(
    line: RequestLine, generation: Generation | None, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """A line of the output file."""
    shown: dict[str, Any] = {"request_id": line.request_id}
    if line.prompt is not None:
        shown["prompt"] = line.prompt
    error = line.error if generation is None else generation.exception()
    if error is not None or generation is None:
        return {**shown, "error": response_text(error or RuntimeError("was not submitted"))}
    result = generation.result()
    output_ids = result.generated_ids[0]
    if tokenizer is not None:
        stream = TextStream(tokenizer, result.prompt_ids)
        shown["text"] = stream.push(output_ids) + stream.flush()
    return {
        **shown,
        "output_ids": output_ids,
        "finish_reason": result.finish_reasons[0].name,
        "metrics": dict(result.metrics),
    }
