"""Figures for docs/recording.md and docs/simulation.md: not tests, since they are times.

OMP_NUM_THREADS=1 python tests/benchmarks/measure_recording.py ring | speed | makespan
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import tempfile
import time
import types
from pathlib import Path

import numpy as np

import gptmanager.executor.torch_executor
import gptmanager.host.callback_host
from gptmanager.assembly.blueprint import build_loop
from gptmanager.bench import SMALL_LLAMA, Load, random_llama, run_manager
from gptmanager.config import (
    CapacitySchedulerPolicy,
    KvCacheConfig,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.recorder import Recorder, RecordingExecutor, RecordingHost
from gptmanager.recorder.recording_file import read_recording
from gptmanager.simulator import World, simulate
from gptmanager.simulator.comparison import Machine, hypothetical, variant
from gptmanager.simulator.cost_model import CostModel, fit
from gptmanager.simulator.load import RecordedLoad, SyntheticLoad
from gptmanager.statistics import PhaseTimes
from gptmanager.step import Intake, Row, Schedule, StepResult

POLICIES = (
    CapacitySchedulerPolicy.GUARANTEED_NO_EVICT,
    CapacitySchedulerPolicy.MAX_UTILIZATION,
)


def ring() -> None:
    """What the black box adds to an iteration, the copies of the state apart and within."""

    class Silent:
        def fetch(self, room, num_active):
            return intake

        def forward(self, schedule):
            return step

        def result(self, step):
            return result

        respond = poll = report = sample = prepare = fail = None

    intake = Intake(0.0)
    schedule = Schedule(0, (), tuple(Row(i, i, i, 100, 1, True) for i in range(256)))
    step = dataclasses.make_dataclass("Step", ["schedule"])(schedule)
    result = StepResult(np.zeros((256, 1), dtype=np.int32), 0.0)
    loop, blueprint = _active_loop()

    def turns(host, executor, count=20_000):
        started = time.process_time()
        for _ in range(count):
            host.fetch(None, 256)
            executor.result(executor.forward(schedule))
        return (time.process_time() - started) / count * 1e6

    bare = min(turns(Silent(), Silent()) for _ in range(5))
    recorder = Recorder()
    recorder.start(loop, blueprint)
    host, executor = RecordingHost(Silent(), recorder), RecordingExecutor(Silent(), recorder)
    recorded = min(turns(host, executor) for _ in range(5))
    started = time.process_time()
    loop.state()
    taken = (time.process_time() - started) * 1e3
    print(f"a copy of the state, 256 active requests, 8,192 blocks: {taken:.1f} ms")
    print(f"black box: {recorded - bare:.2f} us an iteration (copies of the state included)")


def _active_loop():
    """A loop with 256 active requests of 500 tokens in a pool of 8,192 blocks."""
    blueprint = hypothetical(Machine(kv_cache_tokens=8192 * 64), 1024)
    world = World(SyntheticLoad(256, (500, 500), (400, 400)), CostModel(), 256)
    loop = build_loop(blueprint, world, world, phase_times=PhaseTimes(lambda: 0), final=world.final)
    for _ in range(50):
        loop.iterate()
    return loop, blueprint


def speed() -> None:
    """Request-steps a second of CPU time; the best of five."""
    load = SyntheticLoad(1000, (64, 1024), (16, 512))
    for kv_cache_tokens in (262_144, 40_000):
        machine = Machine(kv_cache_tokens=kv_cache_tokens)
        base = hypothetical(machine, 1536)
        for policy in POLICIES:
            seconds = []
            for _ in range(5):
                started = time.process_time()
                figures = simulate(variant(base, policy, machine), load, CostModel())
                seconds.append(time.process_time() - started)
            rate = figures.request_steps / min(seconds)
            print(
                f"{policy.name:20} KV {kv_cache_tokens:7,} tokens, mean batch "
                f"{figures.mean_batch:5.1f}, mean output {figures.output_tokens / 1000:.0f}: "
                f"{rate:9,.0f} request-steps/s"
            )


def makespan(repeats: int = 5) -> None:
    """Fit to one recorded run on this CPU, predict others: another load, another policy.

    The clock is the CPU time of the loop's thread (run with OMP_NUM_THREADS=1), so that what else
    the machine does is not counted.
    """
    for module in (gptmanager.host.callback_host, gptmanager.executor.torch_executor):
        module.time = types.SimpleNamespace(**{**vars(time), "monotonic": time.thread_time})
    source = (SMALL_LLAMA, random_llama(SMALL_LLAMA, 7))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"

        def run(seed, policy):
            """The recording of the quickest run: the machine is not ours alone."""
            requests = Load(64, (16, 256), (16, 128), seed).requests(SMALL_LLAMA["vocab_size"])
            params = OptionalParams(
                kv_cache_config=KvCacheConfig(max_tokens=4096, tokens_per_block=16),
                max_batch_size=32,
                max_num_tokens=1024,
                recording_path=path,
            )
            runs = []
            for _ in range(repeats):
                run_manager(source, requests, params, SchedulerConfig(policy))
                runs.append(read_recording(path))
            return min(runs, key=lambda run: run.duration_s)

        run(0, POLICIES[0])  # warm
        fitted = fit(run(1, POLICIES[0]))
        print("seconds of a step:", dataclasses.asdict(fitted))
        for seed, policy in [(1, POLICIES[0]), (2, POLICIES[0]), (2, POLICIES[1])]:
            recorded = run(seed, policy)
            blueprint = recorded.header.blueprint
            figures = simulate(blueprint, RecordedLoad(recorded, "iterations"), fitted)
            steps = sum(turn.schedule is not None for turn in recorded.iterations)
            error = figures.makespan_s / recorded.duration_s - 1
            print(
                f"load {seed}, {policy.name:20} measured {recorded.duration_s:.3f} s in {steps} "
                f"iterations, predicted {figures.makespan_s:.3f} s in {figures.iterations}: "
                f"{error:+.1%}"
            )


if __name__ == "__main__":
    logging.basicConfig(level=logging.ERROR)
    {"ring": ring, "speed": speed, "makespan": makespan}[sys.argv[1]]()
