"""Replay: random runs come out the same, and a planted difference is found where it is."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import sys
from collections import Counter

import numpy as np
import orjson
import pytest
import torch
from fuzz import FUZZ
from loop_driver import ForcedPauses
from recorded_runs import (
    MAX_UTILIZATION,
    NO_EVICT,
    ScheduledHost,
    random_run,
    record,
    request,
)

from gptmanager import (
    REQUEST_METRICS,
    GptManager,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.environment.lazy_names import named
from gptmanager.errors import ConfigError, RecordingError
from gptmanager.recorder.recording_file import End, RunEnd, read_recording
from gptmanager.replay import completed, difference, replay
from gptmanager.replay.arguments import add_command
from gptmanager.replay.main import imported
from gptmanager.scheduler import RequestScheduler, SchedulerOutput
from gptmanager.testing import RecordingCallbacks, ScriptedModel

# The best of the first 60: each kind of event below happens at least five times.
SEEDS = (5, 7, 8, 12, 19, 22, 41, 44, 45, 59)


def test_random_runs_replay_without_divergence(tmp_path):
    """And they hold what they are for: pauses, stops, failures, late results, cached blocks."""
    seen: Counter[str] = Counter()
    for seed in (*SEEDS, *range(60, 60 + 40 * (FUZZ - 1))):
        run = random_run(seed, tmp_path / "r.jsonl")
        report = replay(run)
        assert report.divergence is None, f"seed {seed}: {report.divergence}"
        assert report.compared == report.iterations == len(run.iterations) > 0
        for turn in run.iterations:
            count(turn, seen)
    kinds = {"paused", "chunks", "cached", "late", "failures"}
    kinds |= {"CANCELLED", "ERROR", "END_ID", "STOP_WORDS", "LENGTH", "TIMED_OUT"}
    assert all(seen[kind] > 2 for kind in kinds), seen


def count(turn, seen):
    seen.update(end.reason for end in turn.ends)
    seen["failures"] += len(turn.intake.failures)
    if turn.schedule is not None:
        slots = {start.slot for start in turn.schedule.starts}
        for row in turn.schedule.context_rows:
            seen["chunks"] += not row.samples
            seen["cached"] += row.slot in slots and row.position > 0
        seen["paused"] += len(turn.schedule.paused)
        seen["late"] += turn.result_of not in (None, turn.schedule.iteration)


class OddModel(ScriptedModel):
    """NaN behind every history of 14 tokens, of which the blocks are withdrawn then."""

    def __init__(self):
        super().__init__(lambda history: len(history) % 50, vocab_size=50)

    def forward(self, batch, kv_pool):
        logits = super().forward(batch, kv_pool)
        logits[torch.from_numpy(np.asarray(batch.positions[batch.sample_index]) == 13)] = torch.nan
        return logits


@pytest.mark.parametrize("ahead", [{}, {"run_ahead": 1}, {"enable_trt_overlap": True}], ids=str)
def test_rows_without_a_token_replay(tmp_path, ahead):
    all_but_two = np.where(np.arange(50) < 2, 0, -np.inf)
    banned = {"embedding_bias": all_but_two, "noRepeatNgramSize": 1}
    requests = [
        *(request(i, 3, 6, num_return_sequences=1 + i % 2, **banned) for i in range(1, 5)),
        *(request(i, 5, 6 + i, beam_width=1 + i % 2) for i in range(5, 9)),
        *(request(i, 13, 4, is_streaming=True) for i in range(9, 13)),
    ]
    cache = KvCacheConfig(max_tokens=96, tokens_per_block=4, enable_block_reuse=True)
    host = ScheduledHost([requests[:6], [], [], requests[6:]])
    run = record(tmp_path / "r.jsonl", host, kv_cache=cache, model=OddModel(), **ahead)
    report = replay(run)
    assert report.divergence is None and report.compared > 0
    errors = [r.error.split(" (")[0] for r in host.responses if r.is_final and r.error]
    assert Counter(errors) == {
        "LogitsError: no token is possible as generated token 3": 4,
        "LogitsError: the logits of generated token 10": 4,
        "LogitsError: the logits of generated token 2": 4,
    }


# Planted differences -----------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    host = ScheduledHost([[request(i, 4 + i, 12 + i, end_id=49) for i in range(6)]])
    return record(tmp_path / "r.jsonl", host, enable_chunked_context=True, max_num_tokens=16)


def changed_header(run, **changes):
    blueprint = dataclasses.replace(run.header.blueprint, **changes)
    return dataclasses.replace(run, header=dataclasses.replace(run.header, blueprint=blueprint))


def planted(run, index, **changes):
    turns = list(run.iterations)
    turns[index] = dataclasses.replace(turns[index], **changes)
    return dataclasses.replace(run, iterations=tuple(turns))


def test_a_changed_token_is_found_in_the_iteration_that_it_changes(run):
    turn = run.iterations[5]
    tokens = turn.result.tokens.copy()
    tokens[1] = 49
    report = replay(planted(run, 5, result=dataclasses.replace(turn.result, tokens=tokens)))
    ended = turn.schedule.sampling_rows[1].request_id
    assert report.divergence.index == 5
    assert report.divergence.field == "ends[0]" and "nothing" in str(report.divergence.recorded)
    assert report.divergence.replayed == End(ended, "END_ID")


def test_without_recorded_ends_it_is_found_in_the_schedule_after(run):
    turn = run.iterations[5]
    tokens = turn.result.tokens.copy()
    tokens[1] = 49
    changed = planted(run, 5, result=dataclasses.replace(turn.result, tokens=tokens), ends=None)
    divergence = replay(changed).divergence
    assert divergence.index == 6 and divergence.field.startswith("schedule.")


@pytest.mark.parametrize("index", [0, 3, 9])
def test_a_changed_row_is_named_to_the_field(run, index):
    schedule = run.iterations[index].schedule
    rows = schedule.rows
    name = "context_rows" if schedule.context_rows else "generation_rows"
    changed = (rows[0]._replace(position=77), *getattr(schedule, name)[1:])
    report = replay(planted(run, index, schedule=dataclasses.replace(schedule, **{name: changed})))
    divergence = report.divergence
    assert divergence.index == index and divergence.field == f"schedule.{name}[0].position"
    assert (divergence.recorded, divergence.replayed) == (77, rows[0].position)
    assert report.iterations == index + 1
    assert f"iteration {index}" in str(divergence) and "replayed schedule: number" in str(
        divergence
    )


@pytest.mark.parametrize(
    ("change", "index"),
    [
        ({"max_num_tokens": 12}, 0),
        ({"max_batch_size": 3}, 1),
        ({"run_ahead": 1}, 0),
    ],
)
def test_a_changed_option_is_found_where_it_first_shows(run, change, index):
    blueprint = run.header.blueprint
    changed = changed_header(run, params=dataclasses.replace(blueprint.params, **change))
    assert replay(changed).divergence.index == index


def test_a_changed_policy_is_found_where_it_first_shows(tmp_path):
    requests = [request(i, 8, 40) for i in range(4)]
    run = record(tmp_path / "r.jsonl", ScheduledHost([requests]), MAX_UTILIZATION)
    changed = changed_header(run, scheduler=SchedulerConfig(NO_EVICT))
    divergence = replay(changed).divergence
    assert divergence.index == 0 and divergence.field.startswith("schedule.context_rows")


def test_an_empty_schedule_and_a_missing_one_are_reported(run):
    assert replay(planted(run, 4, schedule=None)).divergence.recorded == "no request runs"
    divergence = replay(planted(run, 4, intake=dataclasses.replace(
        run.iterations[4].intake, stops=frozenset(range(6))))).divergence  # fmt: skip
    assert divergence.index == 4 and divergence.replayed == "no request runs"


def test_a_missing_result_is_reported_unless_the_run_broke_off_there(run):
    divergence = replay(planted(run, 4, result=None, result_of=None)).divergence
    assert divergence.index == 4 and divergence.field == "error"
    cut = dataclasses.replace(run, iterations=run.iterations[:5], end=RunEnd("failed", "E: x"))
    report = replay(planted(cut, 4, result=None, result_of=None))
    assert report.divergence is None and report.broke_off.startswith("E: x")


def test_differences_are_named_by_path():
    assert difference([1, (2, 3)], [1, (2, 4)], "x") == ("x[1][1]", 3, 4)
    assert difference((1,), (1, 2), "x") == ("x[1]", "nothing", 2)
    assert difference({"a": 1}, {"a": 2}, "x") == ("x.a", 1, 2)
    assert difference(1, 1, "x") is None


# Schedulers of one's own -------------------------------------------------------------------


class Backwards(RequestScheduler):
    """Serves the last first, and breaks when told to."""

    def __init__(self, micro_batch_scheduler, breaks_at=None):
        self.micro_batch_scheduler = micro_batch_scheduler
        self.calls = 0
        self.breaks_at = breaks_at

    def schedule_request(self, active_requests, inflight_request_ids):
        self.calls += 1
        if self.calls == self.breaks_at:
            raise ValueError("the ninth call")
        fitting = active_requests[-2:][::-1]
        context, generation = self.micro_batch_scheduler.schedule(fitting, inflight_request_ids)
        return SchedulerOutput(context, generation, [])


def create_backwards(*, micro_batch_scheduler, **others):
    return Backwards(micro_batch_scheduler)


def create_breaking(*, micro_batch_scheduler, **others):
    return Backwards(micro_batch_scheduler, breaks_at=9)


def test_a_failure_of_ones_own_scheduler_is_reproduced(tmp_path):
    path = tmp_path / "box.jsonl"
    host = ScheduledHost([[request(i, 3, 9) for i in range(3)]])
    manager = GptManager(
        ScriptedModel(lambda history: 1),
        ModelType.INFLIGHT_FUSED_BATCHING,
        scheduler_config=SchedulerConfig(create_scheduler=create_breaking),
        optional_params=OptionalParams(black_box_path=path),
        **host.keywords(),
    )
    assert manager.wait(30)
    box = read_recording(path)
    with pytest.raises(RecordingError, match="create_breaking.*--scheduler"):
        replay(box)
    report = replay(box, create_scheduler=create_breaking)
    assert report.divergence is None and "the ninth call" in report.broke_off
    assert report.broke_off.endswith("so did the replay")
    assert command(["replay", str(path), "--scheduler", "test_replay:create_breaking"]) == 0


def test_forced_pauses_replay(tmp_path):
    """A scheduler that pauses and lets nobody run leaves a trace, too."""

    def create(*, micro_batch_scheduler, **others):
        forced = ForcedPauses(Backwards(micro_batch_scheduler))
        forced.victims = {0}
        return forced

    path = tmp_path / "r.jsonl"
    host = ScheduledHost([[request(0, 3, 5)]])
    with GptManager(
        ScriptedModel(lambda history: 1),
        ModelType.INFLIGHT_FUSED_BATCHING,
        scheduler_config=SchedulerConfig(create_scheduler=create),
        optional_params=OptionalParams(recording_path=path),
        **host.keywords(),
    ) as manager:
        assert manager.wait_idle(30)
    assert replay(read_recording(path), create_scheduler=create).divergence is None


# Completed ---------------------------------------------------------------------------------


def test_completed_gives_the_ends_and_the_loop(run):
    """As from a black box, which dropped its schedules."""
    lacks = {"ends": None, "schedule": None, "kept": False}
    bare = dataclasses.replace(
        run, iterations=tuple(dataclasses.replace(t, **lacks) for t in run.iterations)
    )
    for turn, (whole, loop) in zip(run.iterations, completed(bare), strict=True):
        assert whole.ends == turn.ends and whole.schedule == turn.schedule and whole.kept
        loop.allocator.check()
    assert not loop.active


def test_completed_refuses_a_recording_that_does_not_replay(run):
    with pytest.raises(RecordingError, match="does not replay"):
        list(completed(planted(run, 4, schedule=None)))


# The command -------------------------------------------------------------------------------


def command(arguments):
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers(required=True))
    options = parser.parse_args(arguments)
    return named(options.command)(options)


def test_the_command_says_that_all_is_well(run, tmp_path, capsys):
    assert command(["replay", str(tmp_path / "r.jsonl")]) == 0
    count = len(run.iterations)
    assert capsys.readouterr().out == f"{count} iterations, {count} compared: no divergence\n"


def test_values_of_two_kinds_differ_where_they_are():
    for one, other in (({"b": 1}, 2), (2, {"b": 1}), ([1], {"b": 1}), ({"b": 1}, None)):
        assert difference({"a": one}, {"a": other}, "x") == ("x.a", one, other)
    assert difference({"a": 1}, {"a": 1, "b": 2}, "x") == ("x.b", None, 2)


def test_the_table_has_the_metrics_that_the_host_got(tmp_path):
    path, table = tmp_path / "r.jsonl", tmp_path / "r.csv"
    host = RecordingCallbacks([request(1, 2, 3), request(2, 1, 1), request(3, 0, 4)])
    with GptManager(
        ScriptedModel(lambda history: 7),
        ModelType.INFLIGHT_FUSED_BATCHING,
        optional_params=OptionalParams(recording_path=path),
        **host.keywords(),
    ) as manager:
        assert manager.wait_idle(10)
    assert command(["replay", str(path), "--table", str(table)]) == 0
    with table.open(newline="") as file:
        rows = {row["request_id"]: row for row in csv.DictReader(file)}
    assert {key: row["outcome"] for key, row in rows.items()} == {
        "1": "LENGTH", "2": "LENGTH", "3": "InvalidRequestError"
    }  # fmt: skip
    for name, metric in zip(REQUEST_METRICS, host.final(1).tensors["request_metrics"], strict=True):
        assert float(rows["1"][name]) == pytest.approx(float(metric), abs=1e-6)
    first, last, per_token, per_s = (
        float(rows["1"][name])
        for name in ("first_token_s", "last_token_s", "per_token_s", "tokens_per_s")
    )
    assert per_token == pytest.approx((last - first) / 2, rel=1e-3)
    assert per_s == pytest.approx(3 / last, rel=1e-3)
    assert rows["2"]["per_token_s"] == rows["3"]["first_token_s"] == rows["3"]["tokens_per_s"] == ""
    with pytest.raises(ConfigError, match="FILE and --table must be different files"):
        command(["replay", str(path), "--table", str(path)])


def test_the_command_reports_a_divergence(run, tmp_path, capsys):
    path = tmp_path / "r.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"max_batch_size":4', b'"max_batch_size":3'))
    assert command(["replay", str(path)]) == 1
    assert "iteration 1, schedule.context_rows" in capsys.readouterr().out
    assert command(["replay", str(path), "--json"]) == 1
    told = orjson.loads(capsys.readouterr().out)
    assert told["divergence"]["index"] == 1 and told["iterations"] == 2


def test_a_scheduler_that_cannot_be_imported_is_named():
    for name in ("nowhere:x", "gptmanager:nothing", "gptmanager", "gptmanager:__doc__", ":x"):
        with pytest.raises(ConfigError, match=f"--scheduler {name}"):
            imported(name)


def test_a_scheduler_of_the_current_folder_is_found(tmp_path, monkeypatch):
    (tmp_path / "schedulers_of_mine.py").write_text(
        "class Own:\n    def make(**others):\n        return others\n\nmake = Own.make\n"
    )
    (tmp_path / "broken_of_mine.py").write_text("1 / 0")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    monkeypatch.chdir(tmp_path)
    assert imported("schedulers_of_mine:make")(a=1) == {"a": 1}
    assert imported("schedulers_of_mine:Own.make")(a=1) == {"a": 1}
    with pytest.raises(ConfigError, match="--scheduler broken_of_mine:make: ZeroDivisionError"):
        imported("broken_of_mine:make")
    with pytest.raises(ConfigError, match="schedulers_of_mine:makes: AttributeError.*makes"):
        imported("schedulers_of_mine:makes")
