"""Runs a load through a manager as a host would, and times it from outside."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from gptmanager.bench.adapter_load import AdapterLoad
from gptmanager.bench.load import Request, Source
from gptmanager.callbacks import RequestQueue, broadcast
from gptmanager.callbacks.queue.generation import Generation
from gptmanager.callbacks.queue.result import GenerationResult
from gptmanager.commands.latencies import FetchTimes, latencies
from gptmanager.config import ModelType, OptionalParams, SchedulerConfig
from gptmanager.errors import CapacityError, ConfigError, RequestError
from gptmanager.manager.gpt_manager import GptManager
from gptmanager.request.inference_request import SendResponseCallback

WARM_UP = [0] * 16  # the prompt of the requests that run before anything is timed


@dataclass(frozen=True, slots=True)
class Figures:
    """The result of one run of one engine.

    `seconds`: from the first submit to the last result. `outputs`: the generated token ids of each
    request. `latencies`: fields for the report, empty for an engine that does not measure them.
    """

    seconds: float
    outputs: tuple[tuple[int, ...], ...]
    latencies: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """The output tokens per second."""
        return sum(map(len, self.outputs)) / self.seconds


class IterationLog:
    """A ReturnBatchManagerStats callback that keeps each record and the time of the call."""

    def __init__(self) -> None:
        self._records: list[tuple[float, str]] = []

    def __call__(self, record: str) -> None:
        self._records.append((time.perf_counter(), record))

    def __len__(self) -> int:
        return len(self._records)

    def restart(self) -> None:
        """Delete all records."""
        self._records = []

    def last(self) -> Mapping[str, Any] | None:
        """Return the statistics record of the latest iteration, if there is one."""
        found: Mapping[str, Any] | None = (
            orjson.loads(self._records[-1][1]) if self._records else None
        )
        return found

    def since(self, start: int = 0) -> list[tuple[float, Mapping[str, Any]]]:
        """Return pairs (time of the call in seconds, statistics record), from record `start` on."""
        return [(at, orjson.loads(record)) for at, record in self._records[start:]]

    def step_seconds(self, batch_size: int, start: int = 0) -> list[float]:
        """Return the times between successive iterations of `batch_size` sequences in generation.

        Iterations that also have a sequence in its context phase do not count.
        """
        plain = [
            (at, record["Generation Requests"] == batch_size and not record["Context Requests"])
            for at, record in self.since(start)
        ]
        return [
            now - before
            for (before, was_plain), (now, is_plain) in zip(plain, plain[1:], strict=False)
            if was_plain and is_plain
        ]

    def counts(self) -> dict[str, Any]:
        """Return the counts over all iterations, for a report."""
        records = [record for _, record in self.since()]
        sizes = [record["Scheduled Requests"] for record in records]
        return {
            "iterations": len(records),
            "mean_batch": round(statistics.fmean(sizes), 1) if sizes else 0.0,
            "pauses": sum(it["Paused Requests"] for it in records),
        }

    def host_milliseconds(self) -> float | None:
        """Return the loop thread's median time per iteration, except its waits for results."""
        times = [record["gptmanager"]["iteration_latency_us"] for _, record in self.since()]
        own = [split["total"] - split.get("result", 0) for split in times]
        return statistics.median(own) / 1e3 if own else None


class Session:
    """A manager with a queue in front of it, for one load after another.

    `log` receives every iteration's statistics; without a log, the manager computes none. `send`
    takes the queue and returns the SendResponse callback. This callback must call the queue's
    `send_response`.
    """

    def __init__(
        self,
        source: Source,
        params: OptionalParams,
        scheduler: SchedulerConfig | None = None,
        model_type: ModelType = ModelType.INFLIGHT_FUSED_BATCHING,
        *,
        log: IterationLog | None = None,
        send: Callable[[RequestQueue], SendResponseCallback] | None = None,
    ) -> None:
        self.queue = RequestQueue(max_pending=None)
        self._fetched_at = FetchTimes(self.queue.get_inference_requests)
        get: Any = self._fetched_at
        poll: Any = self.queue.poll_stop_signal
        if params.parallel_config is not None:
            get, poll = broadcast(get, poll)
        self._manager = GptManager(
            source,
            model_type,
            1,
            scheduler or SchedulerConfig(),
            get,
            self.queue.send_response if send is None else send(self.queue),
            poll,
            log,
            params,
        )
        self.queue.attach(self._manager)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            self._manager.__exit__(*error)
        finally:
            self.queue.close()

    def close(self) -> None:
        """Shut down without waiting for running requests."""
        try:
            self._manager.shutdown(drain=False)
        finally:
            self.queue.close()

    def warm_up(self, adapters: AdapterLoad | None = None) -> None:
        """Compile kernels, touch memory and load adapters before anything is timed."""
        self.queue.submit(WARM_UP, 2).result()
        for task, (weights, config) in enumerate([] if adapters is None else adapters.adapters):
            given: Any = {"lora_weights": weights, "lora_config": config}
            self.queue.submit(WARM_UP, 2, lora_task_id=task, **given).result()

    def start(
        self, requests: Sequence[Request], adapters: AdapterLoad | None = None, **options: Any
    ) -> list[Generation]:
        """Submit all requests at once, greedy and without an end id, with their adapters.

        Returns one `Generation` per request. `options`: further arguments of `RequestQueue.submit`.
        """
        tasks = [None] * len(requests) if adapters is None else adapters.tasks
        return [
            self.queue.submit(prompt, new_tokens, lora_task_id=task, **options)
            for (prompt, new_tokens), task in zip(requests, tasks, strict=True)
        ]

    def results(self, requests: Sequence[Request], **options: Any) -> list[GenerationResult]:
        """Submit all requests as `start` does, and wait for their results.

        Raises ConfigError if a request fails or ends before it has all its tokens.
        """
        try:
            results = [generation.result() for generation in self.start(requests, **options)]
            for result, (prompt, new_tokens) in zip(results, requests, strict=True):
                if len(result.generated_ids[0]) < new_tokens:
                    total = f"{len(prompt)} + {new_tokens}"
                    raise CapacityError(f"{total} tokens exceed max_seq_len")
        except RequestError as error:
            raise ConfigError(f"the load does not fit the model: {error}") from error
        return results

    def run(self, requests: Sequence[Request], **options: Any) -> Figures:
        """Run all requests, timed from the first submit to the last final response."""
        started = time.monotonic()
        results = self.results(requests, **options)
        seconds = time.monotonic() - started
        waits = [self._fetched_at.by_id[result.request_id] - started for result in results]
        return Figures(
            seconds,
            tuple(result.generated_ids[0] for result in results),
            latencies([result.metrics for result in results], waits),
        )


def run_manager(
    source: Source,
    requests: Sequence[Request],
    params: OptionalParams,
    scheduler: SchedulerConfig,
    model_type: ModelType = ModelType.INFLIGHT_FUSED_BATCHING,
    adapters: AdapterLoad | None = None,
) -> Figures:
    """Run all requests at once through a new manager, after a warm-up that is not timed.

    Raises ConfigError if the requests do not fit the model.
    """
    with Session(source, params, scheduler, model_type) as session:
        try:
            session.warm_up(adapters)
        except RequestError as error:
            raise ConfigError(f"the load does not fit the model: {error}") from error
        return session.run(requests, adapters=adapters)
