"""The simulator: schedules exactly as recorded runs, figures as counted by hand, a fitted clock."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import re

import numpy as np
import orjson
import pytest
from fuzz import FUZZ
from recorded_runs import (
    MAX_UTILIZATION,
    NO_EVICT,
    STATIC_BATCH,
    VOCAB_SIZE,
    ScheduledHost,
    next_token,
    record,
    request,
)

from gptmanager import GptManager, KvCacheConfig, ModelType, OptionalParams, PromptLookup
from gptmanager.assembly.adapter_sizing import AdapterSizes
from gptmanager.environment.lazy_names import named
from gptmanager.errors import ConfigError, RecordingError, SchedulerError
from gptmanager.loop.token_loop import LoopState
from gptmanager.peft_cache import CacheSizes
from gptmanager.recorder import Recorder
from gptmanager.recorder.recording_file import Header, Iteration, Recording, read_recording
from gptmanager.replay import replay
from gptmanager.scheduler import RequestScheduler, SchedulerOutput
from gptmanager.simulator import main, simulate
from gptmanager.simulator.arguments import add_command
from gptmanager.simulator.comparison import Machine, hypothetical, variant
from gptmanager.simulator.cost_model import CostModel, fit, quantities
from gptmanager.simulator.load import RecordedLoad, SyntheticLoad
from gptmanager.simulator.report import figures_table, plain
from gptmanager.statistics import DraftCounts
from gptmanager.step import NOT_FINITE, BeamCandidates, Intake, Row, Schedule, StepResult
from gptmanager.terminal.tables import lines
from gptmanager.testing import ScriptedModel

BLUEPRINT = hypothetical(Machine(), 64)


def all_at_once():
    return [[request(i, 3 + i % 7, 5 + i % 11) for i in range(20)]]


def priorities():
    return [[request(i, 4 + i % 5, 8, priority=(i * 7 % 5) / 4) for i in range(16)]]


def long_prompts():
    return [[request(i, 30 - i, 6 + i) for i in range(12)]]


def early_ends():
    ends = [next_token([9]), next_token([4, 4])]
    return [
        [
            request(i, 3 + i % 6, 30, end_id=ends[i % 2], stop_words_list=[[i % VOCAB_SIZE]])
            for i in range(18)
        ]
    ]


def trickle():
    script = [[] for _ in range(40)]
    for i in range(15):
        script[i * i % 40].append(request(i, 4 + i % 9, 6 + i % 13))
    return script


LOADS = [all_at_once, priorities, long_prompts, early_ends, trickle]


POLICIES = [NO_EVICT, MAX_UTILIZATION, STATIC_BATCH]
MODES = [{}, {"run_ahead": 1}, {"enable_trt_overlap": True}]
CROSSED = itertools.product(*map(enumerate, (LOADS, POLICIES, [True, False], MODES)))
# a third of all, in which any two meet
CHOSEN = [
    [value for _, value in one]
    for one in CROSSED
    if FUZZ > 1 or sum(number for number, _ in one) % 3 == 0
]


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("load", "policy", "chunked", "mode"), CHOSEN, ids=lambda it: getattr(it, "__name__", str(it))
)
def test_simulated_schedules_are_those_of_a_recorded_run(tmp_path, load, policy, chunked, mode):
    """Every row, block and slot of every iteration, in order."""
    recorded = record(
        tmp_path / "r.jsonl",
        ScheduledHost(load()),
        policy,
        kv_cache=KvCacheConfig(max_tokens=80, tokens_per_block=4),
        enable_chunked_context=chunked,
        max_num_tokens=40,
        **mode,
    )
    blueprint = recorded.header.blueprint
    arrivals = "iterations" if load is trickle else "at_once"
    figures = simulate(
        blueprint,
        RecordedLoad(recorded, arrivals),
        CostModel(),
        recorder=Recorder(tmp_path / "s.jsonl"),
    )
    simulated = read_recording(tmp_path / "s.jsonl")
    schedules = [turn.schedule for turn in recorded.iterations if turn.schedule is not None]
    assert [turn.schedule for turn in simulated.iterations if turn.schedule] == schedules
    assert figures.iterations == len(schedules)
    ends = [end for turn in recorded.iterations for end in turn.ends]
    assert [end for turn in simulated.iterations for end in turn.ends] == ends
    assert replay(simulated).divergence is None


def test_a_recorded_v1_run_is_simulated_as_one_and_under_other_policies(tmp_path):
    recorded = record(
        tmp_path / "r.jsonl",
        ScheduledHost(early_ends()),
        model_type=ModelType.V1,
        kv_cache=KvCacheConfig(max_tokens=300),
    )
    blueprint = recorded.header.blueprint
    load = RecordedLoad(recorded, "at_once")
    lock_step = simulate(blueprint, load, CostModel())
    assert lock_step.iterations == sum(1 for t in recorded.iterations if t.schedule is not None)
    other = variant(blueprint, NO_EVICT)
    assert other.model_type is ModelType.INFLIGHT_FUSED_BATCHING
    assert simulate(other, load, CostModel()).iterations < lock_step.iterations
    static = blueprint.scheduler.capacity_scheduler_policy
    smaller = variant(blueprint, static, Machine(max_batch_size=2))
    assert smaller.model_type is ModelType.V1
    assert replay(recorded).divergence is None


def test_a_request_that_ended_with_nan_is_simulated_to_its_end(tmp_path):
    recorded = record(tmp_path / "r.jsonl", ScheduledHost([[request(0, 3, 4)]]))
    turns = list(recorded.iterations)
    last = next(n for n in reversed(range(len(turns))) if turns[n].result is not None)
    tokens = np.full((1, 1), NOT_FINITE, dtype=np.int32)
    result = dataclasses.replace(turns[last].result, tokens=tokens)
    turns[last] = dataclasses.replace(turns[last], result=result)
    load = RecordedLoad(Recording(recorded.header, tuple(turns)), "iterations")
    figures = simulate(recorded.header.blueprint, load, CostModel())
    assert (figures.requests, figures.iterations) == (1, 4)


def searched():
    return [request(i, 3 + i % 5, 5 + i, beam_width=1 + i % 3, end_id=i) for i in range(12)]


def sampled_texts():
    return [request(i, 3 + i, 9, num_return_sequences=1 + i % 3, temperature=1.0) for i in range(9)]


def guessed():
    guesses = [{"draft_input_ids": [next_token([4] * 9)] * 3}, {}]
    return [request(i, 9 + i, 20 + i, **guesses[i % 2]) for i in range(9)]


def next_of_five(history):
    """Comes round, so that guesses are right; now and then it skips one."""
    return (history[-1] + 1 + (len(history) % 13 == 0)) % 5


def looked_up():
    model = ScriptedModel(next_of_five, vocab_size=VOCAB_SIZE)
    return {"speculative_decoding_config": PromptLookup(), "model": model}


@pytest.mark.parametrize("policy", [NO_EVICT, MAX_UTILIZATION])
@pytest.mark.parametrize(
    ("requests", "options"),
    [(searched, dict), (sampled_texts, dict), (guessed, looked_up), (guessed, dict)],
    ids=["searched", "sampled", "looked up", "given"],
)
def test_beams_and_guesses_are_simulated_as_they_were_recorded(tmp_path, requests, options, policy):
    recorded = record(tmp_path / "r.jsonl", ScheduledHost([requests()]), policy, **options())
    schedules = [turn.schedule for turn in recorded.iterations if turn.schedule is not None]
    rows = [row for schedule in schedules for row in schedule.sampling_rows]
    assert any(row.beam_width > 1 or row.num_drafts for row in rows)
    blueprint = recorded.header.blueprint
    load = RecordedLoad(recorded, "at_once")
    figures = simulate(blueprint, load, CostModel(), recorder=Recorder(tmp_path / "s.jsonl"))
    simulated = read_recording(tmp_path / "s.jsonl")
    assert [turn.schedule for turn in simulated.iterations if turn.schedule] == schedules
    assert figures.iterations == len(schedules)
    ends = [end for turn in recorded.iterations for end in turn.ends]
    assert [end for turn in simulated.iterations for end in turn.ends] == ends
    assert replay(simulated).divergence is None


def test_another_policy_or_machine_keeps_the_beams_and_the_host_tier(tmp_path):
    kv_cache = KvCacheConfig(max_tokens=96, tokens_per_block=4, enable_block_reuse=True)
    host = ScheduledHost([searched()])
    recorded = record(tmp_path / "r.jsonl", host, MAX_UTILIZATION, kv_cache=kv_cache)
    blueprint = recorded.header.blueprint
    blueprint = dataclasses.replace(
        blueprint,
        sizes=dataclasses.replace(blueprint.sizes, num_host_blocks=10),
        hidden_size=8,
    )
    for policy, machine, num_host_blocks in (
        (NO_EVICT, Machine(), 10),
        (MAX_UTILIZATION, Machine(max_batch_size=2), 10),
        (MAX_UTILIZATION, Machine(tokens_per_block=8), 5),
    ):
        other = variant(blueprint, policy, machine)
        assert (other.max_beam_width, other.hidden_size) == (3, 8)
        assert other.sizes.num_host_blocks == num_host_blocks
        figures = simulate(other, RecordedLoad(recorded, "at_once"), CostModel())
        assert (figures.requests, figures.failed) == (12, 0)


@pytest.mark.parametrize("position", [None, 4])
@pytest.mark.parametrize("by_name", [{"beam_width": 2}, {"num_return_sequences": 2}], ids=str)
def test_beams_of_which_little_is_known_run_to_their_last_token(by_name, position):
    count = by_name.get("beam_width", 1)
    known = BeamCandidates(((5,) * count,) * 2, ((0.0,) * count,) * 2)

    class Wide(SyntheticLoad):
        def request(self, number):
            return request(number, 4, 6, **by_name)

        def beams(self, number):
            return {} if position is None else {position: known}

    blueprint = dataclasses.replace(hypothetical(Machine(), 64), max_beam_width=2)
    figures = simulate(blueprint, Wide(3), COST)
    assert (figures.requests, figures.failed, figures.iterations) == (3, 0, 6)


def test_cached_blocks_are_forgotten_when_they_were(tmp_path):
    host = ScheduledHost([[request(5, 12, 3), request(6, 12, 20)]])
    path = tmp_path / "r.jsonl"
    with GptManager(
        ScriptedModel(next_token, vocab_size=VOCAB_SIZE),
        ModelType.INFLIGHT_FUSED_BATCHING,
        optional_params=OptionalParams(
            max_seq_len=64,
            recording_path=path,
            kv_cache_config=KvCacheConfig(96, tokens_per_block=4, enable_block_reuse=True),
        ),
        **host.keywords(),
    ) as manager:
        assert manager.wait_idle(30)
        manager.clear_cached()
        host.submit(request(5, 12, 3))
        manager.notify()
        assert manager.wait_idle(30)
    recorded = read_recording(path)
    assert any(turn.intake.clears_cache for turn in recorded.iterations)
    load = RecordedLoad(recorded, "iterations")
    blueprint = recorded.header.blueprint
    simulate(blueprint, load, CostModel(), recorder=Recorder(tmp_path / "s.jsonl"))
    simulated = read_recording(tmp_path / "s.jsonl")
    schedules = [
        [turn.schedule for turn in run.iterations if turn.schedule] for run in (recorded, simulated)
    ]
    assert schedules[0] == schedules[1]
    assert replay(simulated).divergence is None


def test_two_passes_cost_two_fixed_parts():
    load = SyntheticLoad(8, (4, 4), (8, 8), rate=0.4)
    fused, apart = (
        simulate(dataclasses.replace(hypothetical(Machine(), 64), model_type=kind), load, COST)
        for kind in (ModelType.INFLIGHT_FUSED_BATCHING, ModelType.INFLIGHT_BATCHING)
    )
    assert apart.makespan_s > fused.makespan_s + 1.0


def test_stop_signals_keep_their_turn(tmp_path):
    host = ScheduledHost([[request(i, 4, 20) for i in range(3)]], stop_after={1: 7})
    recorded = record(tmp_path / "r.jsonl", host)
    load = RecordedLoad(recorded, "iterations")
    blueprint = recorded.header.blueprint
    simulate(blueprint, load, CostModel(), recorder=Recorder(tmp_path / "s.jsonl"))
    ends = [
        [(turn.index, end) for turn in run.iterations for end in turn.ends]
        for run in (recorded, read_recording(tmp_path / "s.jsonl"))
    ]
    assert ends[0] == ends[1] and ends[0][0][1].reason == "CANCELLED"


def test_an_id_that_comes_twice_at_once_after_its_end_maps_to_the_first(tmp_path):
    """The id is free again, so the first is admitted, and only the second is refused."""
    script = [[request(1, 4, 3)], *[[]] * 8, [request(1, 5, 2), request(1, 6, 4)]]
    load = RecordedLoad(record(tmp_path / "r.jsonl", ScheduledHost(script)))
    assert [len(load.output(number)) for number in range(3)] == [3, 2, 0]


# Arrivals: the host's queue, not the room of the engine that was recorded -------------------


@pytest.mark.parametrize("max_batch_size", [1, 2, 16])
def test_another_batch_size_is_predicted_from_what_was_held_back(tmp_path, max_batch_size):
    """Recorded with room for 4, all there at once: iterations are those of a real run."""
    runs = [
        record(tmp_path / f"{size}.jsonl", ScheduledHost(all_at_once()), max_batch_size=size,
               kv_cache=KvCacheConfig(max_tokens=2000))
        for size in (4, max_batch_size)
    ]  # fmt: skip
    load = RecordedLoad(runs[0])
    assert load.queue.num_held == 16 and load.queue.longest_s > 0
    other = variant(
        runs[0].header.blueprint,
        NO_EVICT,
        Machine(max_batch_size=max_batch_size),
    )
    expected = sum(1 for turn in runs[1].iterations if turn.schedule is not None)
    assert simulate(other, load, COST).iterations == expected


def recorded_arrivals(tmp_path, load, max_batch_size):
    """What a recording with so much room says of when the requests of `load` came."""
    blueprint = hypothetical(Machine(max_batch_size=max_batch_size), 64)
    simulate(blueprint, load, COST, recorder=Recorder(tmp_path / "a.jsonl"))
    return RecordedLoad(read_recording(tmp_path / "a.jsonl"))


def test_a_queue_that_was_empty_is_not_filled_afterwards(tmp_path):
    """Bursts with idle time between, a request alone, and one that came into the wait."""
    load = SyntheticLoad(9, (4, 4), (3, 3))
    load.arrivals = np.array([0, 0, 0, 0, 100.0, 200, 200, 200.5, 210])
    for max_batch_size in (1, 2):
        again = recorded_arrivals(tmp_path, load, max_batch_size)
        held = again.arrivals.tolist()
        assert held == [0, 0, 0, 0, 100, 200, 200, 200, held[-1]]
        assert held[-1] == (200 if max_batch_size == 1 else 210)  # busy until 211, or 207
        assert again.queue.num_held > 0
    wide = recorded_arrivals(tmp_path, load, 16)
    assert wide.queue.num_held == 0
    assert (wide.arrivals >= load.arrivals).all() and (wide.arrivals < load.arrivals + 2).all()


def test_requests_one_after_the_other_are_not_queued(tmp_path):
    """A host whose next request comes when the last was answered: Get was asked in vain between."""
    load = SyntheticLoad(5, (4, 4), (3, 3))
    load.arrivals = np.arange(5) * 3.5  # an answer takes 3.42 s
    again = recorded_arrivals(tmp_path, load, 1)
    assert again.arrivals.tolist() == load.arrivals.tolist() and again.queue.num_held == 0
    older = read_recording(tmp_path / "a.jsonl")
    unknown = [dataclasses.replace(turn, idle_turns=None) for turn in older.iterations]
    again = RecordedLoad(dataclasses.replace(older, iterations=tuple(unknown)))
    assert again.arrivals.tolist() == load.arrivals.tolist()


def test_an_older_recording_is_warned_of(tmp_path, caplog):
    load = SyntheticLoad(3, (4, 4), (3, 3))
    recorded_arrivals(tmp_path, load, 1)
    run = read_recording(tmp_path / "a.jsonl")
    assert {turn.idle_turns for turn in run.iterations} == {0}
    assert "an older format" not in caplog.text
    unknown = [dataclasses.replace(turn, idle_turns=None) for turn in run.iterations]
    RecordedLoad(dataclasses.replace(run, iterations=tuple(unknown)))
    assert "the recording has an older format: 2 times no request was active" in caplog.text


def test_room_without_a_bound_holds_no_request_back(tmp_path):
    run = record(
        tmp_path / "r.jsonl", ScheduledHost(all_at_once()), max_active_requests=None
    )  # fmt: skip
    queue = RecordedLoad(run).queue
    assert queue.num_held == 0 and queue.arrivals == (0.0,) * 20


def test_the_command_counts_requests_that_were_held_back(tmp_path, capsys):
    record(tmp_path / "r.jsonl", ScheduledHost(all_at_once()))
    assert command("--recording", tmp_path / "r.jsonl", "--cost", "fixed=0.5") == 0
    assert "16 of 20 requests had waited in the host's queue" in capsys.readouterr().out
    assert command("--recording", tmp_path / "r.jsonl", "--cost", "fixed=0.5", "--json") == 0
    assert orjson.loads(capsys.readouterr().out)["held_back"] == 16


# Figures -----------------------------------------------------------------------------------

COST = CostModel(fixed=1.0, context_token=0.1, generation_row=0.01, kv_token=0.0)


class TwoRequests(SyntheticLoad):
    """Prompts of 4 tokens, outputs of 3; the second arrives at 1.45 s."""

    def __init__(self):
        super().__init__(2, (4, 4), (3, 3))
        self.arrivals = np.array([0.0, 1.45])


def test_figures_are_those_counted_by_hand():
    """0 -> 1.4: context 0. -> 2.41: 0 generates; 1 arrived. -> 3.82: context 1, 0 ends..."""
    assert BLUEPRINT.params.kv_cache_config.max_tokens == 262144  # the value that --help has
    figures = simulate(BLUEPRINT, TwoRequests(), COST)
    assert figures.iterations == 5 and figures.request_steps == 6 and figures.requests == 2
    assert figures.makespan_s == pytest.approx(1.4 + 1.01 + 1.41 + 1.01 + 1.01)
    assert figures.output_tokens == 6 and figures.context_tokens == 8
    firsts = [1.4, 1.4 + 1.01 + 1.41 - 1.45]
    assert figures.ttft_s.p50 == pytest.approx(sum(firsts) / 2)
    assert figures.per_token_s.p50 == pytest.approx((2.42 / 2 + 1.01) / 2)
    assert figures.mean_batch == pytest.approx(6 / 5) and figures.max_batch == 2
    assert figures.pauses == figures.recomputed_tokens == figures.failed == 0
    assert figures.output_tokens_per_s == pytest.approx(6 / figures.makespan_s)


def test_unknown_tokens_are_not_an_end_id():
    class WithEndId(SyntheticLoad):
        def request(self, number):
            made = super().request(number)
            made.end_id = 0
            return made

    figures = simulate(hypothetical(Machine(), 64), WithEndId(2, (4, 4), (6, 6)), COST)
    assert (figures.output_tokens, figures.failed) == (12, 0)


def test_the_clock_jumps_over_idle_time_and_run_ahead_waits_for_nothing():
    load = SyntheticLoad(2, (4, 4), (3, 3))
    load.arrivals = np.array([0.0, 1000.0])
    for run_ahead in (0, 1):
        figures = simulate(hypothetical(Machine(run_ahead=run_ahead), 64), load, COST)
        assert figures.makespan_s == pytest.approx(1000 + 1.4 + 1.01 + 1.01)


class LastFirst(RequestScheduler):
    """Runs the newest active request that fits, after those that have started."""

    def __init__(self, kv_cache_manager, micro_batch_scheduler, **others):
        self.micro_batch = micro_batch_scheduler

    def schedule_request(self, active_requests, inflight_request_ids):
        chosen = sorted(active_requests, key=lambda it: (it.has_started, it.request_id))[-1:]
        context, generation = self.micro_batch.schedule(chosen, inflight_request_ids)
        return SchedulerOutput(context, generation, [])


@pytest.mark.parametrize(("max_active", "first"), [(None, 0), (2, 1), (3, 2)])
def test_a_scheduler_chooses_among_the_requests_that_may_be_active(tmp_path, max_active, first):
    machine = Machine(max_batch_size=1, max_active_requests=max_active)
    blueprint = variant(hypothetical(machine, 64), NO_EVICT, machine, LastFirst)
    simulate(blueprint, SyntheticLoad(3, (4, 4), (2, 2)), COST, recorder=Recorder(tmp_path / "x"))
    assert read_recording(tmp_path / "x").iterations[0].schedule.context_rows[0].request_id == first


def test_pauses_and_recomputed_tokens_are_counted():
    machine = Machine(kv_cache_tokens=16 * 8, tokens_per_block=8, max_batch_size=8)
    load = SyntheticLoad(8, (16, 16), (40, 40))
    small = hypothetical(machine, 64)
    tight = simulate(variant(small, MAX_UTILIZATION, machine), load, COST)
    safe = simulate(variant(small, NO_EVICT, machine), load, COST)
    assert tight.pauses > 0 and tight.recomputed_tokens >= tight.pauses * 16
    assert tight.context_tokens == 8 * 16 + tight.recomputed_tokens
    assert safe.pauses == safe.recomputed_tokens == 0
    assert tight.max_batch > safe.max_batch and 0 < tight.kv_use.mean < tight.kv_use.peak <= 1
    assert tight.output_tokens == safe.output_tokens == 8 * 40


def test_requests_that_do_not_fit_fail_and_the_others_run():
    figures = simulate(
        hypothetical(Machine(max_seq_len=30), 64), SyntheticLoad(50, (1, 60), (4, 4)), COST
    )
    assert 0 < figures.failed < 50 and figures.requests == 50


class Lazy(RequestScheduler):
    def schedule_request(self, active_requests, inflight_request_ids):
        return SchedulerOutput([], [], [])


def test_a_scheduler_that_lets_no_request_run_is_reported():
    lazy = variant(hypothetical(Machine(), 64), NO_EVICT, Machine(), lambda **others: Lazy())
    with pytest.raises(SchedulerError, match="does not run any"):
        simulate(lazy, SyntheticLoad(3, (4, 4), (3, 3)), COST)


def test_progress_adds_up():
    seen: list[int] = []
    load = SyntheticLoad(700, (1, 4), (1, 3))
    simulate(hypothetical(Machine(), 64), load, COST, on_progress=seen.append)
    assert sum(seen) == 700 and len(seen) > 1


# Loads and variants ------------------------------------------------------------------------


def test_a_synthetic_load_keeps_its_ranges_and_its_rate():
    load = SyntheticLoad(4000, (3, 9), (5, 5), rate=50.0, seed=3)
    lengths = {len(load.request(i).input_ids) for i in range(400)}
    assert lengths == set(range(3, 10)) and load.request(7).max_new_tokens.item() == 5
    assert load.arrivals[-1] == pytest.approx(80, rel=0.1) and (np.diff(load.arrivals) >= 0).all()
    assert load.request(5).input_ids[0] == 5
    with pytest.raises(ConfigError):
        SyntheticLoad(0)
    with pytest.raises(ConfigError):
        SyntheticLoad(3, rate=0.0)


def test_a_load_needs_a_whole_recording():
    header = Header(BLUEPRINT, state=LoopState(None, (), (), DraftCounts(), 0))
    for run in (Recording(header), Recording(Header(BLUEPRINT))):
        with pytest.raises(RecordingError, match="from the start"):
            RecordedLoad(run)


def test_a_variant_is_set_up_as_a_manager_would_be():
    base = hypothetical(Machine(kv_cache_tokens=640), 200)
    assert variant(base, NO_EVICT) == base
    pages = AdapterSizes(CacheSizes(64, 8, 8, 4, 8), (), 1, "float32")
    assert variant(dataclasses.replace(base, adapters=pages), MAX_UTILIZATION).adapters == pages
    other = variant(base, MAX_UTILIZATION)
    assert other.sizes.chunked and other.sizes.num_blocks == 10 and not base.sizes.chunked
    larger = variant(base, NO_EVICT, Machine(kv_cache_tokens=6400, max_batch_size=3))
    assert larger.sizes.num_blocks == 100 and larger.params.max_batch_size == 3


# The cost model ----------------------------------------------------------------------------


def test_quantities_of_a_schedule():
    schedule = Schedule(
        0,
        context_rows=(Row(1, 1, 0, 10, 4, True), Row(2, 2, 1, 0, 3, False)),
        generation_rows=(Row(3, 3, 2, 20, 1, True), Row(4, 4, 3, 5, 1, True)),
    )
    assert quantities(schedule) == (7, 2, 27, 4 * 10 + 10 + 6)
    model = CostModel(1.0, 0.1, 0.01, 0.001, 0.0001)
    assert model.seconds(schedule) == pytest.approx(1 + 0.7 + 0.02 + 0.027 + 0.0056)


def timed_run(seconds, count=60):
    """A recording of made-up schedules, whose steps take what `seconds` says."""
    chance = np.random.default_rng(1)
    now, turns = 100.0, []
    for index in range(count):
        schedule = Schedule(
            index,
            tuple(Row(i, 1, i, 0, int(chance.integers(1, 300)), True) for i in range(index % 3)),
            tuple(
                Row(9 + i, 1, 9 + i, int(chance.integers(500)), 1, True)
                for i in range(1 + int(chance.integers(64)))
            ),
        )
        tokens = np.zeros((1, 1), np.int32)
        end = now + seconds(schedule)
        result = StepResult(tokens, end - 1e-4)
        turns.append(Iteration(index, 1, Intake(now), schedule, True, index, result))
        now = end
    return Recording(Header(BLUEPRINT), tuple(turns))


def test_a_fit_finds_the_numbers_that_were_there():
    truth = CostModel(0.004, 3e-5, 7e-5, 2e-7, 0.0)
    found = fit(timed_run(truth.seconds))
    for field in dataclasses.fields(CostModel):
        assert getattr(found, field.name) == pytest.approx(getattr(truth, field.name), 0.05, 1e-7)


def test_a_fit_is_never_negative_and_keeps_the_total():
    run = timed_run(lambda schedule: max(1e-3, 0.02 - 1e-4 * len(schedule.generation_rows)))
    found = fit(run)
    assert all(value >= 0 for value in dataclasses.astuple(found))
    total = sum(found.seconds(turn.schedule) for turn in run.iterations)
    assert total == pytest.approx(run.duration_s, 0.02)


def test_the_time_of_a_rest_is_not_that_of_a_step():
    run = timed_run(lambda schedule: 0.01, count=10)
    turns = list(run.iterations)
    late = Intake(run.iterations[-1].intake.now + 500)
    turns.append(Iteration(10, 0, late, turns[0].schedule, True, 10, StepResult(
        np.zeros((1, 1), np.int32), late.now + 0.01)))  # fmt: skip
    turns.append(Iteration(11, 0, Intake(late.now + 500), turns[0].schedule, True, 11))  # no result
    found = fit(dataclasses.replace(run, iterations=tuple(turns)))
    assert found.seconds(turns[0].schedule) == pytest.approx(0.01, 0.05)


def test_a_recording_without_steps_cannot_be_fitted():
    with pytest.raises(RecordingError, match="at least one step"):
        fit(Recording(Header(BLUEPRINT)))


def test_cost_models_are_read_from_text():
    assert CostModel.parse("fixed=1e-3, kv_token=2") == CostModel(fixed=1e-3, kv_token=2.0)
    for text, problem in [("fixed", "must be NAME=SECONDS"), ("speed=1", "'speed' must be one of"),
                          ("fixed=-1", "fixed = -1.0"), ("fixed=nan", "fixed = nan")]:  # fmt: skip
        with pytest.raises(ConfigError, match=problem):
            CostModel.parse(text)


# The command -------------------------------------------------------------------------------


def options_of(*arguments):
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers(required=True))
    return parser.parse_args(["simulate", *map(str, arguments)])


def command(*arguments):
    options = options_of(*arguments)
    return named(options.command)(options)


def test_a_load_has_1000_requests_by_default():
    assert main._synthetic(options_of()).num_requests == 1000


def test_the_command_prints_policies_side_by_side(capsys):
    assert command("--num-requests", 40, "--output-len", "5:9", "--rate", 100) == 0
    out = capsys.readouterr().out
    assert out.split("\n")[0].split() == ["guaranteed_no_evict", "max_utilization"]
    assert "first token p99 ms" in out and "request-steps simulated" in out


def test_no_output_of_a_synthetic_load_is_cut_off(capsys):
    lengths = "--prompt-len", 20, "--output-len", "5:9"
    assert command("--num-requests", 9, *lengths, "--policies", "max_utilization", "--json") == 0
    (figures,) = orjson.loads(capsys.readouterr().out)["policies"].values()
    load = SyntheticLoad(9, (20, 20), (5, 9))
    wanted = [load.request(number).max_new_tokens.item() for number in range(9)]
    assert len(set(wanted)) > 2 and figures["output_tokens"] == sum(wanted)


def test_the_command_simulates_a_recording_and_records_each_run(tmp_path, capsys):
    path = tmp_path / "r.jsonl"
    record(path, ScheduledHost(all_at_once()))
    cost = tmp_path / "cost.json"
    cost.write_text('{"fixed": 0.5}')
    files = tmp_path / "s.jsonl"
    assert command("--recording", path, "--cost", cost, "--record", files, "--json",
                   "--policies", "static_batch,max_utilization",
                   "--scheduler", "test_replay:create_backwards") == 0  # fmt: skip
    told = orjson.loads(capsys.readouterr().out)
    assert told["cost"]["fixed"] == 0.5 and told["recorded_makespan_s"] > 0
    figures = told["policies"]["static_batch"]
    assert figures["requests"] == 20 and set(figures["kv_use"]) == {"mean", "peak"}
    assert 0 < figures["ttft_s"]["p50"] <= figures["ttft_s"]["p99"]
    assert set(told["policies"]) == {
        "static_batch", "max_utilization", "test_replay:create_backwards",
    }  # fmt: skip
    for name in ("static_batch", "max_utilization"):
        assert replay(read_recording(tmp_path / f"s.{name}.jsonl")).divergence is None


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["--recording", "r.max_utilization.jsonl"], "--recording and --record (of max_"),
        (["--fit", "r.max_utilization.jsonl"], "--fit and --record (of max_utilization)"),
        (["--cost", "r.max_utilization.jsonl"], "--cost and --record (of max_utilization)"),
        (
            ["--scheduler", "own:max_utilization"],
            "--record (of max_utilization) and --record (of own:max_utilization)",
        ),
        (["--cost", "r.jsonl", "--policies", "static_batch"], "--cost and --record"),
    ],
)
def test_no_recording_overwrites_another_file_of_the_command(
    arguments, options, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)  # none of these files is read
    with pytest.raises(ConfigError, match=f"^{re.escape(options)}.* must be different files, not"):
        command("--record", "r.jsonl", *arguments)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--policies", "fastest"], "argument --policies: 'fastest' must be one of"),
        (
            ["--prompt-len", "9:3"],
            "argument --prompt-len: must be LOW:HIGH with LOW at most HIGH, got '9:3'",
        ),
        (["--prompt-len", "5-6"], "--prompt-len: must be LOW:HIGH, or one number, got '5-6'"),
        (["--num-requests", "0"], "argument --num-requests: must be a positive integer, got '0'"),
        (["--rate", "0"], "argument --rate: must be a number above 0, got '0'"),
        (["--rate", "inf"], "argument --rate: must be a number above 0, got 'inf'"),
        (["--seed", "-1"], "argument --seed: must be an integer of at least 0, got '-1'"),
        (
            ["--max-batch-size", "0"],
            "argument --max-batch-size: must be a positive integer, got '0'",
        ),
    ],
)
def test_wrong_options_are_named(arguments, error, capsys):
    with pytest.raises(SystemExit):
        command(*arguments)
    assert error in capsys.readouterr().err


def test_a_file_of_costs_that_is_not_there(tmp_path):
    path = tmp_path / "nowhere.json"
    with pytest.raises(ConfigError, match=f"^--cost {path}: No such file or directory$"):
        command("--cost", path)


def test_options_of_the_other_kind_of_load_are_refused(tmp_path):
    path = tmp_path / "r.jsonl"
    record(path, ScheduledHost(all_at_once()))
    with pytest.raises(ConfigError, match="^--output-len needs a synthetic load: pass"):
        command("--recording", path, "--output-len", "3")
    with pytest.raises(ConfigError, match="^--arrivals iterations needs --recording$"):
        command("--arrivals", "iterations")


def test_arrivals_that_do_not_exist_are_refused(tmp_path, capsys):
    """Such as the name that one of them had."""
    record(tmp_path / "r.jsonl", ScheduledHost(all_at_once()))
    told = r"^RecordedLoad.arrivals = 'turns' must be 'time', 'iterations' or 'at_once'$"
    with pytest.raises(ConfigError, match=told):
        RecordedLoad(read_recording(tmp_path / "r.jsonl"), "turns")
    with pytest.raises(SystemExit):
        command("--recording", tmp_path / "r.jsonl", "--arrivals", "turns")
    refused = capsys.readouterr().err
    assert "--arrivals" in refused and "'turns'" in refused and "iterations" in refused


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"num_requests": 0}, "SyntheticLoad.num_requests = 0 must be"),
        ({"rate": -1.0}, "SyntheticLoad.rate = -1.0 must be"),
        ({"rate": "1"}, "SyntheticLoad.rate = '1' must be a number above 0"),
        ({"seed": -1}, "SyntheticLoad.seed = -1 must be"),
        ({"prompt_len": (0, 3)}, r"SyntheticLoad.prompt_len\[0\] = 0 must be an integer from 1"),
        ({"output_len": (5, 3)}, r"SyntheticLoad.output_len\[1\] = 3 must be an integer from 5"),
        ({"prompt_len": (1, 2.5)}, r"SyntheticLoad.prompt_len\[1\] = 2.5 must be an integer"),
        ({"output_len": 5}, "SyntheticLoad.output_len = 5 must be a pair"),
        ({"by_iterations": 1}, "SyntheticLoad.by_iterations = 1 must be True or False"),
    ],
)
def test_a_load_that_cannot_be_is_refused(wrong, error):
    with pytest.raises(ConfigError, match=error):
        SyntheticLoad(**{"num_requests": 1, **wrong})


def test_the_reason_of_failed_requests_is_reported(capsys):
    assert command("--num-requests", 3, "--prompt-len", 20, "--max-seq-len", 10) == 0
    out = capsys.readouterr().out
    assert (
        "guaranteed_no_evict: the first request that failed: InvalidRequestError: Prompt length"
        in out
    )


def test_tables_show_what_never_happened_as_a_dash():
    figures = simulate(
        hypothetical(Machine(max_seq_len=10), 10), SyntheticLoad(2, (20, 20), (1, 1)), COST
    )
    assert math.isnan(figures.ttft_s.p50) and any(
        " -" in line for line in lines([figures_table({"x": figures})])
    )
    assert plain(figures)["output_tokens_per_s"] == 0
