"""Runs one scenario through the real token loop with a user's scheduler.

The loop, its allocation and its block accounting are the real ones; only the model is scripted.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from gptmanager.assembly.blueprint import build_loop, custom_scheduler
from gptmanager.config import FinishReason
from gptmanager.errors import CapacityError, SchedulerError, response_text
from gptmanager.manager.inspection import audit
from gptmanager.peft_cache.work import AdapterWork
from gptmanager.request.post_processor import RequestProcessor
from gptmanager.statistics import Counts, PhaseTimes
from gptmanager.step import Failure, Intake
from gptmanager.testing.contract import ContractChecker, ContractViolation
from gptmanager.testing.hosts import RecordingCallbacks
from gptmanager.testing.rules import Breach, Complaint, Decision, JudgedScheduler
from gptmanager.testing.scenarios import PlannedRequest, Scenario, next_token
from gptmanager.testing.scripted_executor import ScriptedExecutor

CreateScheduler = Callable[..., Any]

MAX_IDLE = 8  # iterations in a row in which no request runs and nothing is in flight
# The limit for the iterations from the acceptance of a request to its end is PATIENCE times
# `Scenario.most_iterations`, plus 4 * MAX_IDLE.
PATIENCE = 4


@dataclass(slots=True)
class Outcome:
    """The result of a scenario.

    `complaints` holds the broken rules, and `decisions` the answers of the scheduler, each with the
    number of its iteration. `chunks` counts the context chunks that were not the last of their
    context.
    """

    complaints: list[tuple[int, Complaint]] = field(default_factory=list)
    decisions: list[tuple[int, Decision]] = field(default_factory=list)
    iterations: int = 0
    pauses: int = 0
    chunks: int = 0
    reused_tokens: int = 0


def run_scenario(
    create_scheduler: CreateScheduler, scenario: Scenario, *, may_pause: bool = True
) -> Outcome:
    """Run a scenario to its end, or until a broken rule prevents it from continuing.

    An exception of `create_scheduler` is passed on to the caller.
    """
    run = _Run(create_scheduler, scenario, may_pause)
    outcome = Outcome(decisions=run.judged.decisions)
    try:
        while not run.is_done():
            run.iterate()
        run.check_end()
    except Breach as breach:
        outcome.complaints.append((run.host.now, breach.args))
    outcome.complaints += run.judged.minor
    outcome.iterations = run.host.now + 1  # it counts from 0
    schedules = run.executor.schedules
    outcome.pauses = sum(len(schedule.paused) for schedule in schedules)
    outcome.chunks = sum(not row.samples for s in schedules for row in s.context_rows)
    outcome.reused_tokens = run.loop.allocator.kv_cache.reuse_counts.reused_tokens
    return outcome


class _ScenarioHost:
    """The host of a scenario.

    `now` is the number of the current iteration. `accepted` maps the id of each fetched request to
    the iteration of its fetch.
    """

    def __init__(self, requests: tuple[PlannedRequest, ...]) -> None:
        self.now = -1
        self.accepted: dict[int, int] = {}
        self.callbacks = RecordingCallbacks()
        self.checker = ContractChecker(
            self.callbacks.get_inference_requests, self.callbacks.send_response
        )
        self.respond = self.checker.send_response
        self._coming = sorted(requests, key=lambda r: (r.arrives, r.request_id))[::-1]
        self._stopping = [r for r in requests if r.stopped is not None]
        self._num_requests = len(requests)
        self._stops: set[int] = set()

    @property
    def has_more(self) -> bool:
        return len(self.accepted) < self._num_requests

    def fetch(self, room: int | None, num_active: int) -> Intake:
        self.now += 1
        while self._coming and self._coming[-1].arrives <= self.now:
            self.callbacks.submit(self._coming.pop().inference_request())
        for request in self._stopping:
            if request.stopped == self.now:
                self.callbacks.stop(request.request_id)
        taken = list(self.checker.get_inference_requests(-1 if room is None else room))
        self.accepted.update((request.request_id, self.now) for request in taken)
        stops, self._stops = self._stops, set()
        return Intake(float(self.now), tuple(taken), frozenset(stops))

    def prepare(self, request_id: int, processor: RequestProcessor) -> None:
        """Do nothing: no planned request has a logits post-processor."""

    def load(self, work: AdapterWork) -> None:
        """Do nothing: no planned request has an adapter."""

    def fail(self, failure: Failure) -> None:
        """Do nothing: neither a step nor a preparation of a scenario fails."""

    def poll(self) -> None:
        self._stops = self.callbacks.poll_stop_signal()

    def report(self, counts: Counts, phase_times: PhaseTimes) -> None:
        """Do nothing: a scenario needs no statistics."""


class _Run:
    """A running loop, checked after each iteration."""

    def __init__(
        self, create_scheduler: CreateScheduler, scenario: Scenario, may_pause: bool
    ) -> None:
        blueprint = scenario.blueprint(functools.partial(custom_scheduler, create_scheduler))
        self.scenario = scenario
        self.host = _ScenarioHost(scenario.requests)
        self.executor = ScriptedExecutor(next_token, scenario.tokens_per_block)
        self.loop = build_loop(
            blueprint, self.host, self.executor, phase_times=PhaseTimes(lambda: 0)
        )
        kv_cache, now = self.loop.allocator.kv_cache, lambda: self.host.now
        self.judged = JudgedScheduler(self.loop.scheduler, blueprint, kv_cache, may_pause, now)
        self.loop.scheduler = self.judged
        self._patience = PATIENCE * scenario.most_iterations + 4 * MAX_IDLE
        self._idle = 0

    def is_done(self) -> bool:
        return not (self.host.has_more or self.loop.active or self.loop.pending)

    def iterate(self) -> None:
        was_pending, launched = self.loop.pending, len(self.executor.schedules)
        try:
            self.loop.iterate()
        except SchedulerError as error:
            raise _breach(error) from error
        except Exception as error:
            text = f"the loop ended with {response_text(error)}"
            raise Breach("accepted", None, text) from error
        report = audit(self.loop)
        if not report.ok:
            raise Breach("accounts", None, "; ".join(report.problems))
        for schedule in self.executor.schedules[launched:]:
            num_tokens = schedule.num_context_tokens + len(schedule.generation_rows)
            if num_tokens > self.scenario.max_num_tokens:
                text = f"{num_tokens} tokens ran, max_num_tokens = {self.scenario.max_num_tokens}"
                raise Breach("token-budget", None, text)
        is_idle = not was_pending and launched == len(self.executor.schedules)
        self._idle = self._idle + 1 if is_idle and self.loop.active else 0
        if self._idle >= MAX_IDLE:
            self._complain_of_idleness()
        self._check_patience()

    def check_end(self) -> None:
        """Check, after all requests have ended, that all blocks are free and outputs are right."""
        try:
            self.host.checker.check()
        except ContractViolation as violation:
            raise Breach("one-final", None, str(violation)) from violation
        kv_cache = self.loop.allocator.kv_cache
        free, total = kv_cache.get_num_free_blocks(), kv_cache.get_max_resource_count()
        if free != total:
            raise Breach("accounts", None, f"{free} of {total} blocks are free at the end")
        for request in self.scenario.requests:
            self._check_output(request)

    def _check_output(self, request: PlannedRequest) -> None:
        request_id = request.request_id
        final = self.host.callbacks.final(request_id, timeout=0)
        if final.error:
            raise Breach("one-final", request_id, f"its final response is the error: {final.error}")
        output = self.host.callbacks.output(request_id)
        generated = output if request.is_streaming else output[len(request.prompt) :]
        expected = request.output()
        if int(final.tensors["finish_reasons"]) == FinishReason.CANCELLED:
            # The output of a stopped request may include tokens that an end_id or a stop word
            # would have cut off later.
            uncut = replace(request, end_id=None, stop_word=())
            expected = uncut.output()[: len(generated)]
        if generated != expected:
            raise Breach(
                "same-tokens",
                request_id,
                f"it generated {generated}, but generates {expected} when it runs alone",
            )

    def _complain_of_idleness(self) -> None:
        kv_cache = self.loop.allocator.kv_cache
        kv_cache.start_scheduling()
        free = kv_cache.get_num_free_blocks()
        needs = [(kv_cache.get_needed_blocks_one_step(r), r) for r in self.loop.active]
        could = [(need, request) for need, request in needs if need <= free]
        need, request = (could or needs)[0]
        text = (
            f"nothing is in flight and no request has run for {self._idle} iterations: {request!r} "
            f"needs {need} blocks, {free} of {kv_cache.get_max_resource_count()} are free"
        )
        if not could:
            holders = [r.request_id for r in self.loop.active if r.request_id in kv_cache]
            text += f"; no request can run while requests {holders} keep their blocks"
        raise Breach("progress", request.request_id, text)

    def _check_patience(self) -> None:
        for request_id, request in self.loop.table.by_id.items():
            waited = self.host.now - self.host.accepted[request_id]
            if waited > self._patience:
                text = (
                    f"{request!r} was accepted {waited} iterations ago, paused "
                    f"{request.pause_count} times since; all requests take "
                    f"{self.scenario.most_iterations} if they run one after the other"
                )
                raise Breach("no-starvation", request_id, text)


def _breach(error: SchedulerError) -> Breach:
    """Return the Breach for an answer that the loop refused with `error`."""
    if isinstance(error.__cause__, Breach):
        return error.__cause__
    named = re.search(r"request (\d+)", str(error))
    request_id = int(named[1]) if named else None
    rule = "memory" if isinstance(error.__cause__, CapacityError) else "accepted"
    return Breach(rule, request_id, str(error.__cause__ or error))
