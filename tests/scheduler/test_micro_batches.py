"""Several micro batches in flight: who is in which, in which order they return, what comes out."""

from __future__ import annotations

import random
from collections import Counter

import orjson
import pytest
from loop_driver import (
    AHEAD,
    ForcedPauses,
    LoopDriver,
    expected_beams,
    expected_output,
    no_evict,
)

from gptmanager.assembly.blueprint import Blueprint
from gptmanager.config import (
    CapacitySchedulerPolicy,
    FinishReason,
    OptionalParams,
    ParallelConfig,
    PromptLookup,
)
from gptmanager.decoding.search.beam_search import BeamParams
from gptmanager.errors import RecordingError
from gptmanager.kv_cache import LedgerError
from gptmanager.loop.token_loop import LoopState
from gptmanager.recorder import Recorder
from gptmanager.recorder.recording_file import field_names, make_header, read_lines, read_recording
from gptmanager.recorder.values import Decoder, to_json
from gptmanager.replay import replay
from gptmanager.replay.replaying import _Step
from gptmanager.request.inference_request import InferenceRequest
from gptmanager.scheduler import MaxUtilizationScheduler
from gptmanager.simulator import simulate
from gptmanager.simulator.comparison import Machine, hypothetical, variant
from gptmanager.simulator.cost_model import CostModel
from gptmanager.simulator.load import RecordedLoad, SyntheticLoad
from gptmanager.simulator.stages import Stages, Work
from gptmanager.step import Schedule

each_number = pytest.mark.parametrize("num_stages", [2, 3, 4])


def request(request_id, prompt, max_new_tokens, **by_name):
    return InferenceRequest.from_tokens(request_id, prompt, max_new_tokens, **by_name)


class Watched(LoopDriver):
    """Notes what is launched and what returns."""

    def __init__(self, **options):
        super().__init__(**options)
        self.events = []
        forward, result = self.executor.forward, self.executor.result

        def launch(schedule):
            self.events.append(("forward", schedule))
            return forward(schedule)

        def take(step):
            self.events.append(("result", step.schedule))
            return result(step)

        self.executor.forward, self.executor.result = launch, take

    def turn(self):
        """What one iteration launched and took: iteration numbers."""
        before = len(self.events)
        self.loop.iterate()
        return [(name, schedule.iteration) for name, schedule in self.events[before:]]


@each_number
def test_as_many_are_in_flight_of_different_requests_and_return_in_their_order(num_stages):
    driver = Watched(num_stages=num_stages, num_blocks=60, max_batch_size=4, max_active=None)
    driver.submit(*(request(i, [i + 1], 6 + i) for i in range(3 * num_stages)))
    driver.run()
    in_flight, most = [], 0
    for name, schedule in driver.events:
        if name == "forward":
            ids = {row.request_id for row in schedule.rows}
            assert all(ids.isdisjoint(row.request_id for row in s.rows) for s in in_flight)
            assert schedule.micro_batch_id not in {s.micro_batch_id for s in in_flight}
            in_flight.append(schedule)
            most = max(most, len(in_flight))
        else:
            assert in_flight.pop(0) is schedule
    assert most == num_stages
    first = [schedule for name, schedule in driver.events if name == "forward"][: 2 * num_stages]
    assert [s.micro_batch_id for s in first] == [*range(num_stages)] * 2
    assert [len(schedule.rows) for schedule in first] == [3] * len(first)  # even shares


@each_number
def test_an_iteration_launches_or_takes_the_oldest_result(num_stages):
    """A request alone fills no pipeline: the loop does not ask again in vain, nor waits for it."""
    driver = Watched(num_stages=num_stages)
    driver.submit(request(1, [1, 2], 4))
    turns = [driver.turn() for _ in range(8)]
    expected = [[(name, number)] for number in range(4) for name in ("forward", "result")]
    assert turns == expected
    assert driver.loop.iterate() is False
    assert driver.output(1) == [1, 2, *expected_output([1, 2], 4)]


def test_a_request_pauses_when_its_own_micro_batch_has_returned():
    driver = Watched(num_stages=4, num_blocks=60, max_batch_size=1, scheduler=ForcedPauses)
    driver.submit(*(request(i, [i + 1], 20) for i in range(4)))
    for _ in range(11):
        driver.turn()
    oldest, middle, newest = (step.schedule for step in driver.loop.pending)
    (victim,) = {row.request_id for row in middle.rows}
    driver.scheduler.victims.add(victim)
    taken = [number for name, number in driver.turn() if name == "result"]
    assert taken == [oldest.iteration, middle.iteration]
    assert driver.executor.schedules[-1].paused == (victim,)
    assert driver.loop.pending[0].schedule is newest
    driver.run()
    for i in range(4):
        assert driver.output(i) == [i + 1, *expected_output([i + 1], 20)]


def test_a_share_is_rounded_up_and_counts_those_in_flight():
    driver = Watched(num_stages=2, num_blocks=60, max_batch_size=8)
    driver.submit(*(request(i, [i + 1], 9) for i in range(5)))
    for _ in range(6):
        driver.turn()
    assert [len(schedule.rows) for schedule in driver.executor.schedules] == [3, 2, 3, 2, 3, 2]


# Anything at any time -----------------------------------------------------------------------


def scenario(seed):
    """A driver and its requests by turn; what is stopped and paused is drawn on the way."""
    chance = random.Random(seed)
    driver = LoopDriver(
        num_blocks=chance.choice([14, 18, 40]),
        max_batch_size=chance.choice([1, 2, 4]),
        max_num_tokens=chance.choice([24, 32]),
        max_active=chance.choice([6, None]),
        max_seq_len=24,
        chunked=chance.random() < 0.5,
        reuse=chance.random() < 0.5,
        lookup=chance.choice([None, PromptLookup(3, 2, 1)]),
        policy=chance.choice([no_evict, MaxUtilizationScheduler]),
        scheduler=ForcedPauses,
        **chance.choice([mode for mode in AHEAD if "num_stages" in mode]),
    )
    planned = {}
    for number in range(chance.randint(4, 10)):
        prompt = [chance.randrange(2) for _ in range(chance.randint(1, 9))]
        length = chance.randint(1, 12)
        more = chance.choice([{}, {}, {"beam_width": 2}, {"deadline_s": 6.5}, {"drafts": True}])
        if more.pop("drafts", False):
            more["draft_input_ids"] = expected_output(prompt, 3)[: chance.randint(1, 3)] + [7]
        made = request(number, prompt, length, is_streaming=chance.random() < 0.4, **more)
        planned[number] = chance.randrange(12), prompt, length, made
    return chance, driver, planned


def run(seed, seen):
    chance, driver, planned = scenario(seed)
    loop, turn = driver.loop, 0
    while turn < 12 or loop.active or loop.pending:
        driver.submit(*(made for when, _, _, made in planned.values() if when == turn))
        if chance.random() < 0.1:
            driver.scheduler.victims = {chance.randrange(10)}
        if chance.random() < 0.04:
            driver.host.callbacks.stop(chance.randrange(10))
        seen["deepest"] = max(seen["deepest"], len(loop.pending))
        loop.iterate()
        loop.allocator.check()
        turn += 1
        assert turn < 500
    driver.check_empty()
    for schedule in driver.executor.schedules:
        seen["pauses"] += len(schedule.paused)
        seen["forks"] += len(schedule.beam_forks)
        seen["drafts"] += len(schedule.drafts)
    return driver, planned


def check(driver, planned, seen):
    for number, (_, prompt, length, made) in planned.items():
        final = driver.final(number)
        assert not final.error, final
        reason = FinishReason(final.tensors["finish_reasons"].tolist()[0][0])
        seen[reason.name] += 1
        output = driver.output(number)
        if not made.is_streaming:
            assert output[: len(prompt)] == prompt
            output = output[len(prompt) :]
        if "beam_width" not in made.tensors:
            whole = expected_output(prompt, length)
            assert output == (whole if reason is FinishReason.LENGTH else whole[: len(output)])
        elif reason is FinishReason.LENGTH:
            assert output == expected_beams(prompt, length, BeamParams(2))[0]


@pytest.mark.parametrize("part", range(4))
@pytest.mark.every(2)
def test_each_generates_what_it_generates_alone(part):
    seen = Counter()
    for seed in range(part, 200, 4):
        check(*run(seed, seen), seen)
    assert seen["deepest"] == 3
    least = {"pauses": 20, "forks": 100, "drafts": 60, "TIMED_OUT": 20, "CANCELLED": 4}
    assert {name: seen[name] for name in least if seen[name] < least[name]} == {}


# As data ------------------------------------------------------------------------------------


def piped():
    machine = Machine(
        max_batch_size=4, tokens_per_block=8, kv_cache_tokens=280, pipeline_parallel_size=4
    )
    blueprint = hypothetical(machine, 120)
    return variant(blueprint, CapacitySchedulerPolicy.MAX_UTILIZATION)


def test_a_run_with_several_results_in_a_turn_replays_and_is_a_load(tmp_path):
    blueprint = piped()
    load = SyntheticLoad(20, (4, 20), (40, 80))
    figures = simulate(blueprint, load, CostModel(), recorder=Recorder(tmp_path / "r.jsonl"))
    assert figures.pauses > 5
    recording = read_recording(tmp_path / "r.jsonl")
    assert max(len(turn.results) for turn in recording.iterations) == 3
    taken = [number for turn in recording.iterations for number, _ in turn.results]
    assert taken == [*range(figures.iterations)]
    report = replay(recording)
    assert report.divergence is None and report.compared == len(recording.iterations)
    again = simulate(blueprint, RecordedLoad(recording, "at_once"), CostModel())
    assert again.output_tokens == figures.output_tokens and not again.failed


def test_a_loop_goes_on_from_its_state_with_all_that_was_pending():
    def driver():
        return Watched(num_stages=4, num_blocks=60, max_batch_size=2)

    first, second = driver(), driver()
    first.submit(*(request(i, [i + 1], 9) for i in range(8)))
    for _ in range(9):
        first.turn()
    decoder = Decoder(orjson.loads(to_json(field_names(LoopState))))
    state = decoder.decode(LoopState, orjson.loads(to_json(first.loop.state())))
    assert [s.iteration for s in state.pending] == [6, 7, 8]
    results = {}
    second.executor.result = lambda step: results[step.schedule.iteration]
    second.executor.sample = lambda step: None
    launched = []
    second.executor.forward = lambda schedule: launched.append(schedule) or _Step(schedule)
    second.loop.restore(state, map(_Step, state.pending))
    take = first.executor.result
    first.executor.result = lambda step: results.setdefault(step.schedule.iteration, take(step))
    before = len(first.executor.schedules)
    while first.loop.active:
        first.loop.iterate()
        second.loop.iterate()
    assert launched == first.executor.schedules[before:] and len(launched) > 20
    small = Watched(num_stages=2)
    with pytest.raises(LedgerError, match="3 steps are pending, the limit is 1"):
        small.loop.restore(state, map(_Step, state.pending))


def headed(state, version, names=None):
    """A recording that begins with `state`, as lines."""
    header = orjson.loads(to_json(make_header(piped(), None)))
    header |= {"state": state, "version": version}
    header["fields"] = names or orjson.loads(to_json(field_names(LoopState)))
    return [orjson.dumps(header)]


def test_a_state_of_the_format_before_is_read():
    """It had one pending schedule, or null."""
    driver = Watched(overlap=True)
    driver.submit(request(1, [1, 2], 5))
    nothing = driver.loop.state()
    driver.turn()
    state = driver.loop.state()
    for given in (state, nothing):
        now = orjson.loads(to_json(given))
        index = LoopState._fields.index("pending")
        before = [*now]
        before[index] = before[index][0] if before[index] else None
        read = read_lines(headed(before, 3)).header.state
        assert read == read_lines(headed(now, 4)).header.state
        assert len(read.pending) == len(given.pending)
        with pytest.raises(RecordingError):
            read_lines(headed(before, 4))


# Options ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 1),
        ({"enable_trt_overlap": True}, 2),
        ({"parallel_config": ParallelConfig(2, 1)}, 1),
        ({"parallel_config": ParallelConfig(1, 3)}, 3),
        ({"parallel_config": ParallelConfig(1, 3), "enable_trt_overlap": True}, 3),
    ],
    ids=str,
)
def test_there_are_as_many_as_stages(options, count):
    params = OptionalParams(**options, run_ahead=0, max_batch_size=5)
    blueprint = Blueprint(params, *[None] * 3)
    assert blueprint.num_micro_batches == count
    assert blueprint.max_num_requests == 5 * count


# Stages under a virtual clock -----------------------------------------------------------------


def test_a_stage_begins_when_it_is_free_and_has_been_sent_the_step():
    work = []
    stages = Stages(2, 0.5, work)
    ends = [stages.run(Schedule(number, micro_batch_id=number % 2), 0.0, 4.0) for number in (0, 1)]
    assert ends == [4.5, 6.5]
    assert work == [
        Work(0, 0, 0, 0.0, 2.0),
        Work(1, 0, 0, 2.5, 4.5),
        Work(0, 1, 1, 2.0, 4.0),
        Work(1, 1, 1, 4.5, 6.5),
    ]
    assert Stages(1, 0.5).run(Schedule(0), 3.0, 4.0) == 7.0


def test_two_stages_do_more_than_one_and_six_tenths():
    load = SyntheticLoad(600, (64, 512), (16, 256))
    figures = [
        simulate(
            hypothetical(Machine(max_batch_size=32, pipeline_parallel_size=count), 768),
            load,
            CostModel(),
        )
        for count in (1, 2)
    ]
    one, two = (column.output_tokens_per_s for column in figures)
    assert two > 1.6 * one and not figures[1].failed
