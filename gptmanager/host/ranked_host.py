"""`LeadingHost` and `FollowingHost`: the callbacks of a host whose model has several ranks.

Rank 0 leads: its intakes are everybody's, in one message an iteration. The others follow: they
iterate when it does, with what it has taken in, and say when they decided otherwise.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import orjson

from gptmanager.assembly.assemble import Assembly
from gptmanager.assembly.ranks import Ranks
from gptmanager.config import OptionalParams, ParallelConfig
from gptmanager.errors import RankError, response_text
from gptmanager.executor.rank_executor import RankExecutor
from gptmanager.host.broadcast import Broadcast
from gptmanager.host.callback_host import CallbackHost, Fetched
from gptmanager.host.preparation import Preparation
from gptmanager.host.rank_answers import Answers, answers_difference, answers_of
from gptmanager.host.rank_messages import (
    Turn,
    Unpacker,
    pack,
    requests_digest,
    schedule_digest,
    stops_digest,
)
from gptmanager.lifecycle.clock import monotonic
from gptmanager.lifecycle.latch import Latch
from gptmanager.peft_cache.work import AdapterDone
from gptmanager.ranks.layout import RankLayout
from gptmanager.ranks.links import Links, Message
from gptmanager.recorder.difference import difference
from gptmanager.recorder.values import to_json
from gptmanager.request.inference_request import InferenceRequest, NamedTensor
from gptmanager.request.post_processor import RequestProcessor
from gptmanager.statistics import Counts, PhaseTimes
from gptmanager.step import Failure, Intake, Schedule

_KEPT = 4  # schedules of rank 0: the others are not farther behind
_CLOSE_S = 0.5  # a forward that hangs is not waited for longer
_DIGEST = struct.Struct("<q")
_POLL_S = 0.002  # how often a wait for work of this rank's own threads looks up


class RankedHost(CallbackHost, ABC):
    """The part that the hosts of rank 0 and of the others share. `config`: of the ranks."""

    links: Links
    _ranks: Ranks

    def __init__(self, config: ParallelConfig, *callbacks: Any, **options: Any) -> None:
        super().__init__(*callbacks, **options)
        self._config = config
        self._broadcasts = isinstance(self._get, Broadcast)
        self._executor: RankExecutor | None = None

    def attach(self, assembly: Assembly) -> None:
        super().attach(assembly)
        assert assembly.ranks is not None
        self._ranks = assembly.ranks
        self.links = assembly.ranks.links
        assert isinstance(assembly.executor, RankExecutor)
        self._executor = assembly.executor
        self._executor.on_decision = self._decide

    def tell_failure(self, error: BaseException) -> None:
        if hasattr(self, "links"):  # else the others were told while it was assembled
            self._ranks.fail(error)

    def release(self) -> None:
        super().release()
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.close(_CLOSE_S)
            executor.on_decision = _forget
            self._ranks.close()

    @abstractmethod
    def _decide(self, schedule: Schedule) -> None:
        """A step is about to begin. RankError when the ranks differ in it."""


class LeadingHost(RankedHost):
    """Rank 0's."""

    def __init__(self, config: ParallelConfig, *callbacks: Any, **options: Any) -> None:
        super().__init__(config, *callbacks, **options)
        self._schedules: deque[Schedule] = deque(maxlen=_KEPT)
        self._num_turns = 0
        self._answers: deque[tuple[int, Answers]] = deque(maxlen=_KEPT)  # of turns that had any

    def attach(self, assembly: Assembly) -> None:
        super().attach(assembly)
        self.links.explain_difference(self._difference)

    def peek(self, room: int | None) -> bool:
        self.links.check()
        return super().peek(room)

    def fetch(self, room: int | None, num_active: int) -> Intake:
        self.links.check()
        intake = super().fetch(room, num_active)
        turn = Turn(intake, 0, 0, self.last_fetch.is_empty)
        if not self._broadcasts:  # each rank's own host answers, and only tells whether it differs
            own = requests_digest(intake.requests), stops_digest(intake.stops)
            bare = _without_answers(intake)
            self._num_turns += 1
            if intake.requests or intake.stops:
                self._answers.append((self._num_turns, answers_of(intake.requests, intake.stops)))
            turn = turn._replace(intake=bare, requests=own[0], stops=own[1])
        self.links.send(Message.INTAKE, pack(turn))
        return intake

    def end(self, *, aborts: bool) -> None:
        self.links.send(Message.ABORT if aborts else Message.END)

    def _ask(self, room: int | None) -> None:
        if not self._broadcasts:
            self.links.send(Message.ASK, orjson.dumps(room))
        super()._ask(room)

    def _decide(self, schedule: Schedule) -> None:
        self._schedules.append(schedule)
        self.links.send(Message.DECISION, _DIGEST.pack(schedule_digest(schedule)))

    def _difference(self, rank: int, data: Any) -> str:
        """Between what a rank has decided or was answered and what this one, for people. Of any
        thread.
        """
        if "turn" in data:
            answers = dict([*self._answers]).get(data["turn"], Answers([], []))
            return answers_difference(answers, data["answers"])
        kept = list(self._schedules)  # the loop's thread goes on
        own = next((it for it in kept if it.iteration == data["iteration"]), None)
        if own is None:
            return "rank 0 had no step"
        found = difference(orjson.loads(to_json(own)), data, "schedule")
        if found is None:
            return "it has the same schedule"
        where, here, there = found
        return f"{where} is {there!r}, on rank 0 {here!r}"


class FollowingHost(RankedHost):
    """Another rank's."""

    rests_in_orders = True

    def __init__(self, config: ParallelConfig, *callbacks: Any, **options: Any) -> None:
        super().__init__(config, *callbacks, **options)
        self._unpack = Unpacker()
        self._turn: Turn | None = None
        self._is_ended = self._is_aborted = self._is_woken = self._is_rung = False
        self.last_fetch = Fetched(0, is_empty=True, failed=False)
        self.preparation = Preparation(self._note_failure, options["wake"], self.timers.prepare)
        self.prepare = self._prepare
        self._own_ready: set[int] = set()
        self._calls_processors = False  # of this rank's own host
        self._own_failures: dict[int, str] = {}  # of requests whose post-processor is not ready
        self._own_jobs: dict[int, AdapterDone] = {}
        self._num_turns = 0

    def attach(self, assembly: Assembly) -> None:
        super().attach(assembly)
        has_logits = self._ranks.collectives.layout.is_last_stage
        self._calls_processors = has_logits and self._config.replicate_logits_post_processors

    def ring(self) -> None:
        self._is_rung = True  # a wait that nothing may end hears no bell
        links = getattr(self, "links", None)
        if links is not None:
            links.wake()

    def orders(self, *, ends: bool, aborts: bool, is_active: bool) -> tuple[bool, bool]:
        """Wait for what rank 0 does: an iteration, then `peek` is true; or the end. While nobody is
        active it may also be nothing at all: somebody rang.

        A rank ends when rank 0 does. One that is to end at once has failed for the others.
        """
        if aborts:
            raise RankError(f"rank {self.links.rank} was shut down")
        self.links.check()
        is_woken, self._is_woken = self._is_woken, False
        while self._turn is None and not (self._is_ended or is_woken):
            frame = None
            if is_active or not self._is_rung:
                frame = self.links.receive(may_be_woken=not is_active)
            if frame is None:
                # who rang waits for a turn that begins after it
                self._is_rung, self._is_woken = False, True
                break
            if frame.kind == Message.ASK:
                self._check_alone()
                self._ask(orjson.loads(frame.payload))
            elif frame.kind == Message.INTAKE:
                self._turn = self._unpack(frame.payload)
            elif frame.kind in (Message.ABORT, Message.END):
                if frame.kind == Message.END:
                    self._check_alone()
                    if is_active:
                        self.links.give_up("rank 0 has answered all requests, this rank has not")
                self._is_ended, self._is_aborted = True, frame.kind == Message.ABORT
            elif frame.kind == Message.DECISION:
                self.links.give_up("rank 0 has a step where this rank has none")
            else:
                self.links.give_up(f"rank 0 sent message {frame.kind} between two iterations")
        return self._is_ended, self._is_aborted

    def peek(self, room: int | None) -> bool:
        return self._turn is not None

    def fetch(self, room: int | None, num_active: int) -> Intake:
        turn, self._turn = self._turn, None
        assert turn is not None  # `orders` has waited for it
        intake = turn.intake
        if not self._broadcasts:
            intake = self._with_own_answers(turn)
        self._await_own(intake)
        self.last_fetch = Fetched(len(intake.requests), is_empty=turn.is_empty, failed=False)
        for request in intake.requests if self._broadcasts else ():
            self._receiver.owed.owe(request.request_id)
        return intake

    def respond(
        self, request_id: int, tensors: list[NamedTensor], is_final: bool, error: str
    ) -> None:
        if self._config.respond_on_all_ranks:
            super().respond(request_id, tensors, is_final, error)
        elif is_final:
            self._receiver.owed.settle(request_id)

    def _prepare(self, request_id: int, processor: RequestProcessor) -> None:
        self._own_failures.pop(request_id, None)  # of another one, which had its id
        if self._calls_processors:
            self.preparation.begin(request_id, processor)

    def fail(self, failure: Failure) -> None:
        """It is rank 0's to say so: what is the same on all ranks fails there as well."""

    def poll(self) -> None:
        if not self._broadcasts:
            super().poll()

    def report(self, counts: Counts, phase_times: PhaseTimes) -> None:
        if self._config.respond_on_all_ranks:
            super().report(counts, phase_times)
        else:
            self._check()
            self.adapter_loader.jobs.end_step()
            self.statistics.note(counts)

    def _note_failure(self, failure: Failure) -> None:
        self._own_failures[failure.request_id] = response_text(failure.error)

    # Is it as on rank 0? ---------------------------------------------------------------------

    def _decide(self, schedule: Schedule) -> None:
        frame = self.links.receive()
        if frame != (Message.DECISION, _DIGEST.pack(schedule_digest(schedule))):
            text = f"went another way in iteration {schedule.iteration}"
            self.links.tell_difference(text, to_json(schedule))

    def _check_alone(self) -> None:
        """An iteration would have come for what Get returned on rank 0, too."""
        if self._receiver.received:
            self._tell_answers(self._receiver.received, (), 0)

    def _with_own_answers(self, turn: Turn) -> Intake:
        requests, self._receiver.received = tuple(self._receiver.received), []
        stops, self._stops = frozenset(self._stops), set()
        self._num_turns += 1
        if (requests_digest(requests), stops_digest(stops)) != (turn.requests, turn.stops):
            self._tell_answers(requests, stops, self._num_turns)
        return _with_answers(turn.intake, requests, stops)

    def _tell_answers(
        self, requests: Iterable[InferenceRequest], stops: Iterable[int], turn: int
    ) -> NoReturn:
        """This rank's host has not answered as rank 0's did in that turn; 0: which had nothing."""
        plain = {"turn": turn, "answers": answers_of(requests, stops)}
        self.links.tell_difference("differs from rank 0", to_json(plain))

    def _await_own(self, intake: Intake) -> None:
        """Wait until this rank has ready what rank 0 has: it is about as fast."""
        jobs = {done.job for done in intake.adapters if done.error is None}
        ready = set(intake.ready) if self._calls_processors else set()
        for request in intake.requests:
            if request.request_id in ready:  # on rank 0, as it came
                processor = RequestProcessor(request.logits_post_processor)
                self._prepare(request.request_id, processor)
        deadline = monotonic() + self.links.timeout_s
        while True:
            while self.adapter_loader.done:
                done = self.adapter_loader.done.popleft()
                self._own_jobs[done.job] = done
            self.preparation.collect(())
            self._own_ready.update(self.preparation.ready)
            self.preparation.ready = []
            if jobs <= self._own_jobs.keys() and ready <= self._own_ready:
                break
            for request_id in sorted(ready & self._own_failures.keys()):
                self.links.give_up(f"request {request_id}: {self._own_failures[request_id]}")
            self.links.check()
            if monotonic() > deadline:
                self.links.give_up(
                    f"what rank 0 has had ready for {self.links.timeout_s:g} s this rank has not: "
                    f"jobs of adapters {sorted(jobs - self._own_jobs.keys())}, post-processors of "
                    f"requests {sorted(ready - self._own_ready)}"
                )
            Latch().wait(_POLL_S)
        self._own_ready -= ready
        for done in intake.adapters:
            own = self._own_jobs.pop(done.job, None)
            if own is not None and done.error is None and own != done:
                why = f"the digest {own.digest!r}, not {done.digest!r}"
                if own.error is not None:
                    why = f"the error {response_text(own.error)}, and none on rank 0"
                self.links.give_up(f"job {done.job} of adapters has {why}")


def _forget(schedule: Schedule) -> None:
    """The host is gone."""


def _without_answers(intake: Intake) -> Intake:
    return _with_answers(intake, (), frozenset())


def _with_answers(
    intake: Intake, requests: tuple[InferenceRequest, ...], stops: frozenset[int]
) -> Intake:
    return Intake(
        intake.now,
        requests,
        stops,
        intake.ready,
        intake.failures,
        intake.clears_cache,
        intake.adapters,
        intake.forgotten_adapters,
    )


def alike(get: Any, send: Any, poll: Any, stats: Any) -> dict[str, bool]:
    """Return what all ranks must have alike of the four callbacks, by name."""
    found = {"callbacks.broadcast is used": isinstance(get, Broadcast)}
    return (
        found
        if isinstance(get, Broadcast)
        else {"poll_stop_signal_cb is given": poll is not None, **found}
    )


def new_host(
    layout: RankLayout,
    params: OptionalParams,
    callbacks: Sequence[Any],
    wake: Callable[[], None],
) -> CallbackHost:
    """Make the callback host of a rank in `layout`. `callbacks`: the four, in their order."""
    options: dict[str, Any] = {"max_get_failures": params.max_get_failures, "wake": wake}
    config = params.parallel_config
    if layout.size == 1 or config is None:
        return CallbackHost(*callbacks, **options)
    kind = FollowingHost if layout.rank else LeadingHost
    return kind(config, *callbacks, **options)
