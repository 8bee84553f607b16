"""Recordings: what is written is what was, and a black box that begins in the middle replays."""

from __future__ import annotations

import dataclasses
import logging
import math
import re
import threading
import types
import typing
from enum import Enum
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch
from loop_driver import LoopDriver
from recorded_runs import (
    MAX_UTILIZATION,
    NO_EVICT,
    CrashingModel,
    ScheduledHost,
    random_run,
    record,
    request,
    serve,
)

from gptmanager import (
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
)
from gptmanager.assembly.options import checked_optional_params
from gptmanager.decoding.end_rule import EndRule, EndRuleState
from gptmanager.decoding.prompt_lookup import RequestDrafts
from gptmanager.errors import ConfigError, RecordingError
from gptmanager.host.rank_messages import pack_requests, unpack_requests
from gptmanager.kv_cache.block import BlockCopy
from gptmanager.loop.active_state import ProgressState, RequestState, request_state
from gptmanager.loop.admission import admit
from gptmanager.loop.limits import Limits
from gptmanager.loop.request_times import RequestTimes
from gptmanager.recorder import black_box
from gptmanager.recorder.limits import without_code
from gptmanager.recorder.recorder import Recorder
from gptmanager.recorder.recording_file import FORMAT, Iteration, make_header, read_recording
from gptmanager.recorder.requests import (
    Allowance,
    Opaque,
    RecordedError,
    plain_request,
    request_from_plain,
)
from gptmanager.recorder.values import Decoder, field_names, to_json
from gptmanager.replay import replay
from gptmanager.request.read_tensors import read_float, read_token_ids
from gptmanager.request.sampling_params import SamplingParams
from gptmanager.simulator.comparison import Machine, hypothetical, variant
from gptmanager.step import (
    BeamCandidates,
    BlockAppend,
    Failure,
    Intake,
    Row,
    Schedule,
    SequenceStart,
    StepResult,
)
from gptmanager.testing import ScriptedModel

HEADER = to_json(make_header(hypothetical(Machine(), 64))) + b"\n"


def returned(value, hint):
    return Decoder(field_names(Iteration)).decode(hint, orjson.loads(to_json(value)))


# Values ------------------------------------------------------------------------------------


def test_a_schedule_comes_back_as_it_was():
    schedule = Schedule(
        iteration=7,
        context_rows=(Row(2**64 - 1, 3, 1, 0, 5, False),),
        generation_rows=(Row(4, 1, 0, 9, 1, True),),
        starts=(SequenceStart(1, (1, 2, 3), 3, SamplingParams(top_p=0.1, seed=2**64 - 1)),),
        block_appends=(BlockAppend(1, 0, (5, 6)),),
        block_copies=(BlockCopy(1, 2, 3),),
        paused=(8, 9),
    )
    assert returned(schedule, Schedule) == schedule


def test_an_intake_comes_back_with_stops_and_failures():
    intake = Intake(1.25, (), frozenset({5, 2**64 - 1}), (3,), (Failure(9, ValueError("no")),))
    back = returned(intake, Intake)
    assert (back.now, back.stops, back.ready) == (1.25, intake.stops, (3,))
    ((request_id, error),) = back.failures
    assert request_id == 9 and isinstance(error, RecordedError) and str(error) == "ValueError: no"


def test_a_result_comes_back():
    result = StepResult(np.array([[1, 2], [3, 4]], np.int32), 0.1, np.array([2, 1], np.int32))
    back = returned(result, StepResult)
    assert back.tokens.dtype == np.int32 and back.tokens.tolist() == [[1, 2], [3, 4]]
    assert back.num_tokens.tolist() == [2, 1] and back.now == 0.1


@pytest.mark.parametrize(
    "value",
    [
        np.arange(12, dtype=np.int64).reshape(1, 12),
        np.array([[1, 2]], dtype=np.uint8)[:, ::-1],
        np.full((3, 4), 2.5, dtype=np.float16),
        np.array([1.0, np.nan, -np.inf]),
        np.array([True, False]),
        np.array(5),
        np.zeros((0,), dtype=np.int32),
        torch.tensor([[1, 2, 3]], dtype=torch.int32),
        torch.tensor([0.1, 7.0], dtype=torch.bfloat16),
        torch.tensor(True),
    ],
    ids=lambda value: f"{type(value).__name__} {value.dtype}",
)
def test_a_tensor_keeps_kind_dtype_shape_and_values(value):
    line = to_json(InferenceRequest(1, {"input_ids": value}))
    back = request_from_plain(orjson.loads(line), Allowance(100)).input_ids
    assert type(back) is type(value) and back.dtype == value.dtype and back.shape == value.shape
    np.testing.assert_array_equal(np.array(back.tolist()), np.array(value.tolist()))


def test_a_request_keeps_its_attributes_and_defaults_are_left_out():
    whole = InferenceRequest(
        3, {"end_id": [4]}, is_streaming=True, client_id=8, priority=0.25, deadline_s=1.5,
        queue_timeout_s=float("inf"), cache_salt="tenant", retention_priority=0,
    )  # fmt: skip
    back = request_from_plain(orjson.loads(to_json(whole)), Allowance(100))
    for name in ("is_streaming", "client_id", "priority", "deadline_s", "queue_timeout_s"):
        assert getattr(back, name) == getattr(whole, name)
    assert back.cache_salt == "tenant" and back.retention_priority == 0 and back.end_id == [4]
    assert plain_request(InferenceRequest(0)) == {"request_id": 0, "tensors": {}}
    odd = InferenceRequest(4, cache_salt=False, client_id=False, is_streaming=0)
    back = request_from_plain(orjson.loads(to_json(odd)), Allowance(100))
    assert (back.cache_salt, back.client_id) == (False, False) and back.is_streaming is not False


@pytest.mark.parametrize(
    "ids",
    [
        np.array([[3, 4, 5]], dtype=object),
        np.array([3, 4, 5], dtype=">i4"),
        *(torch.tensor([3, 4, 5], dtype=dtype) for dtype in (torch.uint16, torch.uint64)),
    ],
)
@pytest.mark.parametrize(
    "temperature",
    [
        np.array(0.5, dtype=object),
        np.array([0.5], dtype=np.longdouble),
        torch.tensor([0.5]).to(torch.float8_e4m3fn),
    ],
)
def test_whatever_dtype_admission_takes_comes_back_as_the_same_numbers(ids, temperature):
    given = InferenceRequest(1, {"input_ids": ids, "temperature": temperature})
    back = request_from_plain(orjson.loads(to_json(given)), Allowance(100))
    for told in (given, back):
        assert read_token_ids("input_ids", told.input_ids, 10) == [3, 4, 5]
        assert read_float("temperature", told.temperature, 0.0) == 0.5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("is_streaming", torch.tensor([True])),
        ("is_streaming", np.array(True)),
        ("priority", torch.tensor(0.7, dtype=torch.bfloat16)),
        ("priority", 1 << 70),
        ("priority", type("Level", (float,), {})(0.25)),
        ("deadline_s", np.array([[2.5]])),
        ("client_id", np.array(2**64 - 1, dtype=np.uint64)),
        ("cache_salt", -(1 << 70)),
        ("input_ids", list(torch.tensor([3, 4, 5]))),
        ("input_ids", [np.array([3, 4, 5])]),
        ("temperature", np.longdouble(0.5)),
    ],
)
def test_every_value_that_admission_accepts_comes_back_as_the_same(name, value):
    limits = Limits(10, max_seq_len=64, max_input_len=63, num_blocks=9, tokens_per_block=4)
    given = InferenceRequest.from_tokens(1, **{"input_ids": [1], "max_new_tokens": 3, name: value})
    recorded = request_from_plain(orjson.loads(to_json(given)), Allowance(100))
    (sent,) = unpack_requests(pack_requests([given]))
    wanted, *others = (
        to_json(request_state(admit(it, limits, 0.0))) for it in (given, recorded, sent)
    )
    assert others == [wanted] * 2


def test_an_array_that_is_not_a_limit_comes_back_as_one_that_is_refused():
    given = InferenceRequest.from_tokens(1, [1], 3, deadline_s=np.array(math.inf))
    back = request_from_plain(orjson.loads(to_json(given)), Allowance(100))
    assert back.deadline_s == [math.inf]


@pytest.mark.parametrize("shape", ["3", None, [3.0], [-1], ["3"], [True], [2**63]])
def test_a_shape_that_no_array_has_is_a_recording_error(shape):
    plain = {"request_id": 1, "tensors": {"input_ids": {"numpy": "int64", "fill": 0}}}
    plain["tensors"]["input_ids"]["shape"] = shape
    with pytest.raises(RecordingError, match="^input_ids must have a valid shape$"):
        request_from_plain(plain, Allowance(100))


def test_what_no_json_can_hold_is_opaque():
    odd = InferenceRequest(1, {"input_ids": np.array(["x"]), "end_id": {1}}, deadline_s=object())
    back = request_from_plain(orjson.loads(to_json(odd)), Allowance(100))
    assert all(isinstance(v, Opaque) for v in (back.input_ids, back.end_id, back.deadline_s))


def test_a_field_that_the_file_lacks_has_its_default_and_an_unknown_one_is_dropped():
    data = {"iteration": 3, "context_rows": [[1, 2, 3, 4, 5, True, "new"]], "from_the_future": 1}
    names = {"Row": ["request_id", "epoch", "slot", "position", "num_tokens", "samples", "more"]}
    assert Decoder(names).decode(Schedule, data) == Schedule(3, (Row(1, 2, 3, 4, 5, True),))


def test_a_request_recorded_before_adapters_were_waits_for_none():
    driver = LoopDriver()
    driver.submit(request(1, 3, 4))
    driver.loop.iterate()
    (state,) = driver.loop.table.state().active
    names = {name: [*fields] for name, fields in field_names(ProgressState).items()}
    old = [it for it in names["ProgressState"] if not it.startswith(("awaited", "adapter"))]
    data = orjson.loads(to_json(state.progress))[: len(old)]
    assert Decoder({**names, "ProgressState": old}).decode(ProgressState, data) == state.progress


def test_a_log_probability_of_nothing_comes_back():
    dead = BeamCandidates(((1, 2), (3,)), ((-0.5, -math.inf), (-math.inf,)))
    result = StepResult(np.array([[0]], np.int32), 0.1, beams=(dead,))
    assert returned(result, StepResult).beams == (dead,)


# The state of a loop -----------------------------------------------------------------------


def test_every_attribute_is_in_the_state_or_follows_from_what_the_loop_is_made_of():
    """What a change adds to one of these must be in its state, or a black box replays wrongly."""
    driver = LoopDriver(num_blocks=8)
    driver.submit(request(1, 3, 4))
    loop = driver.loop
    loop.iterate()
    (active,) = loop.active
    assert vars(loop).keys() == {
        *("executor", "scheduler", "scheduler_timer", "phase_times"),
        *("max_active", "max_batch_size", "max_num_tokens", "run_ahead", "num_micro_batches"),
        *("table", "confirmation", "allocator", "pending"),
    }
    assert vars(loop.table).keys() == {
        *("host", "limits", "extras", "_final", "_allocator"),
        *("active", "adapters", "by_id", "preparing", "num_serial", "_timed"),
        *("_arriving", "_resumed"),
        *("_intake", "_stopping", "_ending"),  # within an iteration
        "weights_version",  # counts calls of update_weights, which no recording has
    }
    assert vars(loop.confirmation).keys() == {
        *("_table", "_allocator", "_providers", "failing", "drafts", "num_logits_errors"),
        "num_removals",  # compared within an iteration
    }
    assert vars(loop.allocator).keys() == {
        *("kv_cache", "num_slots", "window", "_saves_states"),
        *("_free_slots", "_num_starts", "num_schedules", "_paused"),
    }
    assert vars(loop.table.adapters).keys() == {
        *("cache", "reads", "moves", "unknown", "num_jobs", "has_changed"),
        *("passed_over", "num_overtaken"),
        *("requests", "waiting", "counts"),  # follow from these
        *("_load", "_patience"),
        *("_forgotten", "_done", "_failures"),  # within an iteration
    }
    derived = {"beam_width", "arrival_time", "has_extras", "adapter_tensors", "encoder_len"}
    derived.add("weights_versions")  # a field of the loop, see above
    attributes = {name for cls in type(active).__mro__ for name in getattr(cls, "__slots__", ())}
    assert {name.removeprefix("_") for name in attributes - derived} == {
        *RequestState._fields, *ProgressState._fields,
    } - {"beams", "progress"}  # fmt: skip
    assert {"words" if name == "stop_words" else name for name in EndRule.__slots__} == {
        *EndRuleState._fields,
        "end_ids",  # one of the sampling parameters
    }
    assert active.times.state()._fields == RequestTimes.__slots__
    assert set(active.drafts.state()._fields) == set(RequestDrafts.__slots__)


# Files -------------------------------------------------------------------------------------


def test_a_recording_has_every_iteration(tmp_path):
    host = ScheduledHost([[request(1, 3, 4)], [], [request(2, 30, 2, is_streaming=True)]])
    run = record(tmp_path / "r.jsonl", host, enable_chunked_context=True, max_num_tokens=8)
    assert [turn.index for turn in run.iterations] == list(range(len(run.iterations)))
    assert {e.request_id: e.reason for t in run.iterations for e in t.ends} == {
        1: "LENGTH", 2: "LENGTH",
    }  # fmt: skip
    assert run.end.reason == "drained"
    arrivals = [r for turn in run.iterations for r in turn.intake.requests]
    assert [r.request_id for r in arrivals] == [1, 2] and arrivals[1].is_streaming
    assert run.iterations[0].num_active == 0 and run.iterations[1].num_active == 1
    for turn in run.iterations:
        assert len(turn.result.tokens) == len(turn.schedule.sampling_rows)
        assert turn.result_of == turn.schedule.iteration
    assert run.duration_s > 0


def test_a_recording_is_at_most_a_second_late(tmp_path):
    path, recorder, lines = tmp_path / "r.jsonl", Recorder(), []
    with path.open("wb") as recorder._file:
        for now in (0.5, 1.0, 1.9, 2.0):
            recorder.begin_iteration(1, Intake(now))
            recorder.end_iteration()
            lines.append(path.read_bytes().count(b"\n"))
    assert lines == [0, 2, 2, 4]


def test_an_idle_manager_writes_nothing(tmp_path):
    run = record(tmp_path / "r.jsonl", ScheduledHost([[], [], []]))
    assert run.iterations == () and run.end.reason == "drained"


INTAKE_FIELDS = [field for field in dataclasses.fields(Intake) if field.name != "now"]


@pytest.mark.parametrize("field", INTAKE_FIELDS, ids=lambda field: field.name)
def test_an_iteration_with_any_input_is_not_empty(field):
    value = True if field.type == "bool" else frozenset([1]) if field.name == "stops" else (1,)
    assert Iteration(0, 0, Intake(2.5)).is_empty
    assert not Iteration(0, 0, Intake(2.5, **{field.name: value})).is_empty


def test_a_file_that_cannot_be_written_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="cannot write"):
        record(tmp_path / "no" / "r.jsonl", ScheduledHost([]))


def test_an_abort_ends_the_recording_before_its_errors(tmp_path):
    path, started = tmp_path / "r.jsonl", threading.Event()

    class Hurried(ScheduledHost):
        def return_batch_manager_stats(self, record):
            started.set()

    host = Hurried([[request(1, 3, 50)]])
    manager = GptManager(
        ScriptedModel(lambda history: 1),
        ModelType.INFLIGHT_FUSED_BATCHING,
        optional_params=OptionalParams(recording_path=path, max_seq_len=2000),
        **host.keywords(),
    )
    assert started.wait(30)
    manager.shutdown(drain=False)
    run = read_recording(path)
    assert run.end.reason in ("aborted", "drained")  # it may have been quick
    assert replay(run).divergence is None


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "first line must be"),
        (b'{"kind":"header"}\n', "first line must be"),
        (b"nonsense\n{}\n", "line 1 must be JSON"),
        (b'{"format":"%s","version":99}\n' % FORMAT.encode(), "version 99"),
        (HEADER + b'{"kind":"x"}\n', "line 2: unknown kind 'x'"),
        (HEADER + b'{"kind":"iteration"}\n', "line 2"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(tmp_path, content, problem):
    (tmp_path / "r.jsonl").write_bytes(content)
    with pytest.raises(RecordingError, match=re.escape(problem)):
        read_recording(tmp_path / "r.jsonl")


def test_no_file_is_a_recording_error(tmp_path):
    with pytest.raises(RecordingError, match="No such file"):
        read_recording(tmp_path / "r.jsonl")


def test_a_last_line_that_is_cut_off_is_left_out(tmp_path, caplog):
    path = tmp_path / "r.jsonl"
    run = record(path, ScheduledHost([[request(1, 3, 4)]]))
    path.write_bytes(path.read_bytes()[:-20])
    with caplog.at_level(logging.WARNING):
        cut = read_recording(path)
    assert "is truncated" in caplog.text
    assert len(cut.iterations) == len(run.iterations) and cut.end is None
    assert replay(cut).divergence is None


def holds_only_data(hint):
    """Whether each value of a field of this type can be written and read back."""
    if dataclasses.is_dataclass(hint):
        return all(holds_only_data(other) for other in typing.get_type_hints(hint).values())
    if typing.get_origin(hint) in (types.UnionType, typing.Union, list):
        return all(map(holds_only_data, typing.get_args(hint)))
    plain = (str, int, float, bool, type(None))
    is_enum = isinstance(hint, type) and issubclass(hint, Enum)
    return typing.get_origin(hint) is typing.Literal or is_enum or hint in plain


def test_options_with_code_or_file_names_are_left_out():
    """A new option of such a type must be left out, too, or be refused by every manager."""
    hints = typing.get_type_hints(OptionalParams)
    names = {name for name, hint in hints.items() if not holds_only_data(hint)}
    assert {"attention_provider", "restore_cb", "journal_path"} < names
    blueprint = hypothetical(Machine(), 64)
    params = dataclasses.replace(blueprint.params, **dict.fromkeys(names, print))
    left = without_code(dataclasses.replace(blueprint, params=params))
    for name in names:
        if getattr(left, name) is print:
            with pytest.raises(ConfigError, match="no effect|not supported"):
                checked_optional_params(OptionalParams(**{name: print}))


def test_a_manager_with_a_journal_is_recorded_as_one_that_computes_contexts_in_chunks(tmp_path):
    options = {"journal_path": tmp_path / "journal", "restore_cb": lambda request_id: None}
    path = tmp_path / "r.jsonl"
    host = ScheduledHost([[request(i, 20, 4, is_streaming=True) for i in range(3)]])
    run = record(path, host, **options)
    assert str(tmp_path) not in path.read_text()
    assert replay(run).divergence is None and len(run.iterations) > 4
    assert variant(run.header.blueprint, NO_EVICT, Machine(max_batch_size=2)).sizes.chunked


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_ends_the_recording_not_the_loop(caplog):
    host = ScheduledHost([[], [request(1, 3, 4)]])
    serve(host, Path("/dev/full"))
    assert host.final(1).error == "" and "No space left" in caplog.text


# The black box -----------------------------------------------------------------------------


def crash(path, num_steps, keep=8, **options):
    host = ScheduledHost([[request(i, 3 + i, 40) for i in range(5)]])
    return record(
        path, host, MAX_UTILIZATION, model=CrashingModel(num_steps),
        black_box_path=path, black_box_iterations=keep, **options,
    )  # fmt: skip


def test_a_manager_that_fails_writes_its_last_iterations(tmp_path, caplog):
    path = tmp_path / "box.jsonl"
    box = crash(path, 30)
    assert f"the last iterations are written to {path}" in caplog.text
    assert box.end.reason == "failed" and "on fire" in box.end.error
    assert [turn.kept for turn in box.iterations] == [False] * 22 + [True] * 9
    report = replay(box)
    assert report.divergence is None and report.compared == 9
    assert "on fire" in report.broke_off and report.iterations == 31


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("reuse", [False, True])
def test_a_black_box_that_begins_in_the_middle_replays(tmp_path, monkeypatch, run_ahead, reuse):
    monkeypatch.setattr(black_box, "_MIN_SEGMENT", 8)
    monkeypatch.setattr(black_box, "_STATE_NS_PER_ITERATION", 1 << 40)
    box = crash(
        tmp_path / "box.jsonl",
        37,
        run_ahead=run_ahead,
        kv_cache=KvCacheConfig(max_tokens=100, tokens_per_block=4, enable_block_reuse=reuse),
    )
    assert box.header.state is not None and box.iterations[0].index > 0
    assert box.iterations[0].num_active == 4
    report = replay(box)
    assert report.divergence is None and report.compared == 9


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.every(3)
def test_random_black_boxes_replay(tmp_path, monkeypatch, seed):
    monkeypatch.setattr(black_box, "_MIN_SEGMENT", 4)
    monkeypatch.setattr(black_box, "_STATE_NS_PER_ITERATION", 1 << 40)
    path = tmp_path / "box.jsonl"
    path.touch()
    model = CrashingModel(10 + seed)
    try:
        box = random_run(
            seed, path, model=model, black_box_path=path, black_box_iterations=6
        )  # fmt: skip
    except RecordingError:
        assert not path.read_bytes() and model.num_forwards <= model.num_steps  # it did not crash
        return
    report = replay(box)
    assert report.divergence is None and report.compared == min(7, len(box.iterations))


def test_by_default_the_black_box_is_a_private_temporary_file(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    host = ScheduledHost([[request(1, 3, 40)]])
    serve(host, None, model=CrashingModel(5))
    (box,) = tmp_path.glob("gptmanager-black-box-*.jsonl")
    assert box.stat().st_mode & 0o077 == 0 and str(box) in caplog.text
    assert read_recording(box).end.reason == "failed"


def test_without_iterations_to_keep_there_is_no_black_box(tmp_path):
    path = tmp_path / "box.jsonl"
    with pytest.raises(RecordingError, match="No such file"):
        crash(path, 5, keep=0)


def test_the_ring_keeps_a_bounded_number_of_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(black_box, "_MIN_SEGMENT", 4)
    monkeypatch.setattr(black_box, "_STATE_NS_PER_ITERATION", 1 << 40)
    box = crash(tmp_path / "box.jsonl", 39, keep=3)
    assert 4 <= len(box.iterations) <= 9 and sum(turn.kept for turn in box.iterations) == 4
