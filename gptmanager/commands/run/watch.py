"""Follows a run: callbacks record events, and the main thread shows them and collects results."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import orjson

from gptmanager.callbacks import Generation, RequestQueue, TextStream
from gptmanager.commands.latencies import FetchTimes, latencies
from gptmanager.commands.run.progress_display import Progress, ProgressDisplay, RunningRow
from gptmanager.commands.run.requests_file import RequestLine, build_in_thread
from gptmanager.commands.run.results_file import Results
from gptmanager.errors import ManagerDeadError
from gptmanager.lifecycle.latch import Latch
from gptmanager.request.inference_request import InferenceRequest, NamedTensor

_REFRESH_S = 0.1  # between two drawings, each of which takes milliseconds of CPU time


class News(NamedTuple):
    """An event of a request, and the `time.monotonic()` at which it happened.

    `tokens`: the new tokens; empty when the request joins, None when it has ended.
    """

    when: float
    request_id: int
    tokens: list[int] | None


class Refusal(NamedTuple):
    """A line that is not submitted to the manager, and the reason."""

    when: float
    line: RequestLine
    error: BaseException | None


class Recorder:
    """Records what the callbacks of a run see, for the main thread.

    No lock is needed, because deques are thread-safe. If `is_watched` is False, `news` has only
    refusals and ends of requests. `kv_use` is the fraction of the KV cache blocks that were in use
    in the last iteration, and `max_kv_use` is the maximum of this fraction.
    """

    def __init__(self, queue: RequestQueue, *, is_watched: bool) -> None:
        self.news: deque[News | Refusal] = deque()
        self.fetched_at = FetchTimes(queue.get_inference_requests)
        self.submitted_at: dict[int, float] = {}
        self.ended_at = 0.0  # the time of the latest end of a request
        self.batch_sizes: list[int] = []
        self.kv_use = 0.0
        self.max_kv_use = 0.0
        self._is_watched = is_watched

    def get_inference_requests(self, max_num_requests: int) -> Sequence[InferenceRequest]:
        """Get callback: return requests from the queue, and record when they were fetched."""
        requests = self.fetched_at(max_num_requests)
        if self._is_watched:
            ids = [request.request_id for request in requests]
            self.news.extend(News(self.fetched_at.by_id[it], it, []) for it in ids)
        return requests

    def see_response(
        self, request_id: int, tensors: list[NamedTensor], is_final: bool, error: str
    ) -> None:
        """Send callback: record the new tokens of a response, unless the response is final."""
        if self._is_watched and not is_final:
            tokens = dict(tensors)["output_ids"].reshape(-1).tolist()
            self.news.append(News(time.monotonic(), request_id, tokens))

    def see_end(self, generation: Any) -> None:
        """Record that a request has ended."""
        self.ended_at = time.monotonic()
        self.news.append(News(self.ended_at, generation.request_id, None))

    def see_statistics(self, text: str) -> None:
        """Statistics callback: record the batch size and the use of the KV cache."""
        record = orjson.loads(text)
        self.batch_sizes.append(record["Scheduled Requests"])
        self.kv_use = record["Used KV cache blocks"] / record["Max KV cache blocks"]
        self.max_kv_use = max(self.max_kv_use, self.kv_use)


def summary(results: Sequence[Mapping[str, Any]], recorder: Recorder) -> dict[str, Any]:
    """Return the figures of the whole run. Latencies are in milliseconds, as a client sees them."""
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


class Watch:
    """Submits the requests and follows them, on the main thread."""

    def __init__(self, recorder: Recorder, results: Results, view: ProgressDisplay) -> None:
        self._lines = results.lines
        self._tokenizer = results.tokenizer
        self._recorder = recorder
        self._results = results
        self._view = view
        self._progress = Progress(len(results.lines), time.monotonic())
        self._rows: dict[int, RunningRow] = {}  # by the number of the line
        self._generations: dict[int, tuple[RequestLine, Generation]] = {}
        self._num_ends = itertools.count(1)
        # so that the run does not wait for the next drawing; Ctrl-C may interrupt a wait for it
        self._all_ended = Latch()

    def follow(self, queue: RequestQueue) -> None:
        """Submit the lines and show the events; return when every line has its result."""
        try:
            for line in self._lines:
                if line.build is None:
                    self._submit(line, queue, time.monotonic())
            built = build_in_thread([line for line in self._lines if line.build is not None])
            self._take_news()
            while self._progress.done < self._progress.total:
                if self._all_ended.wait(_REFRESH_S):
                    self._all_ended = Latch()
                while not built.empty():
                    when, line = built.get()
                    self._submit(line, queue, when)
                self._take_news()
                self._view.draw(list(self._rows.values()), self._progress)
        except KeyboardInterrupt:
            self._add_ended()
            done = len(self._results.by_number)
            self._view.note(f"{done} of {self._progress.total} requests were done")
            raise

    def _add_ended(self) -> None:
        """Add the outcomes of ended requests: an interrupt may have dropped their events."""
        for line, generation in self._generations.values():
            if generation.done() and line.number not in self._results.by_number:
                self._results.add(line, generation.exception() or generation.result())

    def _submit(self, line: RequestLine, queue: RequestQueue, known_at: float) -> None:
        """Submit a line's request. If the line has none, record a refusal at time `known_at`."""
        if line.request is None:
            self._recorder.news.append(Refusal(known_at, line, line.error))
            return
        submitted_at = time.monotonic()
        try:
            generation = queue.submit(line.request, stop=line.stop)
        except ManagerDeadError as error:  # the manager failed in the meantime
            self._recorder.news.append(Refusal(time.monotonic(), line, error))
            return
        self._recorder.submitted_at[generation.request_id] = submitted_at
        self._generations[generation.request_id] = (line, generation)
        generation.add_done_callback(self._see_end)

    def _see_end(self, generation: Any) -> None:
        """Record that a request has ended. Wake `follow` if all submitted requests have ended."""
        self._recorder.see_end(generation)
        if next(self._num_ends) == len(self._generations):
            self._all_ended.set()

    def _take_news(self) -> None:
        """Show the events since the last call, in the order in which they happened."""
        self._progress.batch_size = (self._recorder.batch_sizes or [0])[-1]
        self._progress.kv_use = self._recorder.kv_use
        queue = self._recorder.news
        for news in sorted((queue.popleft() for _ in range(len(queue))), key=attrgetter("when")):
            if isinstance(news, Refusal):
                self._answer(news.line, news.error, news.when)
                continue
            line, generation = self._generations[news.request_id]
            if news.tokens is None:
                self._answer(line, generation.exception() or generation.result(), news.when)
            elif not news.tokens:
                row = self._rows[line.number] = self._row(line)
                self._view.join(row, self._progress, news.when)
            elif line.number in self._rows:
                self._rows[line.number].add(news.tokens)
                self._progress.output_tokens += len(news.tokens)

    def _answer(self, line: RequestLine, outcome: Any, when: float) -> None:
        result = self._results.add(line, outcome)
        row = self._rows.pop(line.number, None) or self._row(line)
        output_ids = result.get("output_ids", ())
        self._progress.done += 1
        self._progress.output_tokens += len(output_ids) - row.num_tokens
        row.num_tokens = len(output_ids)
        failed = "error" in result
        why = "ERROR" if failed else result["finish_reason"]
        text = result["error"] if failed else result.get("text", _words(output_ids))
        self._view.leave(row, why, text, self._progress, when, failed=failed)

    def _row(self, line: RequestLine) -> RunningRow:
        name = "?" if line.request_id is None else str(line.request_id)
        ids = [] if line.request is None else line.request.input_ids.tolist()
        if self._tokenizer is None:
            return RunningRow(name, _words(ids), _words)
        prompt = self._tokenizer.decode(ids) if line.prompt is None else line.prompt
        return RunningRow(name, prompt, TextStream(self._tokenizer, ids).push)


def _words(tokens: Sequence[int]) -> str:
    return "".join(f" {token}" for token in tokens)
