"""What a host may return from Get, and iterations that raise: who gets which final response.

GPTMANAGER_FUZZ=n injects a failure at every call of n times as many runs (1: a few of them).
"""

from __future__ import annotations

import itertools
import random
import sys
import threading
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from fuzz import FUZZ
from loop_driver import LoopDriver, expected_output
from recorded_runs import (
    MAX_UTILIZATION,
    VOCAB_SIZE,
    ScheduledHost,
    next_token,
    record,
)
from recorded_runs import request as recorded_request
from shorthand import params, request
from started_manager import start

from gptmanager import REQUEST_METRICS, FinishReason, InferenceRequest, KvCacheConfig, errors
from gptmanager.executor.torch_executor import TorchExecutor
from gptmanager.host.callback_host import CallbackHost
from gptmanager.host.preparation import Preparation
from gptmanager.lifecycle.state import ManagerState
from gptmanager.lifecycle.watchdog import CallbackTimer
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.manager.inspection import audit
from gptmanager.manager.recovery import Recovery
from gptmanager.picture.recorded import trace_of
from gptmanager.recorder import Recorder, read_recording
from gptmanager.recorder import recorder as recorder_module
from gptmanager.replay import replay
from gptmanager.request.post_processor import RequestProcessor
from gptmanager.simulator.cost_model import CostModel
from gptmanager.simulator.load import RecordedLoad
from gptmanager.simulator.simulation import simulate
from gptmanager.step import Progress
from gptmanager.testing import RecordingCallbacks, ScriptedModel

PACKAGE = str(Path(errors.__file__).parent)


@pytest.fixture
def host():
    return RecordingCallbacks()


# What Get returns ----------------------------------------------------------------------------


class WithoutInit(InferenceRequest):
    def __init__(self):
        pass


class OnlyAnId(InferenceRequest):
    def __init__(self):
        self.__dict__["request_id"] = 2


class RaisingId(InferenceRequest):
    @property
    def request_id(self):
        raise SystemExit("of a host")


class RaisingTensors(OnlyAnId):
    @property
    def tensors(self):
        raise KeyboardInterrupt


class LyingClass:
    @property
    def __class__(self):
        raise SystemExit("of a host")


def with_id(request_id):
    item = request(2, [1], 3)
    item.__dict__["request_id"] = request_id
    return item


def with_attribute(name, value):
    item = request(2, [1], 3)
    item.__dict__[name] = value
    return item


class RaisingBool:
    def __bool__(self):
        raise SystemExit("of a host")

    def __index__(self):
        raise SystemExit("of a host")

    def __float__(self):
        raise SystemExit("of a host")


NO_REQUESTS = {
    "None": lambda: None,
    "a string": lambda: "request",
    "a class": lambda: InferenceRequest,
    "without init": WithoutInit,
    "bare": lambda: InferenceRequest.__new__(InferenceRequest),
    "an id that raises": lambda: RaisingId.__new__(RaisingId),
    "a class that raises": LyingClass,
    "an unhashable id": lambda: with_id([2]),
    "a string as id": lambda: with_id("2"),
    "a float as id": lambda: with_id(2.0),
    "a bool as id": lambda: with_id(True),
    "no id": lambda: with_id(None),
    "a huge id": lambda: with_id(2**64),
    "a negative id": lambda: with_id(-1),
    "an id whose index raises": lambda: with_id(RaisingBool()),
}
REFUSED = {
    "only an id": OnlyAnId,
    "tensors that raise": RaisingTensors,
    "tensors that are none": lambda: with_attribute("tensors", None),
    "tensors that are a list": lambda: with_attribute("tensors", [1]),
    "names that are numbers": lambda: with_attribute("tensors", {1: np.array([1])}),
    "names that are unhashable as a set": lambda: with_attribute("tensors", {(1, 2): None}),
    "a deadline that raises": lambda: with_attribute("deadline_s", RaisingBool()),
    "a priority that raises": lambda: with_attribute("priority", RaisingBool()),
    "a flag that raises": lambda: with_attribute("is_streaming", RaisingBool()),
    "a client id that raises": lambda: with_attribute("client_id", RaisingBool()),
    "a length that raises": lambda: with_attribute(
        "tensors", {"input_ids": np.array([1]), "request_output_len": RaisingBool()}
    ),
}


@pytest.mark.parametrize("name", NO_REQUESTS)
def test_other_values_than_requests_are_counted_and_named_and_harm_no_request(host, name, caplog):
    item = NO_REQUESTS[name]()
    with start(host, lambda history: 7) as manager:
        host.submit(request(1, [1], 3), item, request(3, [1], 3))
        for request_id in (1, 3):
            assert host.final(request_id).error == ""
        assert manager.wait_idle(30)
        assert manager.state is ManagerState.RUNNING
        assert manager.health().callbacks["GetInferenceRequests"].errors == 1
    assert {response.request_id for response in host.responses} == {1, 3}
    assert f"an item of type {type(item).__name__}" in caplog.text


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_that_cannot_be_read_has_its_final_and_harms_no_other(host, name):
    with start(host, lambda history: 7) as manager:
        host.submit(request(1, [1], 3), REFUSED[name](), request(3, [1], 3))
        finals = [host.final(request_id).error for request_id in (1, 2, 3)]
        assert manager.wait_idle(30) and manager.state is ManagerState.RUNNING
    assert finals[0] == finals[2] == ""
    assert finals[1].startswith("InvalidRequestError: ")
    assert sorted(r.request_id for r in host.responses if r.is_final) == [1, 2, 3]


def test_a_subclass_that_adds_something_is_served_as_it_is_when_get_returns(host):
    class Mine(InferenceRequest):
        @property
        def priority(self):
            return 0.9

    item = Mine(2, {"input_ids": np.array([1]), "request_output_len": np.array(3)})
    with start(host, lambda history: 7):
        host.submit(item)
        assert host.final(2).error == ""


# Logits post-processors that get ready -------------------------------------------------------


class Processor:
    def __call__(self, request_id, logits, tokens, stream, client_id):
        pass


def processor_class(**attributes):
    return type("Broken", (Processor,), attributes)()


def raising(error):
    def raises(*args):
        raise error

    return raises


class RaisingFuture(Future):
    """Raises in the method `where`; done from the beginning otherwise."""

    def __init__(self, where):
        super().__init__()
        self.where = where
        self.set_result(None)

    def done(self):
        if self.where == "done":
            raise SystemExit("of a host")
        return False

    def exception(self, timeout=None):
        if self.where == "exception":
            raise SystemExit("of a host")
        return super().exception(timeout)

    def cancelled(self):
        if self.where == "cancelled":
            raise SystemExit("of a host")
        return False

    def add_done_callback(self, call):
        if self.where == "add_done_callback":
            raise SystemExit("of a host")
        super().add_done_callback(call)


PROCESSORS = {
    "the attribute raises": lambda: processor_class(prepare=property(raising(ValueError("no")))),
    "the attribute exits": lambda: processor_class(prepare=property(raising(SystemExit()))),
    "it exits": lambda: processor_class(prepare=raising(SystemExit("no"))),
    "it is interrupted": lambda: processor_class(prepare=raising(KeyboardInterrupt())),
    "it returns nothing": lambda: processor_class(prepare=lambda self, device: None),
    "its name raises": lambda: processor_class(name=property(raising(SystemExit()))),
}
for method in ("exception", "cancelled", "add_done_callback"):
    PROCESSORS[f"{method} exits"] = partial(
        processor_class, prepare=lambda self, device, method=method: RaisingFuture(method)
    )


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_that_cannot_be_prepared_ends_its_request_alone(host, name):
    with start(host, lambda history: 7) as manager:
        host.submit(
            request(1, [1], 3),
            request(2, [1], 3, logits_post_processor=PROCESSORS[name]()),
            request(3, [1], 3),
        )
        finals = [host.final(request_id).error for request_id in (1, 2, 3)]
        assert manager.wait_idle(30) and manager.state is ManagerState.RUNNING
    assert finals[0] == finals[2] == "" and finals[1] != ""
    assert sorted(r.request_id for r in host.responses if r.is_final) == [1, 2, 3]


def test_a_future_whose_done_raises_is_waited_for(host):
    processor = processor_class(prepare=lambda self, device: RaisingFuture("done"))
    with start(host, lambda history: 7):
        host.submit(request(2, [1], 3, logits_post_processor=processor))
        assert host.final(2).error == ""


class RaisingAttributes:
    def __getattribute__(self, name):
        raise SystemExit(name)


class RaisingList(list):
    def __iter__(self):
        raise ValueError("of a host")


HOSTILE_VALUES = {
    "an object": RaisingAttributes,
    "a list of one": lambda: [RaisingAttributes()],
    "a list": lambda: RaisingList([1]),
}


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("value", HOSTILE_VALUES)
def test_a_value_that_raises_when_it_is_looked_at_harms_neither_loop_nor_recording(
    host, tmp_path, value, writes
):
    path = tmp_path / "r.jsonl"
    options = params(
        recording_path=path if writes else None,
        black_box_path=None if writes else path,
        max_step_failures=1,
    )
    hostile = InferenceRequest(1, {"input_ids": HOSTILE_VALUES[value](), "request_output_len": 2})
    manager = start(host, failing(1), options=options)
    host.submit(hostile, request(2, [1], 2))
    assert host.final(1).error.startswith("InvalidRequestError") and host.final(2).error == ""
    assert manager.state is ManagerState.RUNNING
    host.submit(request(3, [1], 9))
    assert host.final(3).error and manager.wait(30)
    assert manager.recording_error == ""
    assert isinstance(manager.exception, FloatingPointError)
    assert replay(read_recording(path)).divergence is None


# Iterations that raise -----------------------------------------------------------------------


def failing(times):
    """A model's choice that raises so many times."""
    left = [times]

    def choose(history):
        if len(history) == 4 and left[0]:
            left[0] -= 1
            raise FloatingPointError("the network is broken")
        return 7

    return choose


def test_a_failed_step_ends_those_that_ran_and_the_loop_goes_on(host):
    options = params(max_active_requests=None, max_batch_size=2)
    with start(host, failing(1), options=options) as manager:
        host.submit(*(request(i, [1], 20) for i in range(5)))
        errors_ = [host.final(i).error for i in range(5)]
        assert manager.wait_idle(30)
        assert manager.state is ManagerState.RUNNING and manager.exception is None
        report = manager.audit()
        assert report.ok and report.used_blocks == 0
    assert errors_[:2] == 2 * [
        "StepError: Encountered an error in forwardAsync function: FloatingPointError: the "
        "network is broken"
    ]
    assert errors_[2:] == ["", "", ""]


def test_steps_between_failures_start_the_count_anew(host):
    with start(host, failing(5), options=params(max_step_failures=2)) as manager:
        for i in range(5):
            host.submit(request(i, [1], 20))
            assert host.final(i).error.startswith("StepError")
        assert manager.wait_idle(30) and manager.state is ManagerState.RUNNING


def test_failures_in_a_row_end_the_manager(host):
    def explode(history):
        raise FloatingPointError

    manager = start(host, explode, options=params(max_step_failures=3, max_batch_size=1))
    for i, name in enumerate(["StepError", "StepError", "ManagerDeadError"]):
        host.submit(request(i, [1], 20))
        assert host.final(i).error.startswith(name)
    assert manager.wait(30) and manager.state is ManagerState.FAILED
    assert isinstance(manager.exception, FloatingPointError)


@pytest.mark.parametrize("options", [{"run_ahead": 1}, {"enable_trt_overlap": True}], ids=str)
def test_results_that_raise_in_a_row_end_the_manager_though_launches_succeed(
    host, monkeypatch, options
):
    def lost(executor, step):
        raise FloatingPointError

    monkeypatch.setattr(TorchExecutor, "result", lost)
    manager = start(host, options=params(max_step_failures=3, max_batch_size=1, **options))
    for i, name in enumerate(["StepError", "StepError", "ManagerDeadError"]):
        host.submit(request(i, [1], 20))
        assert host.final(i).error.startswith(name)
    assert manager.wait(30) and manager.state is ManagerState.FAILED
    assert isinstance(manager.exception, FloatingPointError)


@pytest.mark.parametrize("writes", [False, True])
def test_a_state_that_cannot_be_recorded_ends_the_recording_alone(
    host, tmp_path, monkeypatch, writes
):
    def untold(loop):
        raise MemoryError

    path = tmp_path / "r.jsonl" if writes else None
    options = params(recording_path=path, black_box_path=tmp_path / "b.jsonl")
    with start(host, failing(1), options=options) as manager:
        monkeypatch.setattr(TokenLoop, "state", untold)
        for i in range(4):
            host.submit(request(i, [1], 5))
            host.final(i)
        assert manager.wait_idle(30) and manager.state is ManagerState.RUNNING
        assert "MemoryError" in manager.recording_error


def test_accounts_that_do_not_hold_end_the_manager(host, monkeypatch):
    def unsound(loop):
        report = audit(loop)
        return type(report)(False, ("block 3 is lost",), 1, 1, 0, {})

    monkeypatch.setattr("gptmanager.manager.recovery.audit", unsound)
    manager = start(host, failing(1))
    host.submit(request(1, [1], 20))
    assert host.final(1).error.startswith("StepError")
    assert manager.wait(30) and manager.state is ManagerState.FAILED
    assert "block 3 is lost" in str(manager.exception)


def test_an_audit_finds_a_slot_that_is_free_twice(host):
    with start(host, failing(0)) as manager:
        assert manager.wait_idle(30) and manager.audit().ok
        free_slots = manager._worker.loop.allocator._free_slots
        free_slots.append(free_slots[0])
        (problem,) = manager.audit().problems
        del free_slots[-1]
    assert problem.startswith("a slot is free twice")


def test_nothing_that_a_failed_step_was_to_compute_is_found_again(host):
    options = params(
        kv_cache_config=KvCacheConfig(max_tokens=256, tokens_per_block=4, enable_block_reuse=True)
    )
    prompt = list(range(1, 18))

    def choose(history):
        if history[-1] == 17 and not told:
            told.append(1)
            raise FloatingPointError
        return 7

    told = []
    with start(host, choose, options=options) as manager:
        host.submit(request(1, prompt, 4))
        assert host.final(1).error.startswith("StepError")
        host.submit(request(2, prompt, 4))
        assert host.final(2).error == "" and manager.wait_idle(30)
        metrics = host.final(2).tensors["request_metrics"]
    assert metrics[REQUEST_METRICS.index("cached_tokens")] == 0


def test_a_failed_recovery_still_answers_everybody(host, monkeypatch):
    def fails(self):
        raise MemoryError("again")

    monkeypatch.setattr("gptmanager.loop.allocation.Allocator.reset", fails)
    manager = start(host, failing(1), options=params(max_batch_size=2, max_active_requests=None))
    host.submit(*(request(i, [1], 20) for i in range(5)))
    finals = [host.final(i).error for i in range(5)]
    assert manager.wait(30) and manager.state is ManagerState.FAILED
    assert all("Error" in text for text in finals)
    assert sorted(r.request_id for r in host.responses if r.is_final) == list(range(5))


# A failure anywhere --------------------------------------------------------------------------


class Ground:
    """A loop over the true host, without a thread; `trip` raises at a call that it is told."""

    def __init__(self, **options):
        self.driver = LoopDriver(**options)
        self.callbacks = RecordingCallbacks()
        self.host = CallbackHost(
            self.callbacks.get_inference_requests,
            self.callbacks.send_response,
            self.callbacks.poll_stop_signal,
            self.callbacks.return_batch_manager_stats,
            max_get_failures=1000,
        )
        self.loop = self.driver.loop
        self.loop.table.host = self.host
        self.recovery = Recovery(self.host, Recorder(keep=0), 1 << 30)
        self.num_failures = 0

    def run(self, trip):
        """Until nothing is left; True if `trip` has raised."""
        while self.callbacks._waiting or self.host.holds_requests or self.loop.holds_requests:
            try:
                with trip:
                    self.loop.iterate()
            except MemoryError as error:
                self.num_failures += 1
                self.recovery.recover(self.loop, error)
        while self.loop.pending:
            self.loop.iterate()


class Trip:
    """Raises MemoryError as the `at`-th function of the package is entered within the blocks."""

    def __init__(self, at):
        self.left = at
        self.where = ""
        # kept: CPython 3.11 once called the object that lay where a freed bound method had been
        self._traced = self._trace

    def __enter__(self):
        sys.settrace(self._traced)

    def __exit__(self, *error):
        sys.settrace(None)

    def _trace(self, frame, event, argument):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE) and "testing" not in name:
            if self.left == 0:
                self.where = f"{Path(name).name}: {frame.f_code.co_name}"
                self.left = -1
                raise MemoryError("injected")
            self.left -= 1
        return None


class Nothing:
    def __enter__(self):
        pass

    def __exit__(self, *error):
        pass


MODES = [
    {},
    {"run_ahead": 1},
    {"overlap": True},
    {"num_stages": 3},
    {"reuse": True, "chunked": True, "max_num_tokens": 8},
]


def requests_of(seed):
    chance = random.Random(seed)
    kinds = [
        {},
        {"is_streaming": True},
        {"beam_width": 2},
        {"end_id": 3},
        {"stop_words_list": [[5], [7, 9]]},
        {"deadline_s": 1e9},
        {"return_log_probs": True},
    ]
    return [
        request(i, [chance.randrange(20) for _ in range(chance.randint(1, 9))],
                chance.randint(1, 6), **chance.choice(kinds))
        for i in range(6)
    ]  # fmt: skip


def check(ground, where):
    finals = [r.request_id for r in ground.callbacks.responses if r.is_final]
    assert sorted(finals) == list(range(6)), where
    report = audit(ground.loop)
    assert report.ok and report.used_blocks == 0, (where, report.problems)
    assert not ground.loop.table.by_id and not ground.loop.active, where
    for response in ground.callbacks.responses:
        if response.is_final and not response.error:
            assert "output_ids" in response.tensors


# a generator that is given up runs to its end, and raises there as well
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.timeout(60 * FUZZ)
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.every(2)
def test_a_failure_at_any_call_costs_no_final_and_no_block(mode):
    """Every call of a short run in turn; in the small trial every so-manieth."""
    step = max(1, 60 // FUZZ)
    num_tripped = 0
    for at in itertools.count(start=step // 2, step=step):
        ground, trip = Ground(**mode), Trip(at)
        ground.callbacks.submit(*requests_of(at))
        ground.run(trip)
        check(ground, f"{trip.where} (call {at})")
        if trip.left >= 0:
            break
        num_tripped += 1
        # and what comes after it is served as ever
        ground.callbacks.submit(request(9, [1, 2], 5))
        ground.run(Nothing())
        history = ground.callbacks.output(9)
        assert history == [1, 2] + expected_output([1, 2], 5), trip.where
    assert num_tripped > 10


def test_requests_that_only_the_host_knows_are_answered_at_an_end(host):
    """What Get has returned in the very turn that fails is the manager's to answer."""

    def get(room):
        taken = host.get_inference_requests(room)
        if taken:
            ready.set()
        return taken

    ready = threading.Event()
    manager = start(host, get_inference_requests_cb=get)
    manager._host.preparation.collect = raising(SystemExit("of a broken loop"))
    host.submit(request(1, [1], 3), request(2, [1], 3))
    assert ready.wait(30) and manager.wait(30)
    assert manager.state is ManagerState.FAILED
    assert sorted(r.request_id for r in host.responses if r.is_final) == [1, 2]


@pytest.mark.parametrize("options", [{}, {"reuse": True}, {"reuse": True, "num_host_blocks": 4}])
def test_accounts_that_begin_anew_are_sound_whatever_they_were(options):
    driver = LoopDriver(**options)
    driver.submit(*(request(i, list(range(9)), 4, is_streaming=True) for i in range(9)))
    for _ in range(3):
        driver.loop.iterate()
    kv_cache = driver.kv_cache
    counts = kv_cache.reuse_counts
    kv_cache._pool.free.clear()
    kv_cache._pool.ref_counts[3] += 7
    driver.loop.recover(errors.StepError("of the test"))
    kv_cache.check()
    assert kv_cache.get_num_free_blocks() == kv_cache.get_max_resource_count()
    assert kv_cache.reuse_counts == counts._replace(cached_blocks=0, cached_host_blocks=0)
    driver.run()
    assert {r.request_id for r in driver.host.callbacks.responses if r.is_final} == set(range(9))


# Recorded runs -------------------------------------------------------------------------------


class FailsAt(ScriptedModel):
    """Raises in the forward passes whose numbers it is told."""

    def __init__(self, numbers):
        super().__init__(next_token, vocab_size=VOCAB_SIZE)
        self.numbers = set(numbers)
        self.num_called = 0

    def forward(self, batch, kv_pool):
        self.num_called += 1
        if self.num_called in self.numbers:
            raise RuntimeError("the device is on fire")
        return super().forward(batch, kv_pool)


def recorded(path, reuse=False, fails=(4, 9, 10), **options):
    script = [[recorded_request(i, 3 + i, 12)] for i in range(14)]
    cache = KvCacheConfig(max_tokens=96, tokens_per_block=4, enable_block_reuse=reuse)
    model = FailsAt(fails)
    return record(
        path, ScheduledHost(script), MAX_UTILIZATION, kv_cache=cache, model=model, **options
    )


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("reuse", [False, True])
def test_a_recording_goes_on_after_failed_iterations_and_replays(tmp_path, run_ahead, reuse):
    run = recorded(tmp_path / "run.jsonl", run_ahead=run_ahead, reuse=reuse)
    failed = [turn.index for turn in run.iterations if turn.recovered is not None]
    assert len(failed) == 3 and run.end.reason == "drained"
    report = replay(run)
    assert report.divergence is None and not report.broke_off
    assert report.compared == len(run.iterations) - 3 > 10
    assert len(trace_of(run).rows) == 14
    figures = simulate(run.header.blueprint, RecordedLoad(run), CostModel())
    assert figures.requests == 14
    # A token that is another one behind the failures is found
    late = next(t for t in run.iterations if t.index > failed[-1] + 2 and t.schedule is not None)
    wrong = replace(late, schedule=replace(late.schedule, iteration=late.schedule.iteration + 1))
    changed = tuple(wrong if turn is late else turn for turn in run.iterations)
    assert replay(replace(run, iterations=changed)).divergence.index == late.index


@pytest.mark.parametrize("name", ["take_intake", "Iteration"])
def test_a_recording_of_a_fetch_that_failed_replays_or_ends(tmp_path, monkeypatch, name):
    """The requests that had started end without an iteration."""
    owner = CallbackHost if name == "take_intake" else recorder_module
    called, count = getattr(owner, name), itertools.count()

    def failing(*given):
        if next(count) == 6:
            raise MemoryError
        return called(*given)

    monkeypatch.setattr(owner, name, failing)
    path = tmp_path / "run.jsonl"
    run = recorded(path, fails=())
    report = replay(run)
    assert report.divergence is None and not report.broke_off
    if name == "take_intake":
        assert sum(turn.recovered is not None for turn in run.iterations) == 1
        assert run.end.reason == "drained" and len(trace_of(run).rows) == 14
    else:
        assert run.end is None


def test_the_black_box_has_the_last_failure_after_a_step(tmp_path):
    path = tmp_path / "box.jsonl"
    box = recorded(path, black_box_path=path, black_box_iterations=8)
    assert box.end.reason == "failed" and "on fire" in box.end.error
    report = replay(box)
    assert report.divergence is None and report.broke_off


def test_stops_after_the_one_that_fails_are_not_lost(monkeypatch):
    driver = LoopDriver(max_batch_size=1)
    driver.submit(*(request(i, [i], 9) for i in range(1, 4)))
    driver.loop.iterate()
    driver.host.stops = {2, 3}  # told once
    release = driver.loop.allocator.release

    def fails_once(released):
        monkeypatch.setattr(driver.loop.allocator, "release", release)
        raise MemoryError

    monkeypatch.setattr(driver.loop.allocator, "release", fails_once)
    with pytest.raises(MemoryError):
        driver.loop.iterate()
    driver.loop.confirmation.failing.add(1)  # like a failed row of a step
    driver.loop.recover(errors.StepError("of the test"))
    assert driver.loop.state().failing == ()
    driver.run()
    assert [driver.final(i).error for i in (1, 2)] == 2 * ["StepError: of the test"]
    reason = FinishReason(int(driver.final(3).tensors["finish_reasons"]))
    assert reason is FinishReason.CANCELLED


def test_what_a_journal_restored_goes_on_after_an_intake_that_failed(monkeypatch):
    driver = LoopDriver()
    driver.submit(request(1, [1], 9))
    driver.loop.iterate()
    fetch = driver.host.fetch
    progress = Progress(2, (7, 7), (), num_sent=0, age_s=0.5)

    def fetch_restored(room, num_active):
        monkeypatch.setattr(driver.host, "fetch", fetch)
        driver.submit(request(2, [5, 6], 6, is_streaming=True))
        return replace(fetch(room, num_active), stops=frozenset({1}), resumed=(progress,))

    def fails(released):
        raise MemoryError

    monkeypatch.setattr(driver.host, "fetch", fetch_restored)
    with monkeypatch.context() as failing:
        failing.setattr(driver.loop.allocator, "release", fails)
        with pytest.raises(MemoryError):
            driver.loop.iterate()
    driver.loop.recover(errors.StepError("of the test"))
    restored = LoopDriver().loop.table
    restored.restore(driver.loop.table.state())
    assert restored.state().resumed == (progress,)
    driver.loop.iterate()
    resumed = driver.loop.table.by_id[2]
    assert resumed.arrival_time == resumed.times.arrival == driver.host.now - 0.5
    driver.run()
    assert driver.output(2) == [7, 7, *expected_output([5, 6, 7, 7], 4)]


def test_processors_that_are_never_ready_are_forgotten_with_their_requests():
    timer = CallbackTimer("prepare")
    preparation = Preparation(lambda: None, timer)
    never = processor_class(prepare=lambda self, device: Future())
    for request_id in range(1000):
        waiting = RequestProcessor(never)
        preparation.begin(request_id, waiting)
        if request_id % 100:
            waiting.end()
    assert len(preparation._preparing) < 100
    assert preparation._preparing.keys() >= {100 * i for i in range(10)}
    assert timer.calls == 1000 and not timer.running_s


def test_a_processor_of_an_ended_request_makes_no_other_request_of_its_id_ready():
    preparation, prepared = Preparation(lambda: None, CallbackTimer("prepare")), Future()
    early = RequestProcessor(processor_class(prepare=lambda self, device: prepared))
    late = processor_class(prepare=lambda self, device: Future())
    preparation.begin(1, early)
    early.end()
    prepared.set_result(None)
    preparation.collect([InferenceRequest(1, logits_post_processor=late)])
    assert not preparation.ready and not preparation._preparing
