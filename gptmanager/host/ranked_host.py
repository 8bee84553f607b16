"""`LeadingHost` and `FollowingHost`: the host of a loop with a model on several ranks.

Rank 0 leads: it sends its intake to all ranks, one message per iteration. The other ranks follow:
they iterate when rank 0 does, with the same intake, and report an error if they decide differently.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NoReturn

import orjson

from gptmanager.assembly.assemble import Assembly
from gptmanager.assembly.ranks import Ranks
from gptmanager.errors import RankError, response_text
from gptmanager.executor.rank_executor import RankExecutor
from gptmanager.host.broadcast import Broadcast
from gptmanager.host.callback_host import CallbackHost, Fetched
from gptmanager.host.loop_host import LoopHost, Turn
from gptmanager.host.rank_answers import Answers, answers_difference, answers_of
from gptmanager.host.rank_messages import (
    IntakeMessage,
    Unpacker,
    pack,
    requests_digest,
    schedule_digest,
    stops_digest,
)
from gptmanager.lifecycle.clock import Patience
from gptmanager.lifecycle.latch import Latch
from gptmanager.lifecycle.watchdog import CallbackTimer
from gptmanager.peft_cache.work import AdapterDone
from gptmanager.ranks.frames import Frame
from gptmanager.ranks.links import Message
from gptmanager.recorder.difference import difference
from gptmanager.recorder.values import to_json
from gptmanager.request.inference_request import InferenceRequest
from gptmanager.request.post_processor import RequestProcessor
from gptmanager.step import Intake, Schedule

_KEPT = 4  # schedules and answers of rank 0: the other ranks lag by at most 4 iterations
_CLOSE_S = 0.5  # how long to wait for a forward pass that hangs
_DIGEST = struct.Struct("<q")
_LAST_MESSAGES = {Turn.END: Message.END, Turn.ABORT: Message.ABORT}
_POLL_S = 0.002  # interval of checking this rank's own threads for results


class LeadingHost:
    """The host of rank 0. It calls the callbacks of `host`, and sends each intake to all ranks."""

    def __init__(self, host: CallbackHost, assembly: Assembly, ranks: Ranks) -> None:
        self._host, self._ranks, self._links = host, ranks, ranks.links
        self._executor = _rank_executor(assembly, self._decide)
        self._schedules: deque[Schedule] = deque(maxlen=_KEPT)
        self._num_iterations = 0
        # (iteration, answers), only for iterations with answers
        self._answers: deque[tuple[int, Answers]] = deque(maxlen=_KEPT)
        self.respond, self.prepare, self.load = host.respond, host.prepare, host.load
        self.fail, self.poll, self.report = host.fail, host.poll, host.report
        self.pause_s = host.pause_s
        self._links.explain_difference(self._difference)

    def await_turn(self, *, ends: bool, aborts: bool, is_active: Callable[[], bool]) -> Turn:
        turn = self._host.await_turn(ends=ends, aborts=aborts, is_active=is_active)
        if turn in _LAST_MESSAGES:
            self._links.send(_LAST_MESSAGES[turn])
        return turn

    def peek(self, room: int | None) -> bool:
        self._links.check()
        if not self._host.holds_requests:
            self._announce_get(room)
        return self._host.peek(room)

    def fetch(self, room: int | None, num_active: int) -> Intake:
        host = self._host
        self._links.check()
        if host.begin_fetch(room, num_active):
            self._announce_get(room)
            host.ask(room)
        intake = host.take_intake()
        message = IntakeMessage(intake, 0, 0, host.last_fetch.is_empty)
        if not (
            host.is_broadcast or intake.resumed
        ):  # each rank calls its own callbacks, and gets digests to compare
            own = requests_digest(intake.requests), stops_digest(intake.stops)
            bare = _with_answers(intake, (), frozenset())
            self._num_iterations += 1
            if intake.requests or intake.stops:
                answers = answers_of(intake.requests, intake.stops)
                self._answers.append((self._num_iterations, answers))
            message = message._replace(intake=bare, requests=own[0], stops=own[1])
        self._links.send(Message.INTAKE, pack(message))
        return intake

    def stop(self, error: BaseException) -> None:
        self._host.stop(error)
        self._ranks.fail(error)

    def release(self) -> None:
        _release(self._host, self._executor, self._ranks)
        del self._executor

    def _announce_get(self, room: int | None) -> None:
        if not self._host.is_broadcast:
            self._links.send(Message.ASK, orjson.dumps(room))

    def _decide(self, schedule: Schedule) -> None:
        self._schedules.append(schedule)
        self._links.send(Message.DECISION, _DIGEST.pack(schedule_digest(schedule)))

    def _difference(self, rank: int, data: Any) -> str:
        """Describe how `rank` decided differently from this rank, or got other answers.

        Any thread may call this.
        """
        if "answers" in data:
            answers = dict([*self._answers]).get(data["iteration"], Answers([], []))
            return answers_difference(answers, data["answers"])
        kept = list(self._schedules)  # copied: the loop's thread may append
        own = next((it for it in kept if it.iteration == data["iteration"]), None)
        if own is None:
            return "rank 0 did not run a step in this iteration"
        found = difference(orjson.loads(to_json(own)), data, "schedule")
        if found is None:
            return "it has the same schedule"
        where, here, there = found
        return f"{where} is {there!r}, on rank 0 {here!r}"


class FollowingHost:
    """The host of a rank other than 0, which iterates when rank 0 does, with rank 0's intakes.

    `host` has the callbacks of this rank. `bells` are functions that wake the loop. `timer`
    times iterations; it is stopped while this rank waits for rank 0.
    """

    def __init__(
        self,
        host: CallbackHost,
        assembly: Assembly,
        ranks: Ranks,
        bells: list[Callable[[], None]],
        timer: CallbackTimer,
    ) -> None:
        config = assembly.blueprint.params.parallel_config
        assert config is not None
        self._host, self._ranks, self._links = host, ranks, ranks.links
        self._executor = _rank_executor(assembly, self._decide)
        self._bells, self._timer = bells, timer
        self._unpack = Unpacker()
        self._message: IntakeMessage | None = None
        self._end: Turn | None = None
        self._is_woken = self._is_rung = False
        self._own_ready: set[int] = set()
        self._own_failures: dict[int, str] = {}  # error texts of failed post-processors, by request
        self._own_jobs: dict[int, AdapterDone] = {}
        self._num_iterations = 0
        # post-processors run only on the last pipeline stage
        has_logits = ranks.collectives.layout.is_last_stage
        self._calls_processors = has_logits and config.replicate_logits_post_processors
        if not config.respond_on_all_ranks:
            host.mute()
        host.last_fetch = Fetched(0, is_empty=True, failed=False)
        self.respond, self.load = host.respond, host.load
        self.fail, self.report = host.fail, host.report
        bells.append(self._ring)

    def _ring(self) -> None:
        self._is_rung = True  # a `receive` with `may_be_woken` False loses the wake-up below
        self._links.wake()

    def await_turn(self, *, ends: bool, aborts: bool, is_active: Callable[[], bool]) -> Turn:
        """Wait until rank 0 iterates (`peek` is then true), is paused, or ends.

        A pause ends the wait every 0.1 s, so that this rank can answer its host. Without active
        requests, a bell ends the wait as well. A rank ends when rank 0 does, so `ends` has no
        effect. If this rank aborts earlier, all ranks fail.
        """
        if aborts:
            raise RankError(f"rank {self._links.rank} was shut down")
        self._links.check()
        is_woken, self._is_woken = self._is_woken, False
        self._timer.stop()
        while not (self._message or self._end or is_woken):
            frame, waits = None, is_active()  # a call may have finished the last request
            if waits or not self._is_rung:
                frame = self._links.receive(may_be_woken=not waits)
            if frame is None:
                # the ringing thread waits for an iteration that begins after the bell
                self._is_rung, self._is_woken = False, True
                break
            if frame.kind == Message.PAUSED:
                return Turn.PAUSE
            self._handle(frame, is_active)
        self._timer.start()
        if self._end is not None:
            self._host.is_accepting = False
        return self._end or Turn.ITERATE

    def _handle(self, frame: Frame, is_active: Callable[[], bool]) -> None:
        """Handle a message from rank 0 that arrived between two iterations."""
        if frame.kind == Message.ASK:
            self._check_alone()
            self._host.ask(orjson.loads(frame.payload))
        elif frame.kind == Message.INTAKE:
            self._message = self._unpack(frame.payload)
        elif frame.kind == Message.ABORT:
            self._end = Turn.ABORT
        elif frame.kind == Message.END:
            self._check_alone()
            if is_active():
                self._links.give_up("rank 0 has answered all requests, but this rank has not")
            self._end = Turn.END
        elif frame.kind == Message.CALL:
            self._links.on_call(frame.payload.decode())
        elif frame.kind == Message.DECISION:
            self._links.give_up("rank 0 runs a step, but this rank does not")
        else:
            self._links.give_up(f"rank 0 sent message {frame.kind} between two iterations")

    def pause_s(self, idle_poll_s: float | None, *, is_active: bool) -> float | None:
        return 0.0  # `await_turn` waits

    def peek(self, room: int | None) -> bool:
        return self._message is not None

    def fetch(self, room: int | None, num_active: int) -> Intake:
        message, self._message = self._message, None
        assert message is not None  # set by `await_turn`
        host, intake = self._host, message.intake
        if host.is_broadcast or intake.resumed:
            for request in intake.requests:
                host.receiver.owed.owe(request.request_id)
        else:
            intake = self._with_own_answers(message)
        self._await_own(intake)
        host.failures.clear()  # rank 0's intake contains the failures of all ranks
        host.last_fetch = Fetched(len(intake.requests), is_empty=message.is_empty, failed=False)
        return intake

    def prepare(self, request_id: int, processor: RequestProcessor) -> None:
        # both may be left from an earlier request with this id
        self._own_ready.discard(request_id)
        self._own_failures.pop(request_id, None)
        if self._calls_processors:
            self._host.prepare(request_id, processor)

    def poll(self) -> None:
        if not self._host.is_broadcast:
            self._host.poll()

    def stop(self, error: BaseException) -> None:
        self._host.stop(error)
        self._ranks.fail(error)

    def release(self) -> None:
        self._bells.clear()
        _release(self._host, self._executor, self._ranks)
        del self._executor

    # Comparison with rank 0 ------------------------------------------------------------------

    def _decide(self, schedule: Schedule) -> None:
        frame = self._links.receive()
        if frame != (Message.DECISION, _DIGEST.pack(schedule_digest(schedule))):
            text = f"decided differently in iteration {schedule.iteration}"
            self._links.report_difference(text, to_json(schedule))

    def _check_alone(self) -> None:
        """Fail if Get has returned requests on this rank: on rank 0 Get has returned none."""
        if self._host.receiver.received:
            self._report_answers(self._host.receiver.received, (), 0)

    def _with_own_answers(self, message: IntakeMessage) -> Intake:
        requests, stops = self._host.take_answers()
        self._num_iterations += 1
        if (requests_digest(requests), stops_digest(stops)) != (message.requests, message.stops):
            self._report_answers(requests, stops, self._num_iterations)
        return _with_answers(message.intake, requests, stops)

    def _report_answers(
        self, requests: Iterable[InferenceRequest], stops: Iterable[int], iteration: int
    ) -> NoReturn:
        """Fail because the answers differ from rank 0's in `iteration`.

        An `iteration` of 0 means between two iterations, where rank 0 got no requests.
        """
        plain = {"iteration": iteration, "answers": answers_of(requests, stops)}
        self._links.report_difference("differs from rank 0", to_json(plain))

    def _await_own(self, intake: Intake) -> None:
        """Wait until adapters and processors that are ready on rank 0 are ready on this rank."""
        jobs = {done.job for done in intake.adapters if done.error is None}
        ready = set(intake.ready) if self._calls_processors else set()
        for request in intake.requests:
            if request.request_id in ready and self._host.receiver.is_alone(request):
                # on rank 0 it was ready on arrival
                processor = RequestProcessor(request.logits_post_processor)
                self.prepare(request.request_id, processor)
        preparation, patience = self._host.preparation, Patience(self._links.timeout_s)
        while True:
            while self._host.adapter_loader.done:
                done = self._host.adapter_loader.done.popleft()
                self._own_jobs[done.job] = done
            preparation.collect(())
            self._own_ready.update(preparation.ready)
            for failure in preparation.failures:
                self._own_failures[failure.request_id] = response_text(failure.error)
            preparation.ready, preparation.failures = [], []
            if jobs <= self._own_jobs.keys() and ready <= self._own_ready:
                break
            for request_id in sorted(ready & self._own_failures.keys()):
                self._links.give_up(f"request {request_id}: {self._own_failures[request_id]}")
            self._links.check()
            if patience.is_over():
                self._links.give_up(
                    f"not ready {self._links.timeout_s:g} s after rank 0 was ready: adapter "
                    f"jobs {sorted(jobs - self._own_jobs.keys())}, post-processors of "
                    f"requests {sorted(ready - self._own_ready)}"
                )
            Latch().wait(_POLL_S)
        self._own_ready -= ready
        for done in intake.adapters:
            own = self._own_jobs.pop(done.job, None)
            if own is not None and done.error is None and own != done:
                why = f"the digest {own.digest!r}, not {done.digest!r}"
                if own.error is not None:
                    why = f"the error {response_text(own.error)}, but none on rank 0"
                self._links.give_up(f"adapter job {done.job} has {why}")


def _rank_executor(assembly: Assembly, on_decision: Callable[[Schedule], None]) -> RankExecutor:
    executor = assembly.executor
    assert isinstance(executor, RankExecutor)
    executor.on_decision = on_decision
    return executor


def _release(host: CallbackHost, executor: RankExecutor, ranks: Ranks) -> None:
    host.release()
    executor.close(_CLOSE_S)
    executor.on_decision = lambda schedule: None
    ranks.close()


def _with_answers(
    intake: Intake, requests: tuple[InferenceRequest, ...], stops: frozenset[int]
) -> Intake:
    return replace(intake, requests=requests, stops=stops)


def callback_properties(get: Any, poll: Any) -> dict[str, bool]:
    """Return the properties of callbacks that must be equal on all ranks, as name -> value."""
    is_broadcast = isinstance(get, Broadcast)
    own = {} if is_broadcast else {"poll_stop_signal_cb is given": poll is not None}
    return {**own, "callbacks.broadcast is used": is_broadcast}


def loop_host(
    host: CallbackHost, assembly: Assembly, bells: list[Callable[[], None]], timer: CallbackTimer
) -> LoopHost:
    """Return the host of the loop on `assembly`: `host` itself, or the host of a rank.

    `FollowingHost` explains `bells` and `timer`.
    """
    ranks = assembly.ranks
    if ranks is None:
        return host
    if ranks.collectives.layout.rank == 0:
        return LeadingHost(host, assembly, ranks)
    return FollowingHost(host, assembly, ranks, bells, timer)
