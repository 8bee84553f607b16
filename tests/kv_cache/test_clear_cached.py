"""What was computed with other weights is never reused, whoever says that they were replaced."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
from checkpoints import CONFIGS, checkpoint, random_model
from loop_driver import AHEAD, LoopDriver, expected_output

from gptmanager import GptManager, InferenceRequest, KvCacheConfig, ModelType, OptionalParams
from gptmanager.errors import CapacityError, ManagerDeadError
from gptmanager.host.callback_host import CallbackHost
from gptmanager.kernels import CpuKernels
from gptmanager.loop.responses import REQUEST_METRICS
from gptmanager.models.model import load_model
from gptmanager.recorder.recording_file import read_recording
from gptmanager.replay import replay
from gptmanager.step import Failure, Intake
from gptmanager.testing import ContractChecker, RecordingCallbacks

SIZE = 8
PROMPT = list(range(30))


@pytest.fixture(scope="module")
def checkpoints():
    """Two of one shape."""
    return [checkpoint(random_model(CONFIGS["llama"], seed)) for seed in (1, 2)]


def loaded(source):
    return load_model(source, kernels=CpuKernels(deterministic=True))


class Served:
    """A manager with block reuse, held to its contract; one request after the other."""

    def __init__(self, model, host=None, **options):
        self.host = host or RecordingCallbacks()
        self.checker = ContractChecker(self.host.get_inference_requests, self.host.send_response)
        self.manager = GptManager(
            model,
            ModelType.INFLIGHT_FUSED_BATCHING,
            get_inference_requests_cb=self.checker.get_inference_requests,
            send_response_cb=self.checker.send_response,
            optional_params=OptionalParams(
                kv_cache_config=KvCacheConfig(
                    max_tokens=512, tokens_per_block=SIZE, enable_block_reuse=True
                ),
                deterministic=True,
                **options,
            ),
        )
        self.host.manager = self.manager

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.manager.__exit__(*error)
        self.checker.check(self.manager)

    def run(self, request_id):
        """The same prompt: what it gave, and how much of it was found."""
        self.host.submit(InferenceRequest.from_tokens(request_id, PROMPT, 6))
        assert self.manager.wait_idle(30)
        metrics = self.host.final(request_id).tensors["request_metrics"]
        cached = int(metrics[REQUEST_METRICS.index("cached_tokens")])
        return self.host.output(request_id), cached


def test_weights_replaced_in_place_are_noticed(checkpoints):
    with Served(loaded(checkpoints[1])) as served:
        new = served.run(1)[0]
    model = loaded(checkpoints[0])
    with Served(model) as served:
        old = served.run(1)[0]
        assert served.run(2) == (old, 29)
        model.weights.load(checkpoints[1][1])
        assert served.run(3) == (new, 0)
        assert served.run(4) == (new, 29)
    assert old != new


def test_the_cache_is_cleared_from_any_thread(checkpoints):
    with Served(loaded(checkpoints[0])) as served:
        served.run(1)
        assert served.run(2)[1] == 29
        thread = threading.Thread(target=served.manager.clear_cached)
        thread.start()
        thread.join()
        assert served.run(3)[1] == 0
        assert served.run(4)[1] == 29


class ClearingCallbacks(RecordingCallbacks):
    """Says that the weights were replaced when it hands out request 2."""

    def get_inference_requests(self, max_num_requests):
        requests = super().get_inference_requests(max_num_requests)
        if any(request.request_id == 2 for request in requests):
            self.manager.clear_cached()
        return requests


def test_a_callback_clears_the_cache_for_the_requests_that_it_returns(checkpoints):
    with Served(loaded(checkpoints[0]), ClearingCallbacks()) as served:
        assert [served.run(i)[1] for i in (1, 2, 3)] == [0, 0, 29]


def test_a_dead_manager_clears_nothing(checkpoints):
    class Broken:
        spec = loaded(checkpoints[0]).spec
        nbytes = 0

        def forward(self, batch, kv_pool):
            raise RuntimeError("broken")

    served = Served(Broken(), max_step_failures=1)
    served.host.submit(InferenceRequest.from_tokens(1, PROMPT, 6))
    assert served.host.final(1).error
    assert served.manager.wait(30)
    with pytest.raises(ManagerDeadError):
        served.manager.clear_cached()


def test_a_recording_replays_it(checkpoints, tmp_path):
    path = tmp_path / "run.jsonl"
    with Served(loaded(checkpoints[0]), recording_path=path) as served:
        served.run(1)
        served.manager.clear_cached()
        served.run(2)
        served.run(3)
    run = read_recording(path)
    assert [turn.intake.clears_cache for turn in run.iterations].count(True) == 1
    report = replay(run)
    assert report.divergence is None and report.compared == len(run.iterations)


def _request(request_id, prompt, new):
    return InferenceRequest.from_tokens(request_id, prompt, new)


class ClearingHost:
    """Lets a driver's host say in one intake that the cache is stale."""

    def __init__(self, driver, turn):
        self._fetch, self._turns = driver.host.fetch, turn
        driver.loop.table.host.fetch = self.fetch

    def fetch(self, room, num_active):
        intake = self._fetch(room, num_active)
        self._turns -= 1
        if self._turns:
            return intake
        return Intake(intake.now, intake.requests, intake.stops, clears_cache=True)


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_what_runs_meanwhile_leaves_nothing_to_be_found(run_ahead):
    prompt = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    driver = LoopDriver(reuse=True, run_ahead=run_ahead)
    ClearingHost(driver, turn=4)
    driver.submit(_request(1, prompt, 8))
    driver.run()
    assert driver.kv_cache.reuse_counts.cached_blocks == 0
    driver.submit(_request(2, prompt, 8))
    driver.run()
    assert driver.kv_cache.reuse_counts.reused_tokens == 0
    assert driver.output(1) == driver.output(2) == prompt + expected_output(prompt, 8)
    driver.submit(_request(3, prompt, 8))
    driver.run()
    assert driver.kv_cache.reuse_counts.reused_tokens == 8


@pytest.mark.parametrize(("options", "num_starts"), [({}, 1), *((own, 2) for own in AHEAD[1:])])
def test_what_began_with_blocks_that_were_not_computed_begins_again(options, num_starts):
    """There is no memory for the first step, whose prompt the second request shares."""
    driver, prompt = LoopDriver(reuse=True, **options), [*range(12)]
    executor, result = driver.executor, driver.executor.result

    def lossy(step):
        found = result(step)
        if step.schedule.iteration:
            return found
        lost = Failure(1, CapacityError("no memory for one token"))
        return replace(found, num_tokens=found.num_tokens * 0, failures=(lost,), stale=True)

    executor.result = lossy
    driver.submit(_request(1, prompt, 6))
    driver.loop.iterate()
    driver.submit(_request(2, [*prompt, 3], 6))
    driver.run()
    assert driver.output(2) == [*prompt, 3, *expected_output([*prompt, 3], 6)]
    rows = [row for schedule in executor.schedules[1:] for row in schedule.context_rows]
    assert [row.position for row in rows] == [12, 0][-num_starts:]


def test_a_host_says_it_once_and_loses_no_call():
    host = CallbackHost(lambda n: [], lambda *args: None, None, None, max_get_failures=1)
    version = [3]
    host.cache_invalidation.follow_weights(lambda: version[0])

    def clears():
        return host.fetch(None, 0).clears_cache

    assert not clears()
    host.cache_invalidation.clear()
    host.cache_invalidation.clear()
    assert clears() and not clears()
    version[0] = 4
    assert clears() and not clears()
