"""Any sequence of events over loops whose requests have adapters: each runs with its own content.

The pages are pretended: what lies in them is the digest of what was written there. Beside the loop
may go another one, restored from its state as data, which must decide the same.
"""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import orjson
import pytest
from fuzz import FUZZ
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from loop_driver import AHEAD, ForcedPauses, LoopDriver, expected_output, no_evict

from gptmanager.assembly.adapter_sizing import AdapterSizes
from gptmanager.config import FinishReason
from gptmanager.errors import AdapterError, StepError
from gptmanager.loop.adapters import Adapters
from gptmanager.loop.request_table import RequestTable
from gptmanager.loop.token_loop import LoopState
from gptmanager.manager.inspection import audit, explain
from gptmanager.peft_cache import CacheSizes
from gptmanager.peft_cache.work import (
    CopyAdapter,
    DropAdapter,
    FreeHostPages,
    ReadAdapter,
    WriteAdapter,
)
from gptmanager.recorder.recording_file import field_names
from gptmanager.recorder.values import Decoder, to_json
from gptmanager.request.adapter_modules import LoraModule
from gptmanager.request.inference_request import InferenceRequest
from gptmanager.scheduler import MaxUtilizationScheduler

EXAMPLES = 160 * FUZZ
PARTS = 4
RANK, LAYERS = 8, 3
MODULE = LoraModule("out", 0, 4, 4)
WIDTH = RANK * MODULE.width
GOOD = (1.0, 2.0)
DECODER = Decoder(orjson.loads(to_json(field_names(LoopState))))


class Pages:
    """A loader and its pool, pretended. Work is done when the machine says so.

    `read`: digests by job; None: not read yet. `host`, `device`: the digest of what pages hold, ""
    while they are written. `slots`: the device pages of the adapter in a slot.
    """

    def __init__(self) -> None:
        self.begun: list = []
        self.read: dict[int, str | None] = {}
        self.host: dict[int, str] = {}
        self.device: dict[int, str] = {}
        self.slots: dict[int, tuple[int, ...]] = {}

    def begin(self, work) -> None:
        if isinstance(work, DropAdapter):
            self.read.pop(work.source, None)
            return
        if isinstance(work, FreeHostPages):
            assert not self.in_use() & {*work.host_pages}, "what is being moved was freed"
            for page in work.host_pages:
                del self.host[page]
            return
        if isinstance(work, ReadAdapter):
            self.read[work.job] = None
        elif isinstance(work, WriteAdapter):
            assert not self.in_use() & {*work.host_pages}, "two move the same pages"
            self.host.update(dict.fromkeys(work.host_pages, ""))
        else:
            assert all(self.host.get(copy.host_page) for copy in work.copies), "copied too early"
            self.device.update({copy.device_page: "" for copy in work.copies})
            self.slots[work.slot] = work.device_pages
        self.begun.append(work)

    def in_use(self) -> set[int]:
        """Host pages of what is under way."""
        pages = set()
        for work in self.begun:
            if isinstance(work, WriteAdapter):
                pages |= {*work.host_pages}
            elif isinstance(work, CopyAdapter):
                pages |= {copy.host_page for copy in work.copies}
        return pages

    def end(self, work, done) -> None:
        self.begun.remove(work)
        if isinstance(work, ReadAdapter):
            if work.job in self.read and done.error is None:
                self.read[work.job] = done.digest
            return
        if isinstance(work, WriteAdapter):
            content = self.read.pop(work.source)
            assert content, "what is written was not read, or was dropped"
            if done.error is None:
                self.host.update(dict.fromkeys(work.host_pages, content))
        elif done.error is None:
            self.device.update({c.device_page: self.host[c.host_page] for c in work.copies})

    def content(self, slot: int) -> str:
        """What a sequence finds there."""
        found = {self.device[page] for page in self.slots[slot]}
        return found.pop() if len(found) == 1 else ""


class Twin:
    """A loop restored from another one's state: it is told what that one is told."""

    def __init__(self, machine: AdapterMachine) -> None:
        loop = machine.driver.loop
        state = DECODER.decode(LoopState, orjson.loads(to_json(loop.state())))
        self.driver = LoopDriver(**machine.options)
        self.loop = self.driver.loop
        self.driver.host.fetch = lambda room, num_active: machine.intake
        self.loop.executor = SimpleNamespace(
            forward=self.forward,
            sample=lambda step: None,
            result=lambda step: machine.results[step.schedule.iteration],
        )
        self.schedules: list = []
        self.loop.restore(state, map(self.step_of, state.pending))
        assert to_json(self.loop.state()) == to_json(loop.state())

    def step_of(self, schedule):
        return SimpleNamespace(schedule=schedule)

    def forward(self, schedule):
        self.schedules.append(schedule)
        return self.step_of(schedule)


class AdapterMachine(RuleBasedStateMachine):
    """Submit, do work in any order, stop, forget, pause, fail, go on from data."""

    @initialize(
        host_pages=st.integers(2, 6),
        device_pages=st.integers(1, 4),
        ahead=st.sampled_from(AHEAD),
        reuse=st.booleans(),
        policy=st.sampled_from([no_evict, MaxUtilizationScheduler]),
        max_batch_size=st.integers(1, 4),
        max_active=st.sampled_from([3, 8, None]),
    )
    def build(self, host_pages, device_pages, ahead, reuse, policy, max_batch_size, max_active):
        pages = CacheSizes(WIDTH, host_pages, device_pages, 4, RANK)
        self.options = {
            "adapters": AdapterSizes(pages, ((4, MODULE),), LAYERS, "float32"),
            "scheduler": ForcedPauses,
            "reuse": reuse,
            "policy": policy,
            "max_batch_size": max_batch_size,
            "max_active": max_active,
            **ahead,
        }
        self.driver = LoopDriver(**self.options)
        self.loop, self.host = self.driver.loop, self.driver.host
        self.pages = Pages()
        self.loop.table.adapters._load = self.pages.begin
        self.twin = None
        self.fetch, self.host.fetch = self.host.fetch, self.take_intake
        self.forward, self.loop.executor.forward = self.loop.executor.forward, self.run_step
        self.compute, self.loop.executor.result = self.loop.executor.result, self.take_result
        self.intake, self.results = None, {}  # by schedule
        self.fails = False
        self.schedules = []
        self.next_id = 0
        self.asked = {}  # by request: what of it counts
        self.brought = {}  # (task, how often it was forgotten) -> digests
        self.times_forgotten = dict.fromkeys(range(4), 0)
        self.life = {}  # by request: how often its task had been forgotten

    # What the loop sees --------------------------------------------------------------------

    def take_intake(self, room, num_active):
        self.intake = self.fetch(room, num_active)
        self.was_idle = not (num_active or self.intake.requests or self.intake.adapters)
        for task in self.intake.forgotten_adapters:
            self.times_forgotten[task] += 1
        for request in (*self.loop.table._arriving, *self.intake.requests):
            task, digest = self.asked[request.request_id][:2]
            if task is not None:
                key = self.life[request.request_id] = task, self.times_forgotten[task]
                self.brought.setdefault(key, set()).update({digest} - {None})
        return self.intake

    def run_step(self, schedule):
        if self.fails:
            raise FloatingPointError("the step is broken")
        self.schedules.append(schedule)
        return self.forward(schedule)

    def take_result(self, step):
        result = self.results[step.schedule.iteration] = self.compute(step)
        return result

    # Events --------------------------------------------------------------------------------

    @rule(
        task=st.sampled_from([None, 0, 0, 1, 1, 2, 3]),
        value=st.sampled_from([None, None, 1.0, 1.0, 1.0, 2.0, np.nan]),
        prompt=st.lists(st.sampled_from([1, 1, 2]), min_size=1, max_size=9),
        length=st.integers(1, 8),
        priority=st.sampled_from([0.5, 0.5, 0.9]),
    )
    def submit(self, task, value, prompt, length, priority):
        tensors = {"input_ids": prompt, "request_output_len": length}
        value, digest = value if task is not None else None, None
        if task is not None:
            tensors["lora_task_id"] = task
        if value is not None:
            size = 1 + task % LAYERS
            tensors["lora_weights"] = np.full((size, WIDTH), value + task, np.float32)
            tensors["lora_config"] = [[4, layer, RANK] for layer in range(size)]
            digest = f"{task} {value}" if value in GOOD else None
        self.next_id += 1
        self.asked[self.next_id] = task, digest, prompt, length, value
        self.driver.submit(InferenceRequest(self.next_id, tensors, priority=priority))

    @rule(times=st.integers(1, 4))
    def iterate(self, times):
        for _ in range(times):
            self.turn()

    @rule(
        data=st.data(),
        count=st.integers(1, 5),
        error=st.sampled_from([None] * 6 + [AdapterError("no memory")]),
    )
    def work(self, data, count, error):
        for _ in range(min(count, len(self.pages.begun))):
            index = data.draw(st.integers(0, len(self.pages.begun) - 1))
            self.finish(self.pages.begun[index], error)

    def finish(self, work, error=None):
        self.host.finish(work, error)
        done = self.host.done[-1]
        if isinstance(work, ReadAdapter) and done.error is None:
            values = work.tensors.read().rows[0, 4].values
            done = self.host.done[-1] = done._replace(
                digest=f"{work.task_id} {float(values[0]) - work.task_id}"
            )
        self.pages.end(work, done)

    @rule(data=st.data())
    def stop(self, data):
        if self.loop.active:
            self.host.callbacks.stop(data.draw(st.sampled_from(self.loop.active)).request_id)
            self.host.poll()

    @rule(task=st.integers(0, 3))
    def forget(self, task):
        self.host.forgotten.append(task)

    @rule(data=st.data())
    def pause(self, data):
        started = [r.request_id for r in self.loop.active if r.slot >= 0]
        if started:
            self.driver.scheduler.victims |= data.draw(st.sets(st.sampled_from(started)))

    @precondition(lambda self: self.next_id > 3)
    @rule(where=st.sampled_from(["step", "admission", "pages"]))
    def fail(self, where):
        """An iteration raises, in the middle."""
        if where == "step":
            self.fails = True
            self.turn()
            self.fails = False  # nobody ran
            return
        owner, name = {
            "admission": (RequestTable, "most_active"),
            "pages": (Adapters, "_give_pages"),
        }[where]
        with patch.object(owner, name, lambda *_: 1 / 0):
            self.turn(is_broken=True)

    @rule()
    def go_on_from_data(self):
        self.twin = Twin(self)

    # What must hold ------------------------------------------------------------------------

    def turn(self, is_broken=False):
        victims = {*self.driver.scheduler.victims}
        self.schedules.clear()
        try:
            self.loop.iterate()
        except (FloatingPointError, ZeroDivisionError) as error:
            self.loop.recover(StepError(str(error)))
            self.driver.scheduler.victims.clear()
            self.twin = Twin(self)
        else:
            self.follow(victims)
        report = audit(self.loop)
        assert report.ok, report.problems
        assert not self.host.checker.violations
        if not is_broken:  # an explanation tries the next iteration
            for request in self.loop.active:
                assert explain(self.loop, request.request_id).text
        for schedule in self.schedules:
            self.check_adapters(schedule)

    def follow(self, victims):
        twin = self.twin
        if twin is None:
            return
        twin.driver.scheduler.victims |= victims
        twin.schedules.clear()
        twin.loop.iterate()
        assert twin.schedules == self.schedules
        assert to_json(twin.loop.state()) == to_json(self.loop.state())

    def check_adapters(self, schedule):
        for row in schedule.rows:
            request = self.loop.table.by_id.get(row.request_id)
            task, digest, *_ = self.asked[row.request_id]
            if request is None or request.epoch != row.epoch:
                continue  # it has ended in this very turn
            assert (request.adapter_slot < 0) == (task is None)
            if task is None:
                continue
            content = self.pages.content(request.adapter_slot)
            assert content == request.adapter_digest, "another adapter lies in its pages"
            if digest is not None:
                assert content == digest, "it runs with what another request brought"
            assert content in self.brought[self.life[row.request_id]], "it was forgotten"

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        for _ in range(400):
            self.turn()
            for work in [*self.pages.begun]:
                self.finish(work)
            is_over = self.was_idle and not self.loop.holds_requests
            if is_over and not self.pages.begun and not self.host.done:
                break
        self.driver.check_empty()
        adapters = self.loop.table.adapters
        assert not (adapters.requests or adapters.waiting or adapters.reads or adapters.moves)
        assert not any(it.requests or it.running for it in adapters.cache.adapters)
        assert not self.pages.read, "what was read is kept, and nobody wants it"
        self.forget_all(adapters)
        for request_id, asked in self.asked.items():
            self.check_end(self.driver.final(request_id), *asked)

    def forget_all(self, adapters):
        self.host.forgotten += range(4)
        self.turn()
        assert not adapters.cache.adapters and not self.pages.host

    def check_end(self, final, task, digest, prompt, length, value):
        if not final.error:
            is_cancelled = int(final.tensors["finish_reasons"]) == FinishReason.CANCELLED
            assert is_cancelled or value is None or value in GOOD
            output = self.driver.output(final.request_id)
            whole = prompt + expected_output(prompt, length)
            assert output == (whole[: len(output)] if is_cancelled else whole)
            return
        kind = final.error.partition(":")[0]
        may = {"StepError"}
        if task is not None:
            may.add("AdapterError")
        if value is not None and value not in GOOD:
            may.add("InvalidRequestError")
        assert kind in may, final.error


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.every(2)
def test_any_sequence_of_events(part):
    run_state_machine_as_test(
        seed(part)(AdapterMachine),
        settings=settings(
            max_examples=EXAMPLES // PARTS,
            stateful_step_count=40,
            deadline=None,
            database=None,
            phases=[Phase.generate],  # a shrunk example takes minutes
            suppress_health_check=list(HealthCheck),
        ),
    )
