"""The conformance kit: what is right conforms, and each planted mistake is found by its name."""

from __future__ import annotations

import inspect
import random
import re

import pytest
from fuzz import FUZZ

from gptmanager.errors import ConfigError
from gptmanager.loop.request_table import RequestTable
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.scheduler import (
    GuaranteedNoEvictScheduler,
    LlmRequest,
    LlmRequestState,
    MaxUtilizationScheduler,
    RequestScheduler,
    ReuseCredit,
    SchedulerOutput,
    SimpleScheduler,
    StaticBatchScheduler,
)
from gptmanager.testing import (
    RULES,
    assert_conforms,
    check_scheduler,
    random_scenario,
)

CONTEXT = LlmRequestState.CONTEXT_INIT
GENERATION = LlmRequestState.GENERATION_IN_PROGRESS


def built_in(policy, *, credit=True, **options):
    """Return a function that creates a scheduler as a manager does, or with other guards."""

    def create(max_num_requests, kv_cache_manager, micro_batch_scheduler, **others):
        capacity = policy(max_num_requests, kv_cache_manager, **options)
        if credit and kv_cache_manager.enable_block_reuse:
            capacity = ReuseCredit(capacity, kv_cache_manager)
        return SimpleScheduler(capacity, micro_batch_scheduler)

    return create


no_evict = built_in(GuaranteedNoEvictScheduler, started_contexts_first=True)


class OneAfterTheOther(RequestScheduler):
    """A user's own: whole lives, in order, of those that are through their context first."""

    def __init__(
        self, kv_cache_manager, max_batch_size, max_num_tokens, micro_batch_scheduler, **others
    ):
        self.kv = kv_cache_manager
        self.micro_batch = micro_batch_scheduler
        self.max_batch_size = max_batch_size

    def may_run(self, active_requests):
        """Return the requests that fit into the pool until they end, started ones first."""
        started = [r for r in active_requests if r.request_id in self.kv]
        others = [r for r in active_requests if r.request_id not in self.kv]
        chosen, left = [], self.kv.get_max_resource_count()
        for request in started + others:
            left -= self.kv.get_needed_resource_to_completion(request)
            if left < 0 or len(chosen) == self.max_batch_size:
                break
            chosen.append(request)
        return chosen

    def schedule_request(self, active_requests, inflight_request_ids):
        context, generation = self.micro_batch.schedule(
            self.may_run(active_requests), inflight_request_ids
        )
        return SchedulerOutput(context, generation, [])


class Alone(RequestScheduler):
    """A user's own, with nothing of ours in it: one request at a time, from start to end."""

    def __init__(self, max_num_tokens, kv_cache_manager, **others):
        self.max_num_tokens = max_num_tokens
        self.size = kv_cache_manager.tokens_per_block
        self.kv = kv_cache_manager

    def schedule_request(self, active_requests, inflight_request_ids):
        started = [r for r in active_requests if r.request_id in self.kv]
        request = (started or active_requests)[0]
        if request.request_id in inflight_request_ids:
            return [], [], []
        if request.state is GENERATION:
            return [], [request], []
        if request.context_remaining_length > self.max_num_tokens:
            request.context_chunk_size = self.max_num_tokens // self.size * self.size
        else:
            request.context_chunk_size = None
        return [request], [], []


CONFORMING = {
    "no_evict": (no_evict, False),
    "static_batch": (built_in(StaticBatchScheduler, started_contexts_first=True), False),
    "max_utilization": (
        built_in(MaxUtilizationScheduler, max_pauses=3, resume_headroom_blocks=1),
        True,
    ),
    "max_utilization_bare": (built_in(MaxUtilizationScheduler, credit=False), None),
    "one_after_the_other": (OneAfterTheOther, False),
    "alone": (Alone, None),
}


@pytest.mark.parametrize("name", CONFORMING)
@pytest.mark.every(4)
def test_what_is_right_conforms(name):
    create_scheduler, evicts = CONFORMING[name]
    report = check_scheduler(create_scheduler, evicts=evicts, num_scenarios=30 * FUZZ)
    assert report.ok, str(report)
    assert report.num_scenarios == 30 * FUZZ and report.num_requests > 150
    assert report.chunks > 10 and report.reused_tokens > 100
    assert bool(evicts) <= (report.pauses > 15)
    assert f"keeps all {len(RULES)} rules: {30 * FUZZ} scenarios" in str(report)


# Planted mistakes -----------------------------------------------------------------------------


class Planted(RequestScheduler):
    """The manager's own scheduler, and a mistake that `spoil` makes in its answers."""

    policy = staticmethod(no_evict)

    def __init__(self, **keywords):
        self.right = self.policy(**keywords)
        self.kv = keywords["kv_cache_manager"]
        self.max_batch_size = keywords["max_batch_size"]
        self.calls = 0

    def schedule_request(self, active_requests, inflight_request_ids):
        self.calls += 1
        output = self.right.schedule_request(list(active_requests), inflight_request_ids)
        return self.spoil(output, active_requests, inflight_request_ids)

    def spoil(self, output, active, in_flight):
        raise NotImplementedError


class ExpectsSomebody(Planted):
    """Takes the first of a list that may be empty."""

    def spoil(self, output, active, in_flight):
        first = (output.context_requests + output.generation_requests)[0]
        assert first.state <= GENERATION
        return output


class AnswersNone(Planted):
    def spoil(self, output, active, in_flight):
        return output if any(output) else None


class TwoLists(Planted):
    def spoil(self, output, active, in_flight):
        return output.context_requests, output.generation_requests


class Invents(Planted):
    def spoil(self, output, active, in_flight):
        copies = [LlmRequest(r.request_id, r.tokens, 4) for r in output.context_requests]
        return output._replace(context_requests=copies)


class Remembers(Planted):
    """Goes on with the requests of the call before, of which some have ended."""

    last = ()

    def spoil(self, output, active, in_flight):
        known = {r.request_id for r in output.generation_requests}
        gone = [r for r in self.last if r.request_id not in known and r.state is not CONTEXT]
        self.last = list(output.generation_requests)
        return output._replace(generation_requests=output.generation_requests + gone)


class Repeats(Planted):
    def spoil(self, output, active, in_flight):
        doubled = output.generation_requests + output.generation_requests[-1:]
        return output._replace(generation_requests=doubled)


class IgnoresFlight(Planted):
    """Runs requests whose last step is on its way."""

    def schedule_request(self, active_requests, inflight_request_ids):
        return super().schedule_request(active_requests, frozenset())

    def spoil(self, output, active, in_flight):
        return output


class WrongList(Planted):
    def spoil(self, output, active, in_flight):
        both = output.context_requests + output.generation_requests
        return output._replace(context_requests=[], generation_requests=both)


class OddChunks(Planted):
    def spoil(self, output, active, in_flight):
        for request in output.context_requests:
            if request.context_remaining_length > 3:
                request.context_chunk_size = 3
        return output


class EmptyChunks(Planted):
    def spoil(self, output, active, in_flight):
        for request in output.context_requests:
            request.context_chunk_size = 0
        return output


class Crowds(Planted):
    """Everybody at once."""

    def spoil(self, output, active, in_flight):
        ready = [r for r in active if r.request_id not in in_flight]
        contexts = [r for r in ready if r.state is CONTEXT]
        return contexts, [r for r in ready if r.state is GENERATION], []


class StartsOnly(Planted):
    """Begins every context before it goes on with one."""

    def spoil(self, output, active, in_flight):
        for request in active:
            if request.request_id not in self.kv:
                request.context_chunk_size = self.kv.tokens_per_block
                return [request], [], []
        return output


class TrustsTheCache(Planted):
    """Says that nearly all of each context is cached."""

    def spoil(self, output, active, in_flight):
        for request in output.context_requests:
            request.estimated_reusable_tokens = request.context_remaining_length - 1
            request.context_chunk_size = None
        return output


class WholeContexts(Planted):
    """Forgets the token budget: every context runs whole."""

    def spoil(self, output, active, in_flight):
        for request in output.context_requests:
            request.context_chunk_size = None
        return output


class Overcommits(Planted):
    """Compares what requests still need with the whole pool, not with what is free."""

    def schedule_request(self, active_requests, inflight_request_ids):
        chosen, left = [], self.kv.get_max_resource_count()
        for request in sorted(active_requests, key=lambda r: r.request_id not in self.kv):
            left -= self.kv.get_remaining_blocks_to_completion(request)
            if left < 0 or len(chosen) == self.max_batch_size:
                break
            chosen.append(request)
        context, generation = self.right.micro_batch_scheduler.schedule(
            chosen, inflight_request_ids
        )
        return context, generation, []


class PausesTheWaiting(Planted):
    def spoil(self, output, active, in_flight):
        waiting = [r for r in active if r.request_id not in self.kv]
        chosen = {id(r) for r in output.context_requests}
        return output._replace(paused_requests=[r for r in waiting if id(r) not in chosen])


class Pauses(Planted):
    policy = staticmethod(built_in(MaxUtilizationScheduler))

    def spoil(self, output, active, in_flight):
        return output


class Sorts(Planted):
    """Sorts the list that it was given."""

    def spoil(self, output, active, in_flight):
        active.sort(key=lambda request: request.prompt_len)
        return output


class Ages(Planted):
    """Writes into the requests what it should keep for itself."""

    def spoil(self, output, active, in_flight):
        for request in active:
            request.priority += 0.01
        return output


class Hurries(Planted):
    """Writes into a piece of a request."""

    def spoil(self, output, active, in_flight):
        for request in active:
            request.times.deadline = 1e9
        return output


class AllocatesItself(Planted):
    def spoil(self, output, active, in_flight):
        for request in output.context_requests:
            if request.request_id not in self.kv:
                self.kv.add_sequence(request)
        return output


class Miscounts(Planted):
    """Keeps accounts of its own in those of the KV cache."""

    def spoil(self, output, active, in_flight):
        self.kv._pool.ref_counts[-1] += 1
        return output


class Rests(Planted):
    """Lets nobody run once it has worked enough."""

    def spoil(self, output, active, in_flight):
        return output if self.calls < 12 else ([], [], [])


class FillsThePool(Planted):
    """Runs whatever fits into the next step, until nothing does."""

    def schedule_request(self, active_requests, inflight_request_ids):
        chosen, left = [], self.kv.get_num_free_blocks()
        for request in active_requests[: self.max_batch_size]:
            need = self.kv.get_needed_blocks_one_step(request)
            if need <= left:
                chosen.append(request)
                left -= need
        return *self.right.micro_batch_scheduler.schedule(chosen, inflight_request_ids), []


class Favours(Planted):
    """The odd ones never start."""

    def schedule_request(self, active_requests, inflight_request_ids):
        even = [r for r in active_requests if not r.request_id % 2]
        return self.right.schedule_request(even, inflight_request_ids)


class TakesTurns(Planted):
    """Each two requests pause each other as soon as one of them has run."""

    def schedule_request(self, active_requests, inflight_request_ids):
        started = [r for r in active_requests if r.request_id in self.kv]
        others = [r for r in active_requests if r.request_id not in self.kv]
        output = self.right.schedule_request((others or started)[:1], inflight_request_ids)
        return output._replace(paused_requests=started if others else [])


class Dices(Planted):
    chance = random.Random(0)  # one generator for all runs

    def spoil(self, output, active, in_flight):
        self.chance.shuffle(output.generation_requests)
        return output


class LearnsFromOthers(Planted):
    """Keeps what it learnt where the next manager of the process finds it."""

    seen: set[int] = set()

    def spoil(self, output, active, in_flight):
        first = [r for r in output.generation_requests if r.request_id in self.seen]
        rest = [r for r in output.generation_requests if r.request_id not in self.seen]
        self.seen.update(r.request_id for r in active if r.num_generated > 8)
        return output._replace(generation_requests=first + rest)


# The seed is one of a scenario that shows the mistake.
PLANTED = [
    (ExpectsSomebody, 1, "raises-nothing", r"it raised IndexError: list index out of range"),
    (AnswersNone, 1, "three-lists", r"it returned None"),
    (TwoLists, 0, "three-lists", r"it returned \(\["),
    (Invents, 0, "own-requests", r"LlmRequest\(0, .* was not among \[0"),
    (Remembers, 2, "own-requests", r"LlmRequest\(\d+, GENERATION_COMPLETE.* was not among \["),
    (Repeats, 0, "each-once", r"it is in generation_requests twice"),
    (IgnoresFlight, 1, "not-in-flight", r"is to run while it is in flight with \[\d"),
    (
        WrongList,
        0,
        "right-list",
        r"LlmRequest\(0, CONTEXT_INIT.* is in the list of generation requests",
    ),
    (
        OddChunks,
        0,
        "chunk-size",
        r"a chunk of 3 of the \d+ tokens that remain is to run, tokens_per_",
    ),
    (EmptyChunks, 0, "chunk-size", r"\d+ tokens of its context remain, but its chunk has 0 tokens"),
    (Crowds, 1, "batch-size", r"(\d+) requests are to run \(contexts .*\), max_batch_size = \d"),
    (
        StartsOnly,
        4,
        "slots",
        r"requests \[\d+\] are to start while \[\d.* not ended: the manager has \d+ slots",
    ),
    (TrustsTheCache, 15, "token-budget", r"\d+ tokens ran, max_num_tokens = \d+"),
    (WholeContexts, 15, "token-budget", r"(\d+) tokens are to run \(contexts \d+ of request"),
    (Overcommits, 5, "memory", r"request \d+ needs \d+ more KV cache blocks, \d+ of \d+ are free"),
    (PausesTheWaiting, 1, "pauses-the-started", r"is to be paused, but holds no KV cache blocks"),
    (Pauses, 1, "never-pauses", r"LlmRequest\(.* is to be paused"),
    (Sorts, 4, "list-untouched", r"it received requests \[.*\], and left \["),
    (Ages, 0, "requests-untouched", r"priority was 0.\d+ before the call and is 0.\d+ after it"),
    (
        Hurries,
        0,
        "requests-untouched",
        r"times was TimesState\(.* and is TimesState\(.*1000000000.0",
    ),
    (
        AllocatesItself,
        0,
        "memory-untouched",
        r"the blocks that requests hold changed during the call",
    ),
    (Miscounts, 0, "accounts", r"block \d+ counts 1 references, but 0 tables hold it"),
    (
        Rests,
        1,
        "progress",
        r"no request has run for 8 iterations: .* needs \d+ blocks, \d+ of \d+ are free$",
    ),
    (
        FillsThePool,
        9,
        "progress",
        r"needs 1 blocks, 0 of \d+ are free; no request can run while requests \[\d.* keep their",
    ),
    (Favours, 1, "progress", r"no request has run for 8 iterations: LlmRequest\(\d*[13579], "),
    (TakesTurns, 1, "no-starvation", r"was accepted \d+ iterations ago, paused \d+ times since"),
    (
        Dices,
        80,
        "same-decisions",
        r"one run decided contexts \[.*, another run of the same scenario contexts",
    ),
    (
        LearnsFromOthers,
        45,
        "same-decisions",
        r"one run decided .* at iteration \d+, another run of the same scenario",
    ),
]


@pytest.mark.parametrize(
    ("mistake", "seed", "rule", "text"), PLANTED, ids=[it[0].__name__ for it in PLANTED]
)
def test_a_planted_mistake_is_found_by_its_name(mistake, seed, rule, text):
    evicts = False if mistake is Pauses else None
    report = check_scheduler(mistake, seed=seed, num_scenarios=FUZZ, evicts=evicts)
    broken = {violation.rule: violation for violation in report.violations}
    assert rule in broken, str(report)
    assert re.search(text, broken[rule].text), broken[rule].text


def answers_twice(table, respond, *arguments):
    respond(table, *arguments)
    respond(table, *arguments)


def answers_with_an_error(table, respond, request, tensors, error=""):
    respond(table, request, [], "StepError: gone")


def forgets_a_token(table, respond, request, tensors, error=""):
    kept = dict(tensors)
    kept["sequence_length"] -= 1
    respond(table, request, [*kept.items()], error)


def raises(table, respond, *arguments):
    raise ZeroDivisionError


OUTSIDE = [
    (answers_twice, "one-final", "a second final response to request 0"),
    (answers_with_an_error, "one-final", "its final response is the error: StepError: gone"),
    (forgets_a_token, "same-tokens", r"it generated \[.*\], but generates \[.*\] when it runs"),
    (raises, "accepted", "the loop ended with ZeroDivisionError"),
]


@pytest.mark.parametrize(("mistake", "rule", "text"), OUTSIDE)
def test_a_mistake_outside_of_the_scheduler_is_found_by_its_name(monkeypatch, mistake, rule, text):
    respond = RequestTable._respond_final
    monkeypatch.setattr(
        RequestTable, "_respond_final", lambda table, *rest: mistake(table, respond, *rest)
    )
    (violation,) = check_scheduler(no_evict, num_scenarios=1).violations
    assert violation.rule == rule and re.search(text, violation.text), violation.text


def test_every_rule_is_broken_by_a_planted_mistake():
    assert {rule for *_, rule, _ in [*PLANTED, *OUTSIDE]} == RULES.keys()


# The report -------------------------------------------------------------------------------------


def test_a_violation_has_the_smallest_scenario_that_shows_it():
    report = check_scheduler(Favours, num_scenarios=40)
    (violation,) = report.violations
    assert violation.rule == "progress" and violation.request_id % 2
    # the even ones, which end, are left out
    assert [r.request_id for r in violation.scenario.requests] == [violation.request_id]
    again = check_scheduler(Favours, seed=violation.seed, num_scenarios=1)
    assert (again.violations[0].rule, again.num_scenarios) == ("progress", 1)
    smaller = check_scheduler(Favours, num_scenarios=violation.seed)
    assert smaller.ok
    text = str(report)
    assert text.startswith(f"Favours breaks 1 of {len(RULES)} rules: 40 scenarios, ")
    assert f"seed {violation.seed}, iteration {violation.iteration}, request " in text
    assert RULES["progress"] in text and str(violation.scenario.requests[0]) in text


def test_every_iteration_is_counted(monkeypatch):
    iterate, num_iterations = TokenLoop.iterate, 0

    def counted(loop):
        nonlocal num_iterations
        num_iterations += 1
        return iterate(loop)

    monkeypatch.setattr(TokenLoop, "iterate", counted)
    report = check_scheduler(no_evict, num_scenarios=2)  # which runs each scenario twice
    assert 2 * report.iterations == num_iterations


def test_the_guard_of_no_evict_is_what_keeps_it_from_stopping_for_ever():
    """Without the guard, a new request of higher rank blocks a context that has begun."""
    bare = built_in(GuaranteedNoEvictScheduler)
    report = check_scheduler(bare, seed=0, num_scenarios=20, evicts=False)
    assert [violation.rule for violation in report.violations] == ["progress"]
    assert check_scheduler(
        bare, num_scenarios=20, evicts=False, where=lambda scenario: scenario.chunking is None
    ).ok


def test_assert_conforms_raises_the_report():
    assert assert_conforms(no_evict, num_scenarios=5) is None
    with pytest.raises(AssertionError, match=r"TwoLists breaks 1 of \d+ rules: 5 sc(.|\n)*seed 0,"):
        assert_conforms(TwoLists, num_scenarios=5)
    checked, asserted = map(inspect.signature, (check_scheduler, assert_conforms))
    for name in ("num_scenarios", "seed", "evicts"):
        assert asserted.parameters[name] == checked.parameters[name]


def test_what_makes_no_scheduler_is_the_callers_error():
    with pytest.raises(ConfigError, match="num_scenarios = 0 must be an integer of at least 1"):
        check_scheduler(lambda **_: 7, num_scenarios=0)
    with pytest.raises(ConfigError, match="create_scheduler returned 7, expected a RequestSch"):
        check_scheduler(lambda **keywords: 7)
    told = r"must accept the keywords max_num_requests, kv_.* as \*\*others: got an unexpected"
    with pytest.raises(ConfigError, match=told):
        check_scheduler(lambda max_num_requests: 7)
    with pytest.raises(ConfigError, match="where is false for all 5 scenarios from seed 3 on"):
        check_scheduler(no_evict, seed=3, num_scenarios=5, where=lambda scenario: False)


def test_scenarios_are_those_of_their_seeds_and_cover_what_matters():
    scenarios = [random_scenario(seed) for seed in range(200)]
    assert scenarios == [random_scenario(seed) for seed in range(200)]
    requests = [request for scenario in scenarios for request in scenario.requests]

    def share(of, holds):
        return sum(map(holds, of)) / len(of)

    assert 0.1 < share(scenarios, lambda s: s.chunking is None) < 0.5
    assert 0.2 < share(scenarios, lambda s: s.run_ahead) < 0.5
    assert 0.2 < share(scenarios, lambda s: s.overlap) < 0.5
    assert not any(s.run_ahead and s.overlap for s in scenarios)
    assert 0.3 < share(scenarios, lambda s: s.block_reuse) < 0.7
    tight = share(scenarios, lambda s: (s.num_blocks - 2) * s.tokens_per_block < s.max_seq_len)
    assert 0.2 < tight < 0.8
    assert {s.max_batch_size for s in scenarios} == {*range(1, 7)}
    assert {s.tokens_per_block for s in scenarios} == {2, 4, 8}
    spare = {s.num_blocks - -(-s.max_seq_len // s.tokens_per_block) for s in scenarios}
    assert spare >= {0, 1, 2, 3}  # more than one request of max_seq_len needs
    assert 0.1 < share(requests, lambda r: r.stopped is not None) < 0.2
    assert 0.05 < share(requests, lambda r: len(r.stop_word) == 2) < 0.15
    assert 0.2 < share(requests, lambda r: r.end_id is not None) < 0.3
    assert 0.3 < share(requests, lambda r: len(r.output()) == r.max_new_tokens) < 0.9
    assert 0.2 < share(requests, lambda r: r.is_streaming) < 0.4
    assert 0.3 < share(requests, lambda r: r.priority != 0.5) < 0.5
    assert 0.2 < share(requests, lambda r: r.arrives > 0) < 0.8
