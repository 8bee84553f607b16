"""What schedulers say of requests that wait, against what they then decide.

In random traces each reason is held against the decision that follows, and against the one that
would follow if what is said to lack were there. GPTMANAGER_FUZZ multiplies the traces.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import contextmanager

import pytest
from fuzz import FUZZ
from loop_driver import LoopDriver
from waiting_policies import POLICIES, guarded

from gptmanager import InferenceRequest
from gptmanager.config import ContextChunkingPolicy
from gptmanager.kv_cache import KvCacheManager
from gptmanager.manager import stall_watch
from gptmanager.manager.inspection import explain
from gptmanager.request.llm_request import LlmRequestState
from gptmanager.scheduler import MaxUtilizationScheduler, RequestScheduler, StaticBatchScheduler
from gptmanager.scheduler.wait_reasons import WaitReason

NUM_TRACES = 24 * FUZZ
_CONTEXT = LlmRequestState.CONTEXT_INIT


class Told(RequestScheduler):
    """Asks why requests wait before each decision, and holds the answers against it."""

    def __init__(self, inner, seen):
        self.inner = inner
        self.seen = seen
        self.waits = {}
        self.why_waiting = inner.why_waiting

    def schedule_request(self, active_requests, inflight_request_ids):
        before = [fields(request) for request in active_requests]
        waits = self.inner.why_waiting(active_requests, inflight_request_ids)
        assert [fields(request) for request in active_requests] == before
        claims = Claims(self.inner, active_requests, inflight_request_ids, waits)
        for request in active_requests:
            if request.slot < 0 and request.request_id in waits:
                claims.check(request)
                self.seen[waits[request.request_id].reason.value] += 1
        output = self.inner.schedule_request(active_requests, inflight_request_ids)
        chosen = {r.request_id for r in (*output.context_requests, *output.generation_requests)}
        for request in active_requests:
            if request.slot < 0:
                assert (request.request_id in chosen) != (request.request_id in waits)
        for request_id, wait in waits.items():
            if wait.reason is WaitReason.BEHIND:
                assert wait.behind not in chosen or output.paused_requests, (request_id, wait)
                assert not claims.is_pausing or claims.stands_before(wait.behind, request_id)
            elif wait.reason is WaitReason.REUSE_DELAY:
                assert wait.behind in chosen | {*inflight_request_ids}, (request_id, wait)
        self.waits = waits
        return output


def fields(request):
    return (request.context_chunk_size, request.num_draft_tokens, request.estimated_reusable_tokens,
            request.context_current_position, request.state)  # fmt: skip


class Claims:
    """The answers before one decision, and what would be decided otherwise."""

    def __init__(self, scheduler, active, in_flight, waits):
        self.capacity, self.micro = scheduler.capacity_scheduler, scheduler.micro_batch_scheduler
        self.policy = self.capacity.capacity_scheduler
        self.kv_cache = self.capacity.kv_cache_manager
        self.active, self.in_flight, self.waits = active, in_flight, waits
        self.ids = [request.request_id for request in active]

    def check(self, request):
        wait = self.waits[request.request_id]
        getattr(self, wait.reason.value)(request, wait)

    @property
    def is_pausing(self):
        return isinstance(self.policy, MaxUtilizationScheduler)

    def stands_before(self, request_id, other_id):
        return self.ids.index(request_id) < self.ids.index(other_id)

    def fitting(self, active=None):
        """Ids that the real policy takes now."""
        with unchanged(self.active):
            return [r.request_id for r in self.capacity.schedule_request(active or self.active)[0]]

    def running(self, active=None):
        with unchanged(self.active):
            fitting, paused = self.capacity.schedule_request(active or self.active)
            context, generation = self.micro.schedule(fitting, self.in_flight)
            return {r.request_id for r in (*context, *generation)}, paused

    def kv_blocks(self, request, wait):
        short = wait.needed - (wait.free - wait.reserved)
        assert short > 0, wait
        with unchanged(self.active):
            paused = self.capacity.schedule_request(self.active)[1]
        if paused:  # the others would not be paused if more were free
            return
        assert wait.free == self.kv_cache.get_num_free_blocks()
        assert wait.running + wait.starting == len(set(self.fitting()) - self.after(request))
        for more, is_in in ((short - 1, False), (short, True)):
            with more_blocks(more):
                assert (request.request_id in self.fitting()) == is_in, (more, request, wait)

    def after(self, request):
        """Started requests that the walk takes behind one that it leaves out."""
        place = self.ids.index(request.request_id)
        guards = getattr(self.policy, "start_headroom_steps", 0)
        return {r.request_id for r in self.active[place:] if guards and r.slot >= 0}

    def behind(self, request, wait):
        other = self.active[self.ids.index(wait.behind)]
        if other.slot < 0 and wait.behind in self.waits:
            theirs = self.waits[wait.behind]
            assert theirs.reason is wait.cause, (wait, theirs)
            assert (theirs.needed, theirs.free, theirs.reserved) == (
                wait.needed, wait.free, wait.reserved)  # fmt: skip
        assert wait.needed > wait.free - wait.reserved
        if request.context_current_position == other.context_current_position == 0:
            assert self.ids.index(wait.behind) < self.ids.index(request.request_id)

    def batch_full(self, request, wait):
        full = [i for i in self.ids if i in self.waits and self.waits[i].reason is wait.reason]
        assert wait.running + wait.starting == wait.free == wait.reserved
        share = -(-len(self.fitting()) // self.micro.num_shares)
        assert wait.free in (self.policy.max_num_requests, self.micro.max_batch_size, share)
        if request.request_id != full[0]:
            return
        self.policy.max_num_requests += 1
        self.micro.max_batch_size += 1
        num_shares, self.micro.num_shares = self.micro.num_shares, 1
        try:
            with unchanged(self.active):
                self.kv_cache.start_scheduling()
                again = SimpleAgain(self).waits()
            now = again.get(request.request_id)
            assert now is None or now.free > wait.free or now.reason is not wait.reason, (wait, now)
        finally:
            self.policy.max_num_requests -= 1
            self.micro.max_batch_size -= 1
            self.micro.num_shares = num_shares

    def static_batch(self, request, wait):
        generating = [r for r in self.active if r.state is not _CONTEXT]
        assert isinstance(self.policy, StaticBatchScheduler) and generating
        assert wait.running == min(len(generating), self.policy.max_num_requests)
        rest = [r for r in self.active if r not in generating]
        with unchanged(self.active), more_blocks(1000):
            assert self.fitting(rest), "the batch that has ended makes room"

    def reuse_delay(self, request, wait):
        find = self.kv_cache.find_new_context_block
        other = self.active[self.ids.index(wait.behind)]
        assert find(other) == find(request) is not None and other is not request
        rest = [r for r in self.active if r is not other]
        with unchanged(self.active):
            again = SimpleAgain(self).waits(rest).get(request.request_id)
        assert again is None or again.behind != wait.behind

    def token_budget(self, request, wait):
        assert wait.needed > wait.free - wait.reserved, wait
        assert wait.free == self.micro.max_num_tokens
        assert request.request_id in self.fitting()
        short = wait.needed - (wait.free - wait.reserved)
        if self.micro.context_chunking_policy is None:
            for more, is_in in ((short - 1, False), (short, True)):
                self.micro.max_num_tokens += more
                try:
                    assert (request.request_id in self.running()[0]) == is_in, (more, wait)
                finally:
                    self.micro.max_num_tokens -= more
            return
        assert wait.needed <= self.micro.chunk_unit
        with unchanged(self.active):
            fitting, _ = self.capacity.schedule_request(self.active)
            context, generation = self.micro.schedule(fitting, self.in_flight)
            before = fitting[: fitting.index(request)]
            equal = self.micro.context_chunking_policy is ContextChunkingPolicy.EQUAL_PROGRESS
            if any(r.estimated_reusable_tokens for r in before):
                return
            charged = sum(r.beam_width + r.num_draft_tokens for r in generation)
            unit = self.micro.chunk_unit
            charged += sum(
                min(r.context_chunk_size, unit) if equal else r.context_chunk_size
                for r in before
                if r in context
            )
        assert charged == wait.reserved, (charged, wait)


class SimpleAgain:
    """What the scheduler would say if something were otherwise."""

    def __init__(self, claims):
        self.claims = claims

    def waits(self, active=None):
        claims = self.claims
        active = claims.active if active is None else active
        waits = claims.capacity.why_waiting(active)
        fitting, _ = claims.capacity.schedule_request(active)
        return {**waits, **claims.micro.why_waiting(fitting, claims.in_flight)}


@contextmanager
def unchanged(requests):
    before = [(r, r.context_chunk_size, r.num_draft_tokens, r.estimated_reusable_tokens)
              for r in requests]  # fmt: skip
    yield
    for request, size, drafts, reusable in before:
        request.context_chunk_size = size
        request.num_draft_tokens = drafts
        request.estimated_reusable_tokens = reusable


@contextmanager
def more_blocks(number):
    """Make the KV cache report `number` more free blocks than it has."""
    free, has_free = KvCacheManager.get_num_free_blocks, KvCacheManager.scheduling_has_free_blocks
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KvCacheManager, "get_num_free_blocks", lambda self: free(self) + number)
        patch.setattr(
            KvCacheManager,
            "scheduling_has_free_blocks",
            lambda self, needed=1: has_free(self, needed - number),
        )
        yield


def trace(seed, told):
    """A driver and its requests, by the iteration in which they come."""
    chance = random.Random(seed)
    chunked, overlap = chance.random() < 0.5, chance.random() < 0.3
    num_stages = chance.choice([2, 3, 4]) if overlap and seed % 2 else 1
    policy = chance.choice([*POLICIES])
    if policy in ("max_utilization", "guarded"):
        chunked = True
    chunking = chance.choice([*ContextChunkingPolicy])
    seen = Counter()
    schedulers = []

    def wrap(scheduler):
        if chunked:
            scheduler.micro_batch_scheduler.context_chunking_policy = chunking
        schedulers.append(scheduler)
        return Told(scheduler, seen) if told else scheduler

    driver = LoopDriver(
        num_blocks=chance.choice([14, 18, 30, 60]),
        max_batch_size=chance.choice([2, 3, 6, 20]),
        max_num_tokens=chance.choice([24, 32, 64]),
        max_active=chance.choice([8, 20, None]),
        max_seq_len=48,
        overlap=overlap,
        num_stages=num_stages,
        run_ahead=0 if overlap else chance.choice([0, 0, 1]),
        chunked=chunked,
        reuse=chance.random() < 0.5,
        policy=POLICIES[policy],
        scheduler=wrap,
    )
    arrivals = {}
    for number in range(chance.randint(8, 24)):
        prompt = [chance.randrange(2)] * chance.choice([8, 12]) if chance.random() < 0.6 else []
        prompt += [chance.randrange(100) for _ in range(chance.randint(1, 10))]
        more = {"beam_width": 2} if chance.random() < 0.15 else {}
        if chance.random() < 0.1:
            more["draft_input_ids"] = [1, 2] if "beam_width" not in more else None
        request = InferenceRequest.from_tokens(
            number, prompt, chance.randint(1, 20), priority=chance.choice([0.5, 0.5, 0.9]),
            **{name: value for name, value in more.items() if value is not None},
        )  # fmt: skip
        arrivals.setdefault(chance.choice([0, 0, chance.randrange(20)]), []).append(request)
    return driver, arrivals, seen


def run(seed, told):
    driver, arrivals, seen = trace(seed, told)
    schedules = []
    forward = driver.executor.forward
    driver.executor.forward = lambda schedule: schedules.append(schedule) or forward(schedule)
    loop, turn = driver.loop, 0
    while arrivals or loop.active or loop.pending or driver.host.callbacks._waiting:
        quiet = turn not in arrivals and not driver.host.callbacks._waiting
        driver.submit(*arrivals.pop(turn, ()))
        said = {}
        if told:
            said = {r.request_id: explain(loop, r.request_id) for r in loop.active if r.slot < 0}
            said = {number: (told_of.reason, told_of.behind) for number, told_of in said.items()}
        serial = loop.table.num_serial and loop.pending
        waited = loop.scheduler.waits = {} if told else None
        loop.iterate()
        if told and quiet and not serial and said and loop.scheduler.waits is not waited:
            now = {number: (w.reason.value, w.behind) for number, w in loop.scheduler.waits.items()}
            assert said == {i: now.get(i, ("starting", None)) for i in said}
        turn += 1
        assert turn < 2000
    driver.check_empty()
    return schedules, seen


@pytest.mark.parametrize("part", range(6))
@pytest.mark.every(3)
def test_explained_waits_agree_with_decisions(part):
    seen = Counter()
    for seed in range(part, NUM_TRACES, 6):
        schedules, reasons = run(seed, told=True)
        seen += reasons
        assert run(seed, told=False)[0] == schedules, f"seed {seed}: asking has changed a decision"
    assert sum(seen.values()) > 10


def test_the_traces_hold_every_reason():
    wanted, seen = {r.value for r in WaitReason if r is not WaitReason.ADAPTER_PAGES}, Counter()
    for seed in range(40):
        seen += run(seed, told=True)[1]
        if {*seen} == wanted:
            break
    assert {*seen} == wanted


@pytest.mark.parametrize("seed", [98, 167, 203, 252])
def test_one_that_others_were_paused_for_waits_for_what_it_lacks(seed):
    """It then met its own record of a prefix, and was told to wait behind one of lower rank."""
    chance, seen = random.Random(seed), Counter()
    driver = LoopDriver(
        num_blocks=chance.choice([14, 18, 24]), max_batch_size=6, max_num_tokens=32, max_active=20,
        max_seq_len=48, chunked=True, reuse=True,
        policy=chance.choice([guarded, MaxUtilizationScheduler]),
        scheduler=lambda scheduler: Told(scheduler, seen),
    )  # fmt: skip
    for number in range(20):
        prompt = [chance.randrange(2)] * chance.choice([8, 12])
        prompt += [chance.randrange(100) for _ in range(chance.randint(1, 10))]
        prompt = prompt[8:] if chance.random() < 0.4 else prompt
        length, priority = chance.randint(1, 20), chance.choice([0.5, 0.9, 0.7])
        driver.submit(InferenceRequest.from_tokens(number, prompt, length, priority=priority))
        for _ in range(chance.randint(0, 3)):
            driver.loop.iterate()
    driver.run()
    assert seen[WaitReason.KV_BLOCKS.value]


def test_a_stall_that_began_before_the_first_check_is_logged(caplog, monkeypatch):
    now = 5.0
    monkeypatch.setattr(stall_watch, "monotonic", lambda: now)
    watch = stall_watch.StallWatch()
    driver = LoopDriver(num_blocks=3, max_batch_size=1)
    driver.submit(*(InferenceRequest.from_tokens(number, [1], 8) for number in (1, 2)))
    driver.loop.iterate()
    now += 1.5
    for _ in range(2):
        watch.warn_of_stall(driver.loop)
    assert caplog.text.count("no request has been scheduled for 1.5 s, 2 requests are active") == 1
