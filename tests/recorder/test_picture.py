"""Pictures of schedules: what they say is what the loop did, and the documents show that."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from html import escape
from pathlib import Path

import numpy as np
import pytest
from loop_driver import LoopDriver

from gptmanager import InferenceRequest, ModelType, OptionalParams
from gptmanager.assembly.blueprint import Blueprint, _scheduler
from gptmanager.assembly.sizing import Sizes
from gptmanager.config import CapacitySchedulerPolicy, KvCacheConfig, PromptLookup, SchedulerConfig
from gptmanager.environment.lazy_names import named
from gptmanager.errors import ConfigError
from gptmanager.manager.gpt_manager import GptManager
from gptmanager.picture import builder as builder_module
from gptmanager.picture import recorded as recorded_module
from gptmanager.picture.arguments import add_command
from gptmanager.picture.builder import TraceBuilder
from gptmanager.picture.drawing import draw, layout_of
from gptmanager.picture.layout import PANEL
from gptmanager.picture.observer import observe
from gptmanager.picture.perfetto import chrome_trace
from gptmanager.picture.recorded import trace_of
from gptmanager.picture.rows import DASHES
from gptmanager.picture.svg import STYLE
from gptmanager.picture.trace import Bounds, Phase, Reason, Span
from gptmanager.picture.zoom_page import page
from gptmanager.recorder import Recorder, RecordingExecutor, RecordingHost
from gptmanager.recorder.recording_file import Iteration, read_recording
from gptmanager.scheduler.wait_reasons import Wait, WaitReason, unreported_wait
from gptmanager.step import BlockAppend, Intake, Row, Schedule, SequenceStart, StepResult
from gptmanager.testing import RecordingCallbacks, ScriptedModel

MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import schedule_pictures as scenes  # noqa: E402

outputs_of_512 = scenes.outputs_of_512 = functools.cache(scenes.outputs_of_512)


def at(trace, column):
    """request id -> what it does in a column: ("C", tokens), ("G", n), or the phase's name."""
    seen = {}
    for row in trace.rows:
        for span in row.spans:
            if span.begin <= column < span.end:
                if span.phase is Phase.CONTEXT:
                    seen[row.request_id] = ("C", span.num_tokens)
                elif span.phase is Phase.GENERATION:
                    token = span.position + column - span.begin - row.prompt_len + 1
                    seen[row.request_id] = ("G", token)
                else:
                    seen[row.request_id] = span.phase.value
    return seen


def start(row):
    return next(span.begin for span in row.spans if span.phase is Phase.CONTEXT)


# The examples of docs/scheduling.md ----------------------------------------------------------


def test_toy_example_with_whole_contexts():
    trace = scenes.toy(chunked=False)

    wait = Phase.WAITING.value
    assert at(trace, 0) == {1: ("C", 5), 2: ("C", 5), 3: wait, 4: wait, 5: wait}
    assert at(trace, 1) == {1: ("G", 1), 2: ("G", 1), 3: ("C", 3), 4: ("C", 3), 5: wait}
    assert at(trace, 2) == {2: ("G", 2), 3: ("G", 1), 4: ("G", 1), 5: ("C", 3)}
    assert trace.row(1).end == 2 and trace.row(1).outcome == "END_ID"
    third, fourth, fifth = (trace.row(request_id).spans[0] for request_id in (3, 4, 5))
    assert third.reason is fourth.reason is Reason.TOKENS
    assert third.why == (
        "for tokens of a step: it needs 3, 2 of max_num_tokens = 12 are left by 2 starting "
        "requests, short by 1"
    )
    assert fourth.why.startswith("behind request 3, which waits for tokens of a step: that needs 3")
    assert (fifth.reason, fifth.end) == (Reason.BATCH, 2)
    assert fifth.why == "for room in the batch: 4 starting requests, at most 4 at once"


def test_toy_example_with_chunks():
    trace = scenes.toy(chunked=True)

    wait = Phase.WAITING.value
    assert at(trace, 0) == {1: ("C", 5), 2: ("C", 5), 3: ("C", 2), 4: wait, 5: wait}
    assert at(trace, 1) == {1: ("G", 1), 2: ("G", 1), 3: ("C", 1), 4: ("C", 3), 5: wait}
    assert at(trace, 2) == {2: ("G", 2), 3: ("G", 1), 4: ("G", 1), 5: ("C", 3)}


def test_guaranteed_no_evict_runs_each_output_of_512_in_512_iterations():
    trace = outputs_of_512(scenes.GUARANTEED_NO_EVICT)

    whole = [row for row in trace.rows if row.num_generated == 512]
    assert len(whole) == len(trace.rows) - 3
    assert {row.end - start(row) for row in whole} == {512}
    assert not any(row.num_pauses for row in trace.rows)
    ends = sorted(row.end for row in trace.rows)
    # a column of `end` is the first in which the request is gone: its successor runs in that one
    assert [start(row) for row in trace.rows[4:]] == ends[: len(trace.rows) - 4]
    assert max(column.num_running for column in trace.columns) == 4


def test_static_batch_waits_for_the_whole_batch():
    trace = outputs_of_512(scenes.STATIC_BATCH)

    assert sorted({start(row) for row in trace.rows}) == [0, 512, 1024, 1536, 2048]
    assert trace.columns[400].num_running == 1  # three of the four have stopped early
    assert {span.reason for span in trace.rows[-1].spans} >= {Reason.STATIC}


def test_max_utilization_runs_more_at_once_and_pauses():
    trace = outputs_of_512(scenes.MAX_UTILIZATION)
    no_evict = outputs_of_512(scenes.GUARANTEED_NO_EVICT)

    assert [column.num_running for column in trace.columns[:6]] == [4, 8, 11, 15, 16, 16]
    assert all(column.num_tokens <= 256 for column in trace.columns)
    paused = [row for row in trace.rows if row.num_pauses]
    assert paused and sum(column.num_paused for column in trace.columns) == sum(
        row.num_pauses for row in paused
    )
    for row in paused:  # after its last pause each resumes with a context, and comes to its end
        kinds = [span.phase for span in row.spans]
        assert Phase.CONTEXT in kinds[kinds.index(Phase.PAUSED) :]
    assert all(row.end is not None for row in trace.rows)
    assert all(row.num_generated == 512 for row in trace.rows[3:])
    assert len(trace.columns) < 0.7 * len(no_evict.columns)
    assert max(column.used_blocks for column in trace.columns) == 72


def test_the_table_of_the_policies_is_true():
    text = (ROOT / "docs" / "scheduling.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([A-Z_]+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    assert len(rows) == 3
    for policy, *written in rows:
        trace = outputs_of_512(scenes.CapacitySchedulerPolicy[policy])
        columns = trace.columns
        assert list(map(int, written)) == [
            len(columns),
            max(column.num_running for column in columns),
            sum(column.num_paused for column in columns),
            sum(column.context_tokens for column in columns),
        ]
        if policy == "GUARANTEED_NO_EVICT":
            peak = max(column.used_blocks for column in columns)
            assert f"never more than {peak} of the {trace.bounds.num_blocks} blocks" in text


def test_committed_pictures_are_what_the_script_draws():
    for name, picture in scenes.pictures().items():
        committed = ROOT / "docs" / "pictures" / name
        assert committed.read_text(encoding="utf-8") == picture + "\n", (
            f"draw {name} anew: python examples/schedule_pictures.py"
        )


# From a trace to a picture -------------------------------------------------------------------


def local(tag):
    return tag.rpartition("}")[2]


@pytest.mark.parametrize(
    "make",
    [
        lambda: scenes.toy(chunked=True),
        lambda: outputs_of_512(scenes.MAX_UTILIZATION),
        lambda: outputs_of_512(scenes.MAX_UTILIZATION).window(500, 520),
    ],
    ids=["tokens", "bars", "cells"],
)
def test_a_picture_is_well_formed_and_refers_to_nothing_outside(make):
    trace = make()
    text = draw(trace, "A & B <i>")
    root = ElementTree.fromstring(text)

    assert local(root.tag) == "svg"
    assert "url(" not in text and "href" not in text
    names = [n.text for n in root.iter() if local(n.tag) == "text" and n.text.startswith("request")]
    assert names == [f"request {row.request_id}" for row in trace.rows]
    width, height = float(root.get("width")), float(root.get("height"))
    for node in root:
        if local(node.tag) == "text":
            assert 0 <= float(node.get("x")) <= width and 0 <= float(node.get("y")) <= height


def test_every_chunk_has_its_numbers_to_point_at():
    text = draw(scenes.toy(chunked=True))
    assert "request 3, iteration 0: context, 2 tokens (positions 0 to 1)" in text
    assert "request 1, iteration 1: generation, yields token 2" in text
    assert "request 1 ends: 2 tokens, END_ID" in text
    assert "request 5, iteration 1: waiting for room in the batch: 4 starting requests" in text


def test_a_context_after_a_pause_shows_what_was_generated_before():
    text = draw(outputs_of_512(scenes.MAX_UTILIZATION))
    assert re.search(r"context, \d+ tokens [^<]*; \d+ were generated before a pause", text)


def test_the_page_is_one_file():
    text = page(outputs_of_512(scenes.MAX_UTILIZATION), "a </script> title")
    assert not re.search(r'(src|href)="', text)
    assert "a &lt;/script&gt; title" in text
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert len(data["columns"]) == 1407 and len(data["rows"]) == 18
    assert data["columns"][0] == [4, 0, 256, 8, 14, 0]


def test_a_picture_of_nothing_is_a_picture():
    assert "0 requests in 0 iterations" in draw(TraceBuilder(Bounds(1, 1, 1, 1)).build())


def test_long_names_and_lengths_of_rows_stay_in_their_columns():
    builder = TraceBuilder(Bounds(4, 8, 8, 4))
    for request_id, prompt_len in ((7, 4), (123456, 4), (2**64 - 1, 131072)):
        builder.arrive(request_id, prompt_len, 16384)
    builder.step(Schedule(0, (Row(7, 1, 0, 0, 4, True),)), 0.0)
    picture = ElementTree.fromstring(draw(builder.build()))
    texts = [node for node in picture.iter() if node.get("class", "").startswith("end")]
    names = [node.text for node in texts if node.get("class") == "end"]
    assert names == ["request 7", "123456", "\u202673709551615"]
    squeezed = [(node.text, node.get("textLength")) for node in texts if node.get("textLength")]
    assert squeezed == [("131072+16384", "50")]


def test_thousands_of_rows_are_cut_and_the_picture_says_so():
    builder = TraceBuilder(Bounds(4, 8, 8, 4))
    for request_id in range(2500):
        builder.arrive(request_id, 4, 4)
    builder.step(Schedule(0, (Row(0, 1, 0, 0, 4, True),)), 0.0)
    assert "2500 requests in 1 iteration \u00b7" in draw(builder.build())
    assert "the first 2000 are drawn" in draw(builder.build())


WAIT = Wait(WaitReason.BATCH_FULL, 1, 1, 1, 1)


def crowd(num_requests=2000, num_columns=100):
    """One request runs at a time, as many as columns; the others wait."""
    builder = TraceBuilder(Bounds(1, 8, 8, 4))
    for request_id in range(num_requests):
        builder.arrive(request_id, 4, 1)
    for column in range(num_columns):
        row = Row(column, column + 1, 0, 0, 4, True)
        waits = dict.fromkeys(range(column + 1, num_requests), WAIT)
        builder.step(Schedule(column, (row,)), float(column), waits)
        builder.end(column, "LENGTH")
    return builder


def test_many_rows_are_compact_and_below_the_panels():
    trace = crowd().build()
    layout = layout_of(trace)
    assert layout.panels_first and layout.panels_top < 200 < layout.rows_top < 500
    assert layout.full_height < 3600
    picture = ElementTree.fromstring(draw(trace))
    plots = [e for e in picture.iter() if e.get("class") == "plot"]
    rows = max(plots, key=lambda plot: float(plot.get("height")))
    others = [float(plot.get("y")) for plot in plots if plot is not rows]
    assert max(others) + PANEL < float(rows.get("y")) == layout.rows_top
    few = layout_of(outputs_of_512(scenes.MAX_UTILIZATION))
    assert not few.panels_first and few.rows_top == few.top < few.panels_top
    assert layout_of(crowd(num_columns=20).build()).full_height < 3600


def test_a_request_that_waits_costs_nothing_in_each_iteration(monkeypatch):
    added = Counter()
    add = builder_module._Request.add

    def counted(self, span):
        added[span.phase] += 1
        add(self, span)

    monkeypatch.setattr(builder_module._Request, "add", counted)
    trace = crowd(num_requests=500).build()
    assert added[Phase.WAITING] < 500 and added[Phase.CONTEXT] == 100
    assert [len(row.spans) for row in trace.rows] == [1] + [2] * 99 + [1] * 400
    waits = trace.rows[300].spans[0]
    assert (waits.begin, waits.end, waits.reason) == (0, 100, Reason.BATCH)
    assert waits.why == WAIT.text == "for room in the batch: 1 running request, at most 1 at once"


def test_every_reason_has_dashes_of_its_own_and_a_name_in_the_legend():
    shown = [reason for reason in Reason if reason not in (Reason.NONE, Reason.BLOCKS)]
    assert len({DASHES[reason] for reason in shown}) == len(shown)
    spans = tuple(
        Span(Phase.WAITING, place, place + 1, reason=reason, why="so")
        for place, reason in enumerate(Reason)
        if reason is not Reason.NONE
    )
    trace = scenes.toy(chunked=True)
    trace = dataclasses.replace(trace, rows=(dataclasses.replace(trace.rows[0], spans=spans),))
    picture = draw(trace)
    for reason in shown:
        assert f"waits: {escape(reason.value)}" in picture
        assert f".picture .{DASHES[reason]} {{ stroke-dasharray" in STYLE


def test_a_window_keeps_iterations_and_token_numbers():
    window = scenes.toy(chunked=False).window(1, 3)
    assert [column.iteration for column in window.columns] == [1, 2]
    assert at(window, 1) == {2: ("G", 2), 3: ("G", 1), 4: ("G", 1), 5: ("C", 3)}
    assert window.row(1).end == 1 and window.row(2).end is None


def test_a_window_of_other_iterations_than_those_of_the_trace_is_empty():
    late = scenes.toy(chunked=False).window(3, 6)
    assert [column.iteration for column in late.window(0, 4).columns] == [3]
    for first, end in ((0, 2), (6, 9), (5, 4)):
        assert late.window(first, end).columns == late.window(first, end).rows == ()


def test_requests_that_only_wait_can_be_left_out():
    window = scenes.toy(chunked=False).window(0, 1)
    assert [row.request_id for row in window.rows] == [1, 2, 3, 4, 5]
    assert [row.request_id for row in window.without_idle().rows] == [1, 2]


def test_chrome_trace_events():
    builder = TraceBuilder(Bounds(1, 8, 8, 4))
    builder.arrive(7, 4, 2)
    builder.arrive(9, 3, 1)
    builder.step(Schedule(0, (Row(7, 0, 0, 0, 4, True),)), 5.0, {9: WAIT})
    builder.step(Schedule(1, (), (Row(7, 0, 0, 4, 1, True),)), 5.25, {9: WAIT})
    builder.end(7, "LENGTH")
    builder.step(Schedule(2, (Row(9, 1, 0, 0, 3, True),)), 5.25)  # at least 1 us later
    builder.end(9, "LENGTH")
    trace = builder.build()
    events = json.loads(chrome_trace(trace))["traceEvents"]

    named = [(it["name"], it["pid"], it["tid"], *it["args"].values()) for it in of("M", events)]
    assert named == [
        ("process_name", 1, 0, "iterations"),
        ("process_name", 2, 0, "requests"),
        ("thread_name", 2, 1, "request 7"),
        ("thread_sort_index", 2, 1, 1),
        ("thread_name", 2, 2, "request 9"),
        ("thread_sort_index", 2, 2, 2),
    ]
    spans = of("X", events)
    assert [(it["name"], it["pid"], it["tid"], it["ts"], it["dur"]) for it in spans] == [
        ("iteration 0", 1, 1, 0, 250_000),
        ("iteration 1", 1, 1, 250_000, 1),
        ("iteration 2", 1, 1, 250_001, 125_000.5),  # as long as the others on average
        ("context", 2, 1, 0, 250_000),
        ("generation", 2, 1, 250_000, 1),
        ("waiting", 2, 2, 0, 250_001),
        ("context", 2, 2, 250_001, 125_000.5),
    ]
    assert [it["args"] for it in spans[:3]] == [column._asdict() for column in trace.columns]
    assert spans[5]["args"]["what"].endswith(WAIT.text)
    assert [(it["args"]["tokens"], it["args"]["reason"]) for it in spans[3:]] == [
        (4, ""),
        (1, ""),
        (0, "max_batch_size"),
        (3, ""),
    ]
    counters = [(it["ts"], it["name"], it["args"]) for it in of("C", events)]
    assert counters[4:8] == [
        (250_000, "requests", {"context": 0, "generation": 1}),
        (250_000, "tokens", {"context": 0, "generation": 1}),
        (250_000, "KV cache blocks", {"used": 0}),
        (250_000, "waiting", {"requests": 1}),
    ]
    ends = [(it["name"], it["tid"], it["ts"], it["args"]["generated"]) for it in of("i", events)]
    assert ends == [("end: LENGTH", 1, 250_001, 2), ("end: LENGTH", 2, 375_001.5, 1)]


def of(kind, events):
    return [event for event in events if event["ph"] == kind]


# From a loop or a recording to a trace -------------------------------------------------------


def test_used_blocks_are_those_of_the_kv_cache():
    driver = LoopDriver(num_blocks=12, max_batch_size=3, chunked=True, max_num_tokens=16)
    builder = observe(driver.loop, policy="GUARANTEED_NO_EVICT", chunk_unit=4)
    inner = driver.loop.executor
    used = []

    class Counting:
        sample, result = staticmethod(inner.sample), staticmethod(inner.result)

        def forward(self, schedule):
            used.append(12 - driver.kv_cache.get_num_free_blocks())
            return inner.forward(schedule)

    driver.loop.executor = Counting()
    for number in range(6):
        prompt = [number + 1] * (5 + 3 * number)
        driver.submit(InferenceRequest.from_tokens(number, prompt, 4 + number))
    driver.run()

    trace = builder.build()
    assert [column.used_blocks for column in trace.columns] == used
    assert [row.num_generated for row in trace.rows] == [4, 5, 6, 7, 8, 9]
    assert {row.outcome for row in trace.rows} == {"LENGTH"}


def test_higher_priority_arrives_before_those_that_wait():
    machine = scenes.Machine(scenes.GUARANTEED_NO_EVICT, 1, 8, 8, 4)
    jobs = [scenes.Job(4, 2), scenes.Job(4, 2), scenes.Job(4, 2, priority=0.9)]
    trace = scenes.run(machine, jobs)
    assert sorted((start(row), row.request_id) for row in trace.rows) == [
        (0, 3),
        (2, 1),
        (4, 2),
    ]
    assert trace.row(2).spans[0].reason is Reason.BATCH


def record(tmp_path, **options):
    """A manager's run on a tight pool, recorded; the path."""
    requests = [
        InferenceRequest.from_tokens(7, [1, 2, 3], 9),
        InferenceRequest.from_tokens(8, [1] * 9, 9, end_id=5, priority=0.25),
        InferenceRequest.from_tokens(9, [2] * 5, 9),
        InferenceRequest.from_tokens(10, [2] * 500, 9),  # longer than may be: refused
    ]
    callbacks = RecordingCallbacks(requests)
    path = tmp_path / "run.jsonl"
    params = OptionalParams(
        kv_cache_config=KvCacheConfig(max_tokens=32, tokens_per_block=4),
        max_batch_size=4,
        recording_path=path,
        **options,
    )
    with GptManager(
        ScriptedModel(lambda history: history[-1] + 1),
        ModelType.INFLIGHT_FUSED_BATCHING,
        optional_params=params,
        **callbacks.keywords(),
    ) as manager:
        manager.wait_idle(30)
    return path


def test_a_recording_gives_its_trace(tmp_path):
    trace = trace_of(read_recording(record(tmp_path)))

    assert [row.request_id for row in trace.rows] == [7, 8, 9]
    assert {row.request_id: row.outcome for row in trace.rows} == {
        7: "LENGTH",
        8: "END_ID",
        9: "LENGTH",
    }
    assert {row.request_id: row.num_generated for row in trace.rows} == {7: 9, 8: 4, 9: 9}
    assert trace.bounds.policy == "GUARANTEED_NO_EVICT" and trace.bounds.num_blocks == 8
    assert trace.row(8).spans[0].reason is Reason.BLOCKS
    assert max(column.used_blocks for column in trace.columns) <= 8


def test_a_picture_says_like_explain_that_a_scheduler_gives_no_reason(tmp_path):
    recording = read_recording(record(tmp_path))
    blueprint = dataclasses.replace(recording.header.blueprint, custom_scheduler="Mine")
    header = dataclasses.replace(recording.header, blueprint=blueprint)
    trace = trace_of(dataclasses.replace(recording, header=header))
    span = trace.row(8).spans[0]
    assert (span.phase, span.reason) == (Phase.WAITING, Reason.OTHER)
    assert span.why == unreported_wait("Mine", 5, 8 - trace.columns[0].used_blocks)


def test_a_scheduler_is_asked_for_reasons_until_that_takes_too_long(tmp_path):
    recording = read_recording(record(tmp_path))
    every, few = ([*recorded_module._waits_of(recording, most)] for most in (10**6, 20))
    assert 0 < len(few) < len(every) and few == every[: len(few)]


def picture(*arguments):
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers())
    options = parser.parse_args(["picture", *map(str, arguments)])
    return named(options.command)(options)


def test_the_command_writes_page_svg_and_trace(tmp_path, capsys):
    path = record(tmp_path)
    html, svg, chrome = tmp_path / "a.html", tmp_path / "b.SVG", tmp_path / "c.json"

    assert picture(path, "--output", html, "--chrome-trace", chrome) == 0
    assert picture(path, "--output", svg, "--iterations", "2:5", "--title", "Three") == 0

    assert html.read_text().startswith("<!DOCTYPE html>")
    assert "3 iterations" in svg.read_text() and ">Three<" in svg.read_text()
    assert picture(path, "--output", tmp_path / "d", "--svg") == 0
    assert svg.read_text()[:4] == (tmp_path / "d").read_text()[:4] == "<svg"
    assert json.loads(chrome.read_bytes())["traceEvents"]
    assert str(html) in capsys.readouterr().out


def test_the_command_names_what_is_wrong(tmp_path, capsys):
    path = record(tmp_path)
    with pytest.raises(ConfigError, match="nothing to write"):
        picture(path)
    with pytest.raises(ConfigError, match="no iteration to draw"):
        picture(path, "--output", tmp_path / "a.html", "--iterations", "9000:9001")
    with pytest.raises(ConfigError, match="cannot be written"):
        picture(path, "--output", tmp_path / "missing" / "a.html")
    with pytest.raises(SystemExit):
        picture(path, "--output", "a.html", "--iterations", "5:2")
    assert "must be a range of iterations" in capsys.readouterr().err


def test_what_began_before_the_first_schedule_is_drawn_from_there():
    """The end of a run, as a black box keeps it: a slot taken again tells of an end."""
    builder = TraceBuilder(Bounds(2, 8, 8, 4))
    builder.step(Schedule(100, (), (Row(5, 1, 0, 9, 1, True),)), 1.0)
    again = Schedule(
        101,
        (Row(6, 2, 0, 0, 3, True),),
        starts=(SequenceStart(0, (1, 2, 3), 3, None),),
        block_appends=(BlockAppend(0, 0, (4,)),),
    )
    builder.step(again, 2.0)
    trace = builder.build()

    assert trace.row(5).end == 1 and trace.first_iteration == 100
    assert [column.used_blocks for column in trace.columns] == [3, 1]
    assert at(trace, 0) == {5: ("G", 0)}


@pytest.mark.parametrize(
    ("run_ahead", "lookup"), [(0, None), (1, None), (0, PromptLookup(4, max_ngram=1, min_ngram=1))]
)
def test_a_loop_and_its_recording_give_the_same_trace(tmp_path, run_ahead, lookup):
    blueprint = Blueprint(
        OptionalParams(
            kv_cache_config=KvCacheConfig(tokens_per_block=4),
            max_batch_size=4,
            max_num_tokens=16,
            run_ahead=run_ahead,
            speculative_decoding_config=lookup,
        ),
        SchedulerConfig(MAX_UTILIZATION),
        Sizes(16, 4, 64, 63, False, True, 16),
        vocab_size=100,
    )
    driver = LoopDriver(
        num_blocks=16,
        run_ahead=run_ahead,
        chunked=True,
        max_num_tokens=16,
        max_active=None,
        lookup=lookup,
        script=lambda history: history[-1] % 7 + 1 if len(history) % 5 else 9,  # some drafts fail
        scheduler=lambda given: _scheduler(blueprint, given.capacity_scheduler.kv_cache_manager),
    )
    loop = driver.loop
    recorder = Recorder(tmp_path / "run.jsonl")
    loop.table.host = RecordingHost(loop.table.host, recorder)
    loop.executor = RecordingExecutor(loop.executor, recorder)
    recorder.start(loop, blueprint)
    builder = observe(loop, policy="MAX_UTILIZATION", chunk_unit=4)
    driver.submit(InferenceRequest.from_tokens(50, [1] * 70, 4))  # too long: refused
    for number in range(8):
        prompt = [number + 1] * (5 + number)
        driver.submit(InferenceRequest.from_tokens(number, prompt, 40, priority=number % 3 / 4))
    for number in range(12):
        loop.iterate()
        if number in (0, 8):
            for request_id in (0, 7):  # duplicates of one that runs, and of one that waits
                driver.submit(InferenceRequest.from_tokens(request_id, [1], 1))
    driver.host.callbacks.stop(7, 2)
    driver.run()
    recorder.close()

    observed, recorded = builder.build(), trace_of(read_recording(tmp_path / "run.jsonl"))
    assert sum(row.num_pauses for row in observed.rows) >= 1
    assert sorted(row.request_id for row in observed.rows) == [*range(8)]
    assert {row.outcome for row in observed.rows} == {"LENGTH", "CANCELLED"}
    reasons = {span.reason for row in observed.rows for span in row.spans}
    assert reasons >= {Reason.BLOCKS, Reason.NONE} and Reason.OTHER not in reasons
    assert recorded == observed
    assert {row.num_generated for row in observed.rows if row.outcome == "LENGTH"} == {40}
    generated = [span for span in observed.row(0).spans if span.phase is Phase.GENERATION]
    assert any(span.num_tokens > span.end - span.begin for span in generated) == bool(lookup)
    most = max(column.generation_tokens - column.num_generation for column in observed.columns)
    assert bool(most) == bool(lookup)


def test_ends_are_found_in_the_valid_tokens_of_a_row():
    """Rows with drafts, right and wrong ones, rows with beams, and rows that failed."""
    ask = InferenceRequest.from_tokens
    requests = [
        ask(1, [1, 2], 9, end_id=0),  # what follows its only token is padding
        ask(2, [1, 2], 9, end_id=8),
        ask(3, [1, 2], 4, end_id=0),
        ask(4, [1, 2], 9, end_id=0),
        ask(5, [1, 2], 2, end_id=0),
    ]
    rows = (
        Row(1, 1, 0, 3, 1, True),
        Row(2, 2, 1, 3, 4, True, num_drafts=3),
        Row(3, 3, 2, 2, 4, True, num_drafts=3),
        Row(4, 4, 3, 3, 1, True, beam_width=2),
        Row(5, 5, 4, 2, 1, True),
    )
    tokens = np.array([[5, 0, 0, 0], [7, 8, 9, 0], [7, 7, 7, 0], [0] * 4, [0] * 4], dtype=np.int32)
    result = StepResult(tokens, 1.5, np.array([1, 3, 3, 1, 0], dtype=np.int32))
    iteration = Iteration(0, 0, Intake(1.0, tuple(requests)), Schedule(0, (), rows))
    iteration.result_of, iteration.result = 0, result
    reader = recorded_module._Reader(TraceBuilder(Bounds(5, 20, 20, 4)), 100, 64)
    reader.read(iteration, None)
    rows = reader.builder.build().rows
    ends = {row.request_id: row.outcome for row in rows if row.end is not None}
    assert ends == {2: "END_ID", 3: "LENGTH"}


def test_a_black_box_gives_what_can_be_known(tmp_path):
    def fails_late(history):
        if len(history) == 30:
            raise RuntimeError("the model has failed")
        return history[-1] % 90 + 1

    requests = [InferenceRequest.from_tokens(n, [n] * 5, 10 + 3 * n) for n in range(1, 9)]
    callbacks = RecordingCallbacks(requests)
    params = OptionalParams(
        kv_cache_config=KvCacheConfig(max_tokens=80, tokens_per_block=4),
        max_batch_size=3,
        max_active_requests=None,
        black_box_iterations=12,
        black_box_path=tmp_path / "box.jsonl",
    )
    manager = GptManager(
        ScriptedModel(fails_late, vocab_size=100),
        ModelType.INFLIGHT_FUSED_BATCHING,
        optional_params=params,
        **callbacks.keywords(),
    )
    assert manager.wait_idle(30)
    manager.shutdown()

    trace = trace_of(read_recording(tmp_path / "box.jsonl"))
    assert len(trace.columns) in (12, 13)  # the one that failed may come on top
    assert all(column.num_running <= 3 for column in trace.columns)
    assert draw(trace).startswith("<svg")
