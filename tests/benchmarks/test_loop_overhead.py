"""What one iteration costs the host: everything of a manager but its thread and its network.

The executor returns one prepared array, so what is measured is `TokenLoop.iterate` with the
policy, the accounting, the responses, the statistics and the four callbacks. Goal, as the median
on a quiet core: at most 50 us and 2 us per active request, 6 us where every request streams.
`make test` runs each once; `make bench` times them.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest

from gptmanager import InferenceRequest, KvCacheConfig, OptionalParams, SchedulerConfig
from gptmanager.assembly.blueprint import Blueprint, build_loop
from gptmanager.assembly.sizing import Sizes
from gptmanager.host.callback_host import CallbackHost
from gptmanager.recorder import Recorder, build_recorded_loop
from gptmanager.statistics import PhaseTimes
from gptmanager.step import StepResult

ROUNDS = 1000
WARM_UP = 10  # the contexts, and whatever happens once
PROMPT = [1] * 16
MAX_SEQ_LEN = 2048
BLOCK = 64


class PreparedExecutor:
    """Every row's token is there before it is asked for."""

    def __init__(self, num_requests):
        self._result = StepResult(np.ones((num_requests, 1), dtype=np.int32), now=0.0)

    def forward(self, schedule):
        return SimpleNamespace(schedule=schedule)

    def sample(self, step):
        pass

    def result(self, step):
        return self._result


class CountingHost:
    """Four callbacks that do as little as callbacks can."""

    def __init__(self, requests):
        self.waiting = requests
        self.num_responses = self.num_records = self.num_polls = 0

    def get(self, room):
        taken, self.waiting = self.waiting, []
        return taken

    def send(self, request_id, tensors, is_final, error):
        assert not error and not is_final
        self.num_responses += 1

    def poll(self):
        self.num_polls += 1
        return ()

    def report(self, record):
        self.num_records += 1


def build(num_requests, *, streaming, black_box):
    requests = [
        InferenceRequest.from_tokens(i, PROMPT, MAX_SEQ_LEN - 100, is_streaming=streaming)
        for i in range(num_requests)
    ]
    host = CountingHost(requests)
    callbacks = CallbackHost(host.get, host.send, host.poll, host.report, max_get_failures=10)
    num_blocks = num_requests * MAX_SEQ_LEN // BLOCK
    blueprint = Blueprint(
        OptionalParams(
            # room for one more, so that Get is called in every iteration, too
            max_batch_size=num_requests,
            max_active_requests=num_requests + 1,
            kv_cache_config=KvCacheConfig(tokens_per_block=BLOCK),
        ),
        SchedulerConfig(),
        Sizes(num_blocks, BLOCK, MAX_SEQ_LEN, MAX_SEQ_LEN - 1, False, False, MAX_SEQ_LEN - 1),
        vocab_size=100,
    )
    executor = PreparedExecutor(num_requests)
    phase_times = PhaseTimes(time.perf_counter_ns)
    if black_box:
        return host, build_recorded_loop(
            blueprint, callbacks, executor, Recorder(), phase_times=phase_times
        )
    return host, build_loop(blueprint, callbacks, executor, phase_times=phase_times)


@pytest.mark.parametrize("black_box", [False, True], ids=["bare", "black-box"])
@pytest.mark.parametrize("streaming", [False, True], ids=["final-only", "streaming"])
@pytest.mark.parametrize("num_requests", [1, 32, 256])
def test_one_iteration(benchmark, num_requests, streaming, black_box):
    host, loop = build(num_requests, streaming=streaming, black_box=black_box)
    for _ in range(WARM_UP):
        assert loop.iterate()
    benchmark.extra_info["goal_us"] = 50 + (6 if streaming else 2) * num_requests

    rounds = ROUNDS if benchmark.enabled else 5
    assert benchmark.pedantic(loop.iterate, rounds=rounds)

    # what was timed were whole iterations: each request got its token in each of them
    iterations = host.num_records
    assert iterations == host.num_polls >= WARM_UP + 1
    assert host.num_responses == (num_requests * iterations if streaming else 0)
    assert [len(request.tokens) for request in loop.active] == (
        [len(PROMPT) + iterations] * num_requests
    )
