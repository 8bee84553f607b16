"""Managers of several ranks: one schedule for all, and one end."""

from __future__ import annotations

import gc
import json
import os
import select
import shutil
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import orjson
import pytest
import torch
from pausing import PausingHost
from rank_hosts import TINY, serving
from rank_hosts import start as start_all
from rank_links import at_once
from safetensors.torch import load_file
from shorthand import request

from gptmanager import (
    CapacitySchedulerPolicy,
    KvCacheConfig,
    ModelType,
    ParallelConfig,
    SchedulerConfig,
)
from gptmanager.assembly import rank_options, ranks
from gptmanager.assembly.cpu_backend import CpuBackend
from gptmanager.errors import ConfigError, RankError
from gptmanager.host.rank_answers import answers_difference, answers_of
from gptmanager.lifecycle.state import ManagerState
from gptmanager.manager import stall_watch
from gptmanager.recorder.requests import RecordedPreparation
from gptmanager.recorder.values import to_json
from gptmanager.scheduler import RequestScheduler
from gptmanager.testing import RecordingCallbacks

STOPPED, FAILED = ManagerState.STOPPED, ManagerState.FAILED


def serve(it, count=3, first=0):
    """Requests of rank 0's host, answered without error."""
    it.host.submit(*(request(i, [1, 2, 3 + i], 6) for i in range(first, first + count)))
    return [it.host.final(i) for i in range(first, first + count)]


def errors(found):
    """After the end: the text of each rank's failure."""
    at_once(lambda it: it.wait(30), found)
    assert [it.state for it in found] == [FAILED] * len(found)
    return [str(it.exception) for it in found]


def new_hosts(*requests):
    """Return hosts of two ranks, each with its own requests."""
    given = requests or ((), ())
    return [RecordingCallbacks([request(*it) for it in own]) for own in given]


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_do_what_rank_0_was_asked(monkeypatch, size):
    with serving(monkeypatch, size) as it:
        finals = serve(it)
        assert [final.error for final in finals] == [""] * 3
        assert all(not host.responses and not host.rooms for host in it.hosts[1:])
        assert [manager.audit().ok for manager in it.managers] == [True] * size
    assert [manager.state for manager in it.managers] == [STOPPED] * size


def test_with_the_option_all_ranks_answer_their_hosts(monkeypatch):
    with serving(monkeypatch, 2, parallel={"respond_on_all_ranks": True}) as it:
        serve(it)
        it.managers[1].wait_idle(30)
        it.host.stop(7)
        it.host.submit(request(7, [1], 50))
        it.host.final(7)
    ours, others = (
        {i: host.of(i)[0].tensors["output_ids"].tolist() for i in (0, 1, 2, 7)} for host in it.hosts
    )
    assert ours == others
    assert len(it.hosts[1].statistics) == len(it.host.statistics)


# Idle followers --------------------------------------------------------------------------------


def test_an_idle_rank_answers_its_host(monkeypatch):
    with serving(monkeypatch, 2) as it:
        idle = it.managers[1]
        for _ in range(2):
            assert idle.wait_idle(30)
            assert idle.audit(10).ok
            assert idle.explain(5, 10).text
            assert idle.would_fit(request(5, [1], 3), 10)
            idle.notify()
            idle.clear_cached()
            idle.forget_adapter(3)
            assert idle.health().alive
            serve(it)


def test_a_rank_answers_its_host_while_rank_0_is_paused(monkeypatch):
    hosts = [PausingHost(lambda of_all, *_: of_all == 1), RecordingCallbacks()]
    with serving(monkeypatch, 2, hosts) as it:
        it.host.submit(request(1, [1, 2], 6, is_streaming=True))
        while not it.host.responses:
            time.sleep(0.001)
        other = it.managers[1]
        assert other.audit(20).ok and other.explain(1, 20).reason == "running"
        monkeypatch.setattr(stall_watch, "monotonic", lambda: time.monotonic() + 60)
        while not other.health().progressing:  # until the paused loop has looked at the clock
            time.sleep(0.001)
        assert other.health().num_active == 1
        it.managers[0].resume_generation()
        assert it.host.final(1).error == ""


def test_a_rank_is_idle_when_a_call_has_finished_its_last_request(monkeypatch):
    """The last token of the request is in flight when both ranks make the call."""
    hosts = [PausingHost(lambda of_all, *_: of_all == 5), RecordingCallbacks()]
    alike = {"run_ahead": 1}
    with serving(monkeypatch, 2, hosts, by_rank={0: alike, 1: alike}) as it:
        it.host.submit(request(1, [1, 2], 6, is_streaming=True))
        while len(it.host.responses) < 5:
            time.sleep(0.001)
        at_once(lambda manager: manager.update_weights({}, timeout=20), it.managers)
        assert it.host.final(1, 20).error == ""
        it.managers[0].resume_generation()
        assert all(manager.audit(5).ok for manager in it.managers)
    assert [manager.state for manager in it.managers] == [STOPPED] * 2


def test_a_rank_that_is_rung_between_the_last_response_and_the_last_step_waits(monkeypatch):
    """With run-ahead, one more step than needed is in flight after a request has ended early."""
    hosts = [PausingHost(lambda of_all, of_request, is_final: is_final), RecordingCallbacks()]
    alike = {"run_ahead": 1}
    with serving(monkeypatch, 2, hosts, by_rank={0: alike, 1: alike}) as it:
        it.host.submit(request(1, [1, 2], 60, end_id=[*range(256)]))
        assert it.host.final(1, 20).error == ""
        loop = it.managers[1]._worker.loop
        while loop.holds_requests or not loop.pending:
            time.sleep(0.001)
        it.managers[1].notify()
        time.sleep(0.1)
        it.managers[0].resume_generation()
        assert all(manager.audit(10).ok for manager in it.managers)
        serve(it, first=5)
    assert [manager.state for manager in it.managers] == [STOPPED] * 2


def test_a_rank_that_is_rung_in_the_middle_of_an_iteration_hears_it(monkeypatch):
    """While it waits for rank 0, and for nothing else."""
    with serving(monkeypatch, 2) as it:
        hosts = [manager._worker._loop_host for manager in it.managers]
        first, second = (host._executor for host in hosts)
        decide, goes_on, waits = first.on_decision, threading.Event(), threading.Event()
        first.on_decision = lambda schedule: goes_on.wait(30) and decide(schedule)
        check = second.on_decision
        second.on_decision = lambda schedule: waits.set() or check(schedule)
        it.host.submit(request(1, [1, 2], 3))
        assert waits.wait(30)
        found = []
        asking = threading.Thread(target=lambda: found.append(it.managers[1].wait_idle(30)))
        asking.start()
        bell = hosts[1]._links._wakener.fileno()
        while not it.managers[1]._inbox._idle_waits or select.select([bell], [], [], 0)[0]:
            time.sleep(0.001)
        goes_on.set()
        assert it.host.final(1).error == ""
        asking.join(20)
        assert found == [True]


def test_resting_longer_than_the_timeout_is_not_a_failure_and_costs_nothing(monkeypatch):
    with serving(monkeypatch, 2, parallel={"timeout_s": 1}) as it:
        serve(it)
        before, began = time.process_time(), time.monotonic()
        time.sleep(1.3)
        used, passed = time.process_time() - before, time.monotonic() - began
        assert [manager.state for manager in it.managers] == [ManagerState.RUNNING] * 2
        serve(it, first=10)
    assert used < passed / 3  # 1 % of a core for each of two managers; a loop that spins uses all


# The end ---------------------------------------------------------------------------------------


def test_an_abort_of_rank_0_reaches_all(monkeypatch):
    with serving(monkeypatch, 2) as it:
        it.host.submit(*(request(i, [1, 2], 100) for i in range(4)))
        while not it.host.statistics:
            time.sleep(0.01)
        it.managers[0].shutdown(drain=False)
        assert it.managers[1].wait(30)
        texts = {it.host.final(i).error[:17] for i in range(4)} - {""}
    assert texts <= {"ManagerDeadError:"}
    assert [manager.state for manager in it.managers] == [STOPPED] * 2


def test_a_drain_of_rank_0_reaches_all_and_ends_nothing_early(monkeypatch):
    with serving(monkeypatch, 2) as it:
        it.host.submit(*(request(i, [1, 2], 60) for i in range(4)))
        while not it.host.statistics:  # idle iterations call Get as well
            time.sleep(0.01)
        it.managers[0].shutdown()
        assert it.managers[1].wait(30)
        assert [it.host.final(i).error for i in range(4)] == [""] * 4


def test_another_rank_waits_with_a_drain_and_ends_all_with_an_abort(monkeypatch):
    hosts = [PausingHost(lambda of_all, *_: of_all == 4), RecordingCallbacks()]
    with serving(monkeypatch, 2, hosts) as it:
        waiting = threading.Thread(target=it.managers[1].shutdown)
        waiting.start()
        assert [final.error for final in serve(it)] == [""] * 3
        assert waiting.is_alive()
        it.host.submit(request(50, [1], 100, is_streaming=True))
        while not it.host.of(50):
            time.sleep(0.001)
        it.managers[1].shutdown(drain=False)
        waiting.join(30)
        first, second = errors(it.managers)
        assert second == "rank 1 was shut down"
        assert first == "rank 1 failed: RankError: rank 1 was shut down"
        assert it.host.final(50).error.startswith("RankError: rank 1 failed")


def test_what_ends_one_rank_ends_all(monkeypatch):
    with serving(monkeypatch, 2) as it:
        serve(it)
        executor = it.managers[1]._worker.loop.executor

        def forward(schedule):
            raise ValueError("no such step")

        monkeypatch.setattr(executor, "forward", forward, raising=False)
        it.host.submit(*(request(i, [1], 50) for i in range(20, 24)))
        finals = [it.host.final(i).error for i in range(20, 24)]
        assert len(it.host.responses) == 7
        first, second = errors(it.managers)
    assert second == "no such step"
    assert first == "rank 1 failed: ValueError: no such step"
    assert set(finals) == {"RankError: rank 1 failed: ValueError: no such step"}


class Lazy(RequestScheduler):
    """Runs only the first of all requests, from its 4th call on."""

    def __init__(self, inner):
        self.inner, self.calls = inner, 0

    def schedule_request(self, active_requests, inflight_request_ids):
        self.calls += 1
        some = active_requests if self.calls < 4 else active_requests[:1]
        return self.inner.schedule_request(some, inflight_request_ids)


def test_a_rank_that_decides_otherwise_is_named_with_the_first_difference(monkeypatch):
    """It names the iteration; nobody goes on with other requests' tokens."""
    with serving(monkeypatch, 2) as it:
        loop = it.managers[1]._worker.loop
        loop.scheduler = Lazy(loop.scheduler)
        it.host.submit(*(request(i, [1, 2, 3], 30) for i in range(3)))
        first, second = errors(it.managers)
        assert {it.host.final(i).error for i in range(3)} == {f"RankError: {first}"}
    assert first == second
    text = "rank 1 decided differently in iteration 3: schedule.generation_rows[1] is 'nothing', on"
    assert first.startswith(f"{text} rank 0 [1, ")


# Own means -------------------------------------------------------------------------------------


def test_hosts_of_all_ranks_may_provide_the_requests(monkeypatch):
    given = [(i, [1, 2, 3 + i], 6) for i in range(6)]
    hosts = new_hosts(given, given)
    with serving(monkeypatch, 2, own_means=True, hosts=hosts) as it:
        assert [it.host.final(i).error for i in range(6)] == [""] * 6
        it.host.manager.wait_idle(30)
        assert not it.hosts[1].responses
        assert it.hosts[1].rooms[:1] == it.host.rooms[:1]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            [(0, [1, 2, 4], 6)],
            "request 0 with input_ids = [1, 2, 4] (<i8 [3]), not [1, 2, 3] (<i8 [3])",
        ),
        (
            [(0, [1, 2, 3], 7)],
            "request 0 with request_output_len = [7] (<i8 []), not [6] (<i8 [])",
        ),
        ([(1, [1, 2, 3], 6)], "the requests [1], not [0]"),
        ([], "the requests [], not [0]"),
        ([(0, [1, 2, 3], 6), (1, [1], 3)], "the requests [0, 1], not [0]"),
    ],
)
def test_answers_of_get_that_differ_end_all_in_the_same_words(monkeypatch, given, text):
    hosts = new_hosts([(0, [1, 2, 3], 6)], given)
    with serving(monkeypatch, 2, own_means=True, hosts=hosts) as it:
        first, second = errors(it.managers)
        assert it.host.final(0).error == f"RankError: {first}"
    assert first == second
    assert first == f"rank 1 differs from rank 0: GetInferenceRequests returned {text}"


def test_a_request_that_only_another_rank_gets_ends_all(monkeypatch):
    with serving(monkeypatch, 2, own_means=True) as it:
        it.hosts[1].submit(request(4, [1], 3))
        first, second = errors(it.managers)
    text = "GetInferenceRequests returned the requests [4], not []"
    assert first == second == f"rank 1 differs from rank 0: {text}"


def test_stops_that_differ_end_all(monkeypatch, caplog):
    hosts = new_hosts([(3, [1], 100)], [(3, [1], 100)])
    hosts[1].stop(3)
    with serving(monkeypatch, 2, own_means=True, hosts=hosts) as it:
        first, second = errors(it.managers)
        assert it.host.final(3).error == f"RankError: {first}"
    assert first == second == "rank 1 differs from rank 0: PollStopSignal returned [3], not []"
    told = [it for it in caplog.records if it.getMessage() == f"the token loop has failed: {first}"]
    assert len(told) == 2, "one sentence on each rank"
    assert not any(it.exc_info for it in caplog.records)


# Post-processors of each rank's own host ---------------------------------------------------


class Prepared:
    """A post-processor that is ready when its future is, which it may be at once."""

    name = "prepared"

    def __init__(self, outcome=None, *, at_once=True):
        self.ready, self.outcome, self.calls = Future(), outcome, 0
        self.is_awaited, self.called = threading.Event(), threading.Event()
        if at_once:
            self.end()

    def end(self):
        if isinstance(self.outcome, Exception):
            self.ready.set_exception(self.outcome)
        else:
            self.ready.set_result(None)

    def prepare(self, device):
        self.is_awaited.set()
        return self.ready

    def __call__(self, request_id, logits, tokens, stream, client_id):
        self.calls += 1
        self.called.set()


def with_processors(*processors):
    """A host a rank, each of which has the same requests with a processor of its own."""
    return [
        RecordingCallbacks([request(5, [1, 2], 4, logits_post_processor=own)]) for own in processors
    ]


@pytest.mark.parametrize("at_once", [True, False])
def test_each_rank_prepares_what_its_own_host_gives(monkeypatch, at_once):
    own = Prepared(at_once=at_once), Prepared(at_once=at_once)
    parallel = {"replicate_logits_post_processors": True}
    hosts = with_processors(*own)
    with serving(monkeypatch, 2, own_means=True, hosts=hosts, parallel=parallel) as it:
        for processor in own:
            assert processor.is_awaited.wait(30)
            if not at_once:
                processor.end()
        assert it.host.final(5).error == ""
    assert [processor.calls for processor in own] == [4, 4]


class ReusingHost(RecordingCallbacks):
    """Returns a request, stops it, and returns another one of the same id."""

    def __init__(self, first, second):
        super().__init__()
        self.answers = {1: first, 9: second}
        self.num_gets = self.num_polls = 0

    def get_inference_requests(self, room):
        self.num_gets += 1
        own = self.answers.get(self.num_gets)
        return [] if own is None else [request(5, [1, 2], 4, logits_post_processor=own)]

    def poll_stop_signal(self):
        self.num_polls += 1
        return [5] if self.num_polls == 3 else []


def test_a_rank_awaits_its_own_processor_also_for_an_id_that_was_ready_before(monkeypatch):
    # Given a request that ends when only rank 1 is ready for it, and another one of its id
    late = Prepared(at_once=False)
    hosts = [ReusingHost(Prepared(at_once=False), Prepared()), ReusingHost(Prepared(), late)]
    parallel = {"replicate_logits_post_processors": True}
    with serving(monkeypatch, 2, own_means=True, hosts=hosts, parallel=parallel) as it:
        # When rank 0 is ready for that one, and rank 1 is not
        assert late.is_awaited.wait(30)
        is_called = late.called.wait(0.05)
        late.end()
        assert it.managers[0].wait_idle(30)
    assert [response.error for response in it.host.responses] == ["", ""] and not is_called


class DuplicatingHost(RecordingCallbacks):
    """Returns a request, then another one of its id while the first becomes ready."""

    def __init__(self, own):
        super().__init__()
        self.own, self.num_gets = own, 0

    def get_inference_requests(self, room):
        self.num_gets += 1
        if self.num_gets == 4:
            self.own.end()
        given = {1: {"logits_post_processor": self.own}, 4: {}}.get(self.num_gets)
        return [] if given is None else [request(5, [1, 2], 4, **given)]


def test_a_duplicate_of_a_request_that_becomes_ready_ends_no_rank(monkeypatch):
    own = Prepared(at_once=False), Prepared(at_once=False)
    hosts = [DuplicatingHost(it) for it in own]
    parallel = {"replicate_logits_post_processors": True}
    with serving(monkeypatch, 2, own_means=True, hosts=hosts, parallel=parallel) as it:
        assert own[0].called.wait(30)
        assert it.managers[0].wait_idle(30)
    errors = [response.error.partition(":")[0] for response in hosts[0].responses]
    assert errors == ["DuplicateRequestIdError", ""]
    assert [processor.calls for processor in own] == [4, 4]


def test_a_rank_that_cannot_prepare_ends_the_others_with_its_text(monkeypatch):
    """None of them waits for it."""
    own = Prepared(), Prepared(LookupError("no such grammar"))
    parallel = {"replicate_logits_post_processors": True}
    hosts = with_processors(*own)
    with serving(monkeypatch, 2, own_means=True, hosts=hosts, parallel=parallel) as it:
        first, second = errors(it.managers)
        assert it.host.final(5).error == f"RankError: {first}"
    text = "logits_post_processor prepared cannot be prepared: LookupError: no such grammar"
    assert first == second == f"rank 1 failed: request 5: CallbackError: {text}"


def test_other_ranks_prepare_nothing_for_rank_0(monkeypatch):
    """What stands there for its processors could not be prepared."""
    own, prepared = Prepared(at_once=False), []
    hosts = with_processors(own, None)
    monkeypatch.setattr(
        RecordedPreparation, "prepare", lambda self, device: prepared.append(device)
    )
    with serving(monkeypatch, 2, hosts=hosts) as it:
        assert own.is_awaited.wait(30)
        own.end()
        assert it.host.final(5).error == ""
    assert prepared == []


# The handshake ---------------------------------------------------------------------------------


GREEDY = SchedulerConfig(CapacitySchedulerPolicy.MAX_UTILIZATION)


def tiny():
    """The checkpoint as a pair, which a test may change."""
    config = json.loads((Path(TINY) / "config.json").read_text())
    return config, load_file(Path(TINY) / "model.safetensors")


def without_a_tensor():
    config, tensors = tiny()
    tensors["extra"] = torch.zeros(1)
    return config, tensors


def with_another_value():
    config, tensors = tiny()
    return {**config, "rms_norm_eps": 1e-5}, tensors


@pytest.mark.parametrize(
    ("own", "text"),
    [
        ({"max_batch_size": 3}, "OptionalParams.max_batch_size = 3, not 4"),
        ({"seed": 1}, "OptionalParams.seed = 1, not 0"),
        ({"deterministic": True}, "OptionalParams.deterministic = True, not False"),
        (
            {"kv_cache_config": KvCacheConfig(max_tokens=512, tokens_per_block=16)},
            "KvCacheConfig.tokens_per_block = 16, not 8",
        ),
        ({"max_beam_width": 2}, "max_beam_width = 2, not 1"),
        (
            {"model_type": ModelType.INFLIGHT_BATCHING},
            "model_type = 'INFLIGHT_BATCHING', not 'INFLIGHT_FUSED_BATCHING'",
        ),
        (
            {"scheduler_config": GREEDY},
            "SchedulerConfig.capacity_scheduler_policy = 'MAX_UTILIZATION', not ",
        ),
        (
            {"get_inference_requests_cb": lambda room: []},
            "callbacks.broadcast is used = False, not True",
        ),
        ({"model_path": with_another_value}, "digest of config.json = "),
        ({"model_path": without_a_tensor}, "digest of the checkpoint's tensor headers = "),
    ],
)
def test_ranks_that_differ_end_with_the_same_sentence(monkeypatch, own, text):
    own = dict(own)
    own_path = own.get("model_path")
    if callable(own_path):
        own["model_path"] = own_path()
    path = tiny() if callable(own_path) else TINY
    found = start_all(monkeypatch, 2, new_hosts(), by_rank={0: {"model_path": path}, 1: own})
    assert [type(it) for it in found] == [RankError] * 2
    first, second = map(str, found)
    assert first == second
    assert first.startswith(f"rank 1 differs from rank 0: {text}")


def test_a_folder_that_one_rank_lacks_is_named(monkeypatch, tmp_path):
    by_rank = {1: {"model_path": tmp_path / "lost"}}
    first, second = map(str, start_all(monkeypatch, 2, new_hosts(), by_rank=by_rank))
    assert first == second
    assert f"none: the file {tmp_path / 'lost' / 'config.json'} does not exist" in first


def test_another_version_is_a_difference(monkeypatch):
    versions = iter(["1.0", "1.1"])
    platform = SimpleNamespace(python_version=lambda: next(versions))
    monkeypatch.setattr(rank_options, "platform", platform)
    first, second = start_all(monkeypatch, 2, new_hosts())
    assert str(first) == str(second)
    assert "rank 1 differs from rank 0: version of Python = '1." in str(first)


def test_hosts_of_own_means_must_all_poll_or_none(monkeypatch):
    by_rank = {1: {"poll_stop_signal_cb": None}}
    found = start_all(monkeypatch, 2, new_hosts(), own_means=True, by_rank=by_rank)
    text = "rank 1 differs from rank 0: poll_stop_signal_cb is given = False, not True"
    assert [str(it) for it in found] == [text] * 2


def test_what_a_rank_alone_has_may_differ(monkeypatch, tmp_path):
    by_rank = {1: {"black_box_path": tmp_path / "box"}, 0: {"recording_path": tmp_path / "r.jsonl"}}
    found = start_all(monkeypatch, 2, new_hosts(), by_rank=by_rank)
    at_once(lambda it: it.shutdown(), found)
    assert [it.state for it in found] == [STOPPED] * 2


@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize(
    ("own", "text"),
    [
        ({"max_batch_size": 0}, "OptionalParams.max_batch_size = 0 "),
        ({"send_response_cb": None}, "send_response_cb "),
        ({"parallel_config": ParallelConfig(2)}, "ParallelConfig.tensor_parallel_size = 2 x "),
    ],
)
def test_a_rank_that_may_not_start_sends_the_others_its_reason(monkeypatch, own, text, broken):
    """It never comes to what ranks compare."""
    found = start_all(monkeypatch, 3, new_hosts((), (), ()), by_rank={broken: own})
    blamed = found.pop(broken)
    assert isinstance(blamed, ConfigError) and str(blamed).startswith(text)
    assert [str(it) for it in found] == [f"rank {broken} failed: ConfigError: {blamed}"] * 2


def test_ranks_that_may_not_start_at_all_say_so_each(monkeypatch):
    found = start_all(monkeypatch, 2, new_hosts(), by_rank={0: {"seed": "x"}, 1: {"seed": "x"}})
    assert [type(it) for it in found] == [ConfigError] * 2


@pytest.mark.parametrize("broken", [0, 1])
def test_a_rank_whose_checkpoint_does_not_load_ends_the_others_with_its_text(
    monkeypatch, tmp_path, broken
):
    """It has the right headers, and fewer bytes than they say."""
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    (folder / "config.json").write_text("{")
    found = start_all(monkeypatch, 2, new_hosts(), by_rank={broken: {"model_path": folder}})
    assert all(isinstance(it, (ConfigError, RankError)) for it in found)


def test_a_rank_that_cannot_be_built_ends_the_others_with_its_text(monkeypatch):
    real = CpuBackend.load

    def load(self, source, params, own, *rest):
        if own.collectives.layout.rank == 1:
            raise ConfigError("the disk is gone")
        return real(self, source, params, own, *rest)

    monkeypatch.setattr(CpuBackend, "load", load)
    first, second = start_all(monkeypatch, 2, new_hosts())
    assert (type(first), str(first)) == (RankError, "rank 1 failed: ConfigError: the disk is gone")
    assert (type(second), str(second)) == (ConfigError, "the disk is gone")


def test_a_process_of_a_rank_looks_for_no_garbage_as_it_ends(monkeypatch):
    """Among the objects of torch that takes longer than all else."""
    registered = []
    monkeypatch.setattr(ranks.atexit, "register", registered.append)
    with serving(monkeypatch, 2) as it:
        serve(it)
    assert gc.freeze in registered


def test_starts_and_ends_leave_nothing_open(monkeypatch):
    def lives():
        with serving(monkeypatch, 2) as it:
            serve(it)
        start_all(monkeypatch, 2, new_hosts(), by_rank={1: {"seed": 1}})

    others = {*threading.enumerate()}  # threads of grammars that other tests keep
    lives()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        lives()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
    left = {*threading.enumerate()} - others
    assert not [it.name for it in left if it.name.startswith("gptmanager")]


# What a difference is called ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "here", "there", "text"),
    [
        ("priority", 0.5, 0.9, "priority = 0.9, not nothing"),
        ("cache_salt", "a", "b", "cache_salt = 'b', not 'a'"),
        ("temperature", None, np.float32(2), "temperature = 2.0, not nothing"),
        (
            "lora_weights",
            np.zeros((2, 9), np.float32),
            np.eye(2, 9, 8, dtype=np.float32),
            "[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, ...] (<f4 [2, 9]), not the same first "
            "values, but different later ones",
        ),
        (
            "stop_words_list",
            torch.ones(2, dtype=torch.bfloat16),
            torch.zeros(2, dtype=torch.bfloat16),
            "[0.0, 0.0] (torch.bfloat16 [2]), not [1.0, 1.0] (torch.bfloat16 [2])",
        ),
    ],
)
def test_a_difference_names_request_field_and_both_values(name, here, there, text):
    def answers(value):
        one = request(7, [1, 2], 3)
        if value is not None:
            setattr(one, name, value)
        return answers_of([one], [])

    plain = orjson.loads(to_json(answers(there)))
    told = answers_difference(answers(here), plain)
    assert told.startswith("GetInferenceRequests returned request 7 with ") and text in told
    same = answers_difference(answers(there), plain)
    assert same == "its host gave the same answers"
