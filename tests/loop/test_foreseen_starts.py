"""What is said of requests with adapters and few pages, against what the next iteration does.

Nothing comes in between, so that `explain`, `explain_waiting` and `would_fit` must be right about
each request. GPTMANAGER_FUZZ multiplies the traces.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from fuzz import FUZZ
from loop_driver import AHEAD, LoopDriver
from waiting_policies import POLICIES

from gptmanager import InferenceRequest
from gptmanager.assembly.adapter_sizing import AdapterSizes
from gptmanager.config import ContextChunkingPolicy, PromptLookup
from gptmanager.manager.inspection import explain, explain_waiting, would_fit
from gptmanager.peft_cache import CacheSizes
from gptmanager.request.adapter_modules import LoraModule
from gptmanager.request.llm_request import LlmRequestState
from gptmanager.scheduler import RequestScheduler

NUM_TRACES = 8 * FUZZ
# of each kind of mistake that there once was
FOUND = (10, 12, 30, 49, 50, 57)
RANK, LAYERS = 8, 3
MODULE = LoraModule("out", 0, 4, 4)
WIDTH = RANK * MODULE.width
WAITS_FOR_ADAPTER = ("preparing", "adapter_pages")


class Decisions(RequestScheduler):
    """Keeps what the scheduler says of each decision before it makes it, and whom it takes."""

    def __init__(self, inner):
        self.inner = inner
        self.why_waiting = inner.why_waiting
        self.waits, self.chosen, self.ranks, self.in_flight = {}, set(), {}, frozenset()

    def schedule_request(self, active_requests, inflight_request_ids):
        self.ranks = {request.request_id: rank for rank, request in enumerate(active_requests)}
        self.in_flight = inflight_request_ids
        self.waits = self.inner.why_waiting(active_requests, inflight_request_ids)
        output = self.inner.schedule_request(active_requests, inflight_request_ids)
        self.chosen = {
            r.request_id for r in (*output.context_requests, *output.generation_requests)
        }
        return output


class Trace:
    """A loop, and what happens to it by chance."""

    def __init__(self, seed):
        self.chance = chance = random.Random(seed)
        ahead = chance.choice(AHEAD)
        self.policy = policy = chance.choice([*POLICIES])
        chunked = policy in ("max_utilization", "guarded") or chance.random() < 0.4
        chunking = chance.choice([*ContextChunkingPolicy])

        def wrap(scheduler):
            if chunked:
                scheduler.micro_batch_scheduler.context_chunking_policy = chunking
            self.decisions = Decisions(scheduler)
            return self.decisions

        pages = CacheSizes(WIDTH, chance.randint(3, 8), chance.randint(1, 4), 4, RANK)
        self.driver = LoopDriver(
            adapters=AdapterSizes(pages, ((4, MODULE),), LAYERS, "float32"),
            num_blocks=chance.choice([16, 18, 24, 40]),
            max_batch_size=chance.choice([2, 3, 6]),
            max_num_tokens=chance.choice([24, 32, 64]),
            max_active=chance.choice([6, 12, None]),
            max_seq_len=48,
            chunked=chunked,
            reuse=chance.random() < 0.6,
            policy=POLICIES[policy],
            scheduler=wrap,
            lookup=chance.choice([None, None, PromptLookup()]),
            **ahead,
        )
        self.loop, self.host = self.driver.loop, self.driver.host
        self.seen = Counter()
        self.next_id = 0
        self.share = chance.choice([0.1, 0.4, 0.7])  # the share of requests with an adapter
        self.brought = set()

    def request(self):
        chance = self.chance
        prompt = [chance.randrange(2)] * chance.choice([8, 12]) if chance.random() < 0.6 else []
        prompt += [chance.randrange(100) for _ in range(chance.randint(1, 10))]
        tensors = {"input_ids": prompt, "request_output_len": chance.randint(1, 20)}
        if chance.random() < self.share:
            task = chance.randrange(5)
            tensors["lora_task_id"] = task
            if task not in self.brought or chance.random() < 0.3:
                self.brought.add(task)
                size = 1 + task % LAYERS
                tensors["lora_weights"] = np.full((size, WIDTH), 1.0 + task, np.float32)
                tensors["lora_config"] = [[4, layer, RANK] for layer in range(size)]
        if chance.random() < 0.1:
            tensors["beam_width"] = 2
        elif chance.random() < 0.1:
            tensors["draft_input_ids"] = [1, 2]
        self.next_id += 1
        priority = chance.choice([0.5, 0.5, 0.5, 0.9, 0.1])
        return InferenceRequest(self.next_id, tensors, priority=priority)

    def run(self):
        for turn in range(60):
            self.disturb(turn)
            if self.is_quiet and self.loop.active:
                self.compare(self.chance.random() < 0.4)
            else:
                self.loop.iterate()
        for _ in range(5000):
            self.host.finish_work()
            if not self.loop.iterate() and not self.loop.holds_requests and not self.host.done:
                break
        self.driver.check_empty()

    def disturb(self, turn):
        chance, host = self.chance, self.host
        if turn < 40 and chance.random() < 0.5:
            self.driver.submit(*(self.request() for _ in range(chance.randint(1, 3))))
        if chance.random() < 0.5:
            host.finish_work(chance.choice([1, 2, None]))
        if chance.random() < 0.1 and self.loop.active:
            host.callbacks.stop(chance.choice(self.loop.active).request_id)
            host.poll()
        if chance.random() < 0.03:
            task = chance.randrange(5)
            self.brought.discard(task)
            host.forgotten.append(task)

    @property
    def is_quiet(self):
        host, most = self.host, self.loop.max_active
        comes = host.done or host.stops or host.forgotten or host.failures
        if most is None or len(self.loop.active) < most:
            comes = comes or host.callbacks._waiting
        return not (comes or self.awaits_result)

    @property
    def awaits_result(self):
        """What is decided depends on a result that is pending."""
        loop = self.loop
        return loop.run_ahead and loop.pending and loop.table.num_serial

    def compare(self, submits):
        loop, decisions = self.loop, self.decisions
        waiting = [r for r in loop.active if r.slot < 0]
        said = {r.request_id: explain(loop, r.request_id) for r in waiting}
        assert explain_waiting(loop, 1000) == tuple(said.values())
        candidate = self.request() if submits else None
        fit = would_fit(loop, candidate) if submits else None
        if submits:
            again = {r.request_id: explain(loop, r.request_id) for r in waiting}
            assert again == said, "would_fit has changed something"
        if candidate is not None:
            self.driver.submit(candidate)
        decisions.waits, decisions.chosen = {}, set()
        self.had_pending = loop.run_ahead and loop.pending
        loop.iterate()
        if fit is not None and self.had_pending and loop.table.num_serial:
            return
        if fit is not None:
            self.seen[f"starts_now {fit.starts_now}"] += 1
            started = candidate.request_id in decisions.chosen
            assert fit.starts_now == started, (fit, candidate.request_id)
            return
        for request_id, told in said.items():
            self.seen[told.reason] += 1
            self.check(request_id, told)

    def check(self, request_id, told):
        decisions = self.decisions
        starts, wait = request_id in decisions.chosen, decisions.waits.get(request_id)
        if told.reason == "starting":
            assert starts, told
        elif told.reason in WAITS_FOR_ADAPTER and wait is None:
            request = self.loop.table.by_id.get(request_id)
            assert request is None or request.state is LlmRequestState.PREPARING, told
        else:
            assert not starts and wait is not None, told
            assert (told.reason, told.behind) == (wait.reason.value, wait.behind)
            assert f"waits {wait.text}" in told.text
            self.check_behind(request_id, told)

    def check_behind(self, request_id, told):
        decisions, ranks = self.decisions, self.decisions.ranks
        if told.reason == "reuse_delay":
            assert told.behind in decisions.chosen | decisions.in_flight, told
        elif told.reason == "behind" and self.policy in ("max_utilization", "guarded"):
            assert ranks[told.behind] < ranks[request_id], told


def run(seed):
    trace = Trace(seed)
    trace.run()
    return trace.seen


@pytest.mark.parametrize("part", range(4))
def test_what_is_said_is_what_the_next_iteration_does(part):
    seen = Counter()
    for seed in range(part, NUM_TRACES, 4):
        seen += run(seed)
    assert seen


@pytest.mark.parametrize("seed", FOUND)
def test_what_was_said_wrongly_once(seed):
    run(seed)


def test_drafts_that_the_next_iteration_proposes_are_counted():
    driver = LoopDriver(
        lookup=PromptLookup(max_draft_tokens=6), max_num_tokens=12, script=lambda _: 5
    )
    driver.submit(InferenceRequest.from_tokens(1, [5, 5, 5], 30))
    for _ in range(3):
        driver.loop.iterate()
    newcomer = InferenceRequest.from_tokens(2, [*range(10, 18)], 4)
    fit = would_fit(driver.loop, newcomer)
    assert not fit.starts_now and "5 of max_num_tokens = 12 are left" in fit.wait
    driver.submit(newcomer)
    driver.loop.iterate()
    assert driver.loop.table.by_id[2].slot < 0
    driver.run()
