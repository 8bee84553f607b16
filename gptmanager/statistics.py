"""The statistics record of one iteration, a JSON string that is passed to ReturnBatchManagerStats.

The top-level keys are those of TensorRT-LLM; some depend on the batching scheme. This library's own
keys are under "gptmanager". The JSON Schema next to this file (`statistics.schema.json`) describes
both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar, cast

import orjson

from gptmanager.kv_cache import ReuseCounts
from gptmanager.lifecycle.clock import local_time, system_time
from gptmanager.lifecycle.watchdog import CallbackTimer
from gptmanager.peft_cache import PeftCacheCounts

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Memory:
    """The manager's tensors in bytes, by kind of memory.

    `adapter_page`: bytes of a page of the LoRA cache. `gpu` includes all of the GPU's LoRA pages.
    Pages in host memory count only when they are used: `with_adapters` adds the used pages.
    """

    cpu: int = 0
    gpu: int = 0
    pinned: int = 0
    adapter_page: int = 0

    def with_adapters(self, pages: PeftCacheCounts) -> Memory:
        """Return the memory when adapters use `pages`."""
        on_host = pages.host_used_pages * self.adapter_page
        if self.gpu:  # `gpu` includes all pages of the device
            return replace(self, pinned=self.pinned + on_host)
        on_device = pages.device_used_pages * self.adapter_page
        return replace(self, cpu=self.cpu + on_host + on_device)


class DraftCounts(NamedTuple):
    """The numbers of drafted and of accepted tokens since the manager started."""

    drafted: int = 0
    accepted: int = 0

    def plus(self, drafted: int, accepted: int) -> DraftCounts:
        """Return the counts after `drafted` and `accepted` more tokens."""
        return DraftCounts(self.drafted + drafted, self.accepted + accepted)


@dataclass(frozen=True, slots=True)
class Counts:
    """The counts of one iteration.

    `active`, `context`, `generation` and `paused`: numbers of requests. `sampled`: number of rows
    of logits for which a token was sampled. `recomputed_tokens`: number of those `context_tokens`
    that belong to requests that had been paused. `logits_errors`: number of requests that a
    LogitsError has ended since the manager started. Some numbers in `block_reuse`, `drafts` and
    `adapters` also count since the start.
    """

    iteration: int
    active: int
    max_active: int
    context: int
    generation: int
    context_tokens: int
    sampled: int
    paused: int
    micro_batch_id: int
    free_blocks: int
    total_blocks: int
    tokens_per_block: int
    block_reuse: ReuseCounts = ReuseCounts()
    drafts: DraftCounts = DraftCounts()
    logits_errors: int = 0
    recomputed_tokens: int = 0
    adapters: PeftCacheCounts = PeftCacheCounts()
    weights_version: int = 0


@functools.lru_cache(maxsize=1)
def _timestamp(second: int) -> str:
    """Return a system time in seconds as local time, for the key "Timestamp".

    The text is cached, because many iterations end in the same second.
    """
    return local_time("%m-%d-%Y %H:%M:%S", second)


class StatisticsReport:
    """Creates the records of one manager.

    `timers`: the timers of all calls into the host's code.
    """

    def __init__(self, timers: Sequence[CallbackTimer]) -> None:
        self._timers = timers
        self._last_counts: Counts | None = None
        self._memory = Memory()
        self._is_lock_step = False
        self._num_slots = 0  # number of requests with which the V1 batch started
        self._take_gil_wait_us: Callable[[], int] = int

    def attach(
        self, memory: Memory, is_lock_step: bool, take_gil_wait_us: Callable[[], int]
    ) -> None:
        """Connect an executor.

        `is_lock_step`: whether the executor runs V1 batches. `take_gil_wait_us`: returns the time,
        in microseconds, for which steps have waited for the GIL or for a core since the last call
        of `take_gil_wait_us`.
        """
        self._memory = memory
        self._is_lock_step = is_lock_step
        self._take_gil_wait_us = take_gil_wait_us

    def release(self) -> None:
        """Drop the reference to the executor."""
        self._take_gil_wait_us = int

    def note(self, counts: Counts) -> None:
        """Keep the counts of an iteration that ends, for `so_far` and for V1's slots."""
        self._last_counts = counts
        if counts.context:  # all contexts of a V1 batch run in its first step
            self._num_slots = counts.context + counts.generation

    def record(self, counts: Counts, phase_times: PhaseTimes) -> str:
        """Return the record of an iteration that ends, as JSON."""
        return self._record(counts, phase_times.microseconds(), self._take_gil_wait_us())

    def so_far(self) -> str:
        """Return the last iteration's record, with the callbacks' times until now.

        The iteration's own times are missing. Before the first iteration has ended, return a
        sentence that says so. Any thread may call this method.
        """
        counts = self._last_counts
        return "no step has ended yet" if counts is None else self._record(counts, {}, 0)

    def _record(self, counts: Counts, latency_us: dict[str, int], gil_wait_us: int) -> str:
        scheduled = counts.context + counts.generation
        memory = self._memory.with_adapters(counts.adapters)
        return orjson.dumps(
            {
                "Timestamp": _timestamp(int(system_time())),
                "Iteration Counter": counts.iteration,
                "Active Request Count": counts.active,
                "Max Request Count": counts.max_active,
                "Runtime CPU Memory Usage": memory.cpu,
                "Runtime GPU Memory Usage": memory.gpu,
                "Runtime Pinned Memory Usage": memory.pinned,
                "Max KV cache blocks": counts.total_blocks,
                "Free KV cache blocks": counts.free_blocks,
                "Used KV cache blocks": counts.total_blocks - counts.free_blocks,
                "Tokens per KV cache block": counts.tokens_per_block,
                "Scheduled Requests": scheduled,
                "Context Requests": counts.context,
                "Total Context Tokens": counts.context_tokens,
                **self._scheme_keys(counts),
                "Paused Requests": counts.paused,
                "Waiting Requests": counts.active - scheduled,
                "gptmanager": {
                    "schema_version": SCHEMA_VERSION,
                    "block_reuse": counts.block_reuse._asdict(),
                    "adapters": counts.adapters._asdict(),
                    "draft_tokens": counts.drafts._asdict(),
                    "logits_errors": counts.logits_errors,
                    "recomputed_tokens": counts.recomputed_tokens,
                    "weights_version": counts.weights_version,
                    "iteration_latency_us": latency_us,
                    "gil_wait_us": gil_wait_us,
                    "callback_us": {timer.name: timer.total_ns // 1000 for timer in self._timers},
                    "callback_errors": {timer.name: timer.errors for timer in self._timers},
                },
            }
        ).decode()

    def _scheme_keys(self, counts: Counts) -> dict[str, int]:
        """Return the keys that only one batching scheme has."""
        if not self._is_lock_step:
            return {
                "Generation Requests": counts.generation,
                "MicroBatch ID": counts.micro_batch_id,
            }
        # A V1 batch keeps its initial slots: when a request ends, its slot stays empty until all
        # requests have ended. Over all steps of a batch, the tokens and the empty slots add up to
        # the batch size times the number of steps.
        return {
            "Total Generation Tokens": counts.sampled,
            "Empty Generation Slots": self._num_slots - counts.context - counts.generation,
        }


class PhaseTimes:
    """The time of an iteration by phase.

    `clock_ns`: the clock, in nanoseconds; in a replay it returns 0.
    """

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self.clock_ns = clock_ns
        self.nanoseconds: dict[str, int] = {}
        self._started = clock_ns()

    def restart(self) -> None:
        """Start the times of another iteration."""
        self.nanoseconds.clear()
        self._started = self.clock_ns()

    def microseconds(self) -> dict[str, int]:
        """Return phase -> microseconds, and "total", the time since `restart`."""
        total = self.clock_ns() - self._started
        split = {name: taken // 1000 for name, taken in self.nanoseconds.items()}
        split["total"] = total // 1000
        return split


_Method = TypeVar("_Method", bound=Callable[..., Any])


def timed_phase(method: _Method) -> _Method:
    """Count the time of a method in its object's `phase_times`, under the method's name."""
    name = method.__name__

    @functools.wraps(method)
    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        phase_times: PhaseTimes = self.phase_times
        started = phase_times.clock_ns()
        try:
            return method(self, *args, **kwargs)
        finally:
            taken = phase_times.clock_ns() - started
            phase_times.nanoseconds[name] = phase_times.nanoseconds.get(name, 0) + taken

    return cast(_Method, timed)
