"""The black box is bounded in turns and bytes, and replays whatever it had to drop.

GPTMANAGER_FUZZ=N runs N times as many random runs.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import logging
import os
import sys
import tempfile
import time
import types
import weakref
from dataclasses import asdict
from enum import Enum
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fuzz import FUZZ
from recorded_runs import (
    MAX_UTILIZATION,
    VOCAB_SIZE,
    CrashingModel,
    ScheduledHost,
    random_run,
    record,
    request,
    serve,
)

from gptmanager import InferenceRequest, KvCacheConfig, OptionalParams
from gptmanager.assembly.options import checked_optional_params
from gptmanager.errors import ConfigError, RecordingError
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.recorder import black_box
from gptmanager.recorder.black_box import BlackBox
from gptmanager.recorder.black_box_file import BlackBoxFile, prune_black_boxes
from gptmanager.recorder.kept import Keeper
from gptmanager.recorder.requests import Opaque, plain_request
from gptmanager.replay import replay
from gptmanager.request.input_rows import HostRows
from gptmanager.request.post_processor import RequestProcessor
from gptmanager.step import Intake
from gptmanager.testing.hosts import ScriptedSpec

MB = 1 << 20


@pytest.fixture
def boxes(monkeypatch):
    """Every black box that is made."""
    made = []
    init = BlackBox.__init__

    def noted(self, *arguments, **keywords):
        init(self, *arguments, **keywords)
        made.append(self)

    monkeypatch.setattr(BlackBox, "__init__", noted)
    return made


def make_segments_short(monkeypatch, num_turns):
    monkeypatch.setattr(black_box, "_MIN_SEGMENT", num_turns)
    monkeypatch.setattr(black_box, "_STATE_NS_PER_ITERATION", 1 << 40)


def estimated_bytes(box):
    return box._recent_bytes + box._num_segment_bytes


def num_turns(box):
    return sum(len(segment.iterations) for segment in box._segments)


def deep_bytes(*values):
    """What the objects take that these reach, each counted once; classes and code are not."""
    seen, size, waiting = set(), 0, list(values)
    shared = (type, types.ModuleType, types.FunctionType, types.CodeType, Enum, RequestProcessor)
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, shared):
            continue
        seen.add(id(value))
        size += sys.getsizeof(value)
        if isinstance(value, torch.Tensor):
            size += value.untyped_storage().nbytes()
            continue
        if isinstance(value, np.ndarray):
            assert value.base is None or isinstance(value.base, (np.ndarray, torch.Tensor))
            continue
        waiting.extend(gc.get_referents(value))
    return size


@pytest.mark.parametrize("value", [-1, 0, 1000, 1 << 63, 1.5, True, "64 MB", None])
def test_bytes_are_checked(value):
    with pytest.raises(ConfigError, match=r"OptionalParams\.black_box_bytes = "):
        checked_optional_params(OptionalParams(black_box_bytes=value))


@pytest.mark.parametrize("value", [MB, 64 * MB, 1 << 40])
def test_bytes_from_a_megabyte_on_are_taken(value):
    assert checked_optional_params(OptionalParams(black_box_bytes=value)).black_box_bytes == value


def test_biases_of_large_vocabularies_are_not_kept(boxes):
    """A request with 0.5 MB of them in each turn."""
    size = 128_000
    values = np.where(np.arange(size) % 3, 0.5, -np.inf).astype(np.float32)
    host = ScheduledHost(
        [[InferenceRequest.from_tokens(i, [1], 2, embedding_bias=values.copy())] for i in range(60)]
    )
    model = CrashingModel(1 << 30)
    model.spec = ScriptedSpec(size, 64)
    serve(host, None, model=model)
    (box,) = boxes
    assert num_turns(box) >= 60 and deep_bytes(box._segments, box._recent) < MB


class Processor:
    """A callable that a weak reference can follow."""

    def __init__(self, fails):
        self.fails = fails

    def __call__(self, request_id, logits, tokens, stream, client_id):
        if self.fails:
            raise RuntimeError("no")


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_host_gave_and_errors_end_with_their_request(boxes, fails, monkeypatch):
    # a captured log record keeps the error that it tells of, and all that it passed
    monkeypatch.setattr(logging.getLogger("gptmanager"), "disabled", True)
    processor, ids = Processor(fails), torch.arange(1000) % VOCAB_SIZE
    ends = [weakref.ref(processor), weakref.ref(ids)]
    one = request(1, 3, 3, logits_post_processor=processor)
    one.input_ids = ids
    host = ScheduledHost([[one], [], []])
    serve(
        host, None, max_seq_len=1010, kv_cache=KvCacheConfig(max_tokens=1024), max_num_tokens=1024
    )
    assert bool(host.final(1).error) == fails
    del one, processor, ids
    gc.collect()
    (box,) = boxes
    assert num_turns(box) and [end() for end in ends] == [None, None]


def test_a_part_of_a_large_array_does_not_keep_all_of_it(boxes):
    corpus = np.zeros(MB, dtype=np.int64)
    script = [
        [InferenceRequest(i, {"input_ids": corpus[i : i + 9], "request_output_len": 1})]
        for i in range(9)
    ]
    host = ScheduledHost(script)
    serve(host, None)
    assert deep_bytes(boxes[0]._segments) < MB


def test_a_stop_of_the_process_makes_no_long_segment(boxes, monkeypatch):
    """Wall time passes, and no CPU time of the thread."""
    state, stops = TokenLoop.state, []

    def stopped(loop):
        stops.append(time.sleep(0.1))
        return state(loop)

    monkeypatch.setattr(TokenLoop, "state", stopped)
    monkeypatch.setattr(black_box, "_MIN_SEGMENT", 8)
    serve(ScheduledHost([[request(1, 3, 60)]]), None, black_box_iterations=4)
    assert stops and boxes[0]._segment_length < 5_000  # 0.1 s would make 50,000


def crash(path, script, num_steps, **options):
    return record(
        path, ScheduledHost(script), MAX_UTILIZATION, model=CrashingModel(num_steps),
        black_box_path=path, **options,
    )  # fmt: skip


def test_long_prompts_are_dropped_before_they_take_too_much(tmp_path, boxes, monkeypatch):
    sizes, turns, add = [], itertools.count(), BlackBox.add

    def noted(box, turn):
        add(box, turn)
        if next(turns) % 4 == 0:  # counting all that a box refers to takes longer than the run
            sizes.append((estimated_bytes(box), deep_bytes(box._segments, box._recent)))

    monkeypatch.setattr(BlackBox, "add", noted)
    script = [[request(i, 2000, 2)] for i in range(200)]
    box = crash(
        tmp_path / "box.jsonl", script, 120, black_box_bytes=2 * MB, max_seq_len=2048,
        max_num_tokens=4096, kv_cache=KvCacheConfig(max_tokens=1 << 13, enable_block_reuse=True),
    )  # fmt: skip
    assert len(sizes) >= 25 and max(estimate for estimate, _ in sizes) <= 2 * MB
    assert all(actual <= estimate for estimate, actual in sizes)
    assert box.iterations[0].index > 20 and box.header.state is not None
    report = replay(box)
    assert report.divergence is None and report.compared >= 1


@pytest.mark.parametrize("beam_width", [1, 3])
def test_histories_count_although_a_state_only_refers_to_them(boxes, beam_width, monkeypatch):
    """What has ended is alive as long as a state of the box refers to it."""
    sizes, state = {}, TokenLoop.state

    def noted(loop):
        found = state(loop)
        for row in loop.active:
            sizes[len(row.tokens)] = black_box.state_bytes(found)
        return found

    monkeypatch.setattr(TokenLoop, "state", noted)
    make_segments_short(monkeypatch, 8)
    inputs = {"beam_width": beam_width} if beam_width > 1 else {}
    host = ScheduledHost([[request(1, 3, 60, **inputs)]])
    serve(host, None, black_box_iterations=4, kv_cache=KvCacheConfig(max_tokens=256))
    shortest, longest = min(sizes), max(sizes)
    assert longest >= shortest + 40
    assert sizes[longest] - sizes[shortest] >= 40 * (longest - shortest) * beam_width


def test_a_state_that_does_not_fit_is_logged_once_and_tried_again(tmp_path, monkeypatch, caplog):
    size = 2 * MB
    monkeypatch.setattr(black_box, "state_bytes", lambda state: size)
    make_segments_short(monkeypatch, 4)
    options = {"black_box_bytes": MB, "black_box_iterations": 4}
    serve(ScheduledHost([[request(1, 3, 60)]]), None, **options)
    assert caplog.text.count("the black box is off for now") == 1
    path = tmp_path / "box.jsonl"
    path.touch()
    with pytest.raises(RecordingError):
        crash(path, [[request(1, 3, 60)]], 40, **options)
    assert not path.read_bytes() and "more than black_box_bytes" in caplog.text
    sizes = iter([size] * 3)
    monkeypatch.setattr(black_box, "state_bytes", lambda state: next(sizes, MB // 8))
    report = replay(crash(path, [[request(1, 3, 60)]], 40, **options))
    assert report.divergence is None and report.compared == 5


@pytest.mark.parametrize("seed", range(8 * FUZZ))
def test_random_black_boxes_replay_whatever_they_dropped(tmp_path, monkeypatch, boxes, seed):
    chance = np.random.default_rng(seed)
    make_segments_short(monkeypatch, 3)
    monkeypatch.setattr(black_box, "iteration_bytes", lambda turn: int(chance.integers(1 << 18)))
    monkeypatch.setattr(black_box, "schedule_bytes", lambda turn: int(chance.integers(1 << 17)))
    monkeypatch.setattr(black_box, "state_bytes", lambda turn: int(chance.integers(1 << 19)))
    path = tmp_path / "box.jsonl"
    path.touch()
    model = CrashingModel(10 + seed)
    try:
        box = random_run(
            100 + seed, path, model=model, black_box_path=path, black_box_iterations=6,
            black_box_bytes=MB,
        )  # fmt: skip
    except RecordingError:
        assert not path.read_bytes() and model.num_forwards <= model.num_steps  # it did not crash
        return
    assert replay(box).divergence is None and estimated_bytes(boxes[0]) <= MB


@pytest.mark.parametrize("num_steps", [3, 14])
def test_numbers_for_the_executor_are_known_by_their_digest(tmp_path, monkeypatch, num_steps):
    """From the start of the run, and from a state in its middle."""
    make_segments_short(monkeypatch, 4)
    bias = np.linspace(-1, 1, VOCAB_SIZE).astype(np.float32)
    table = np.ones((3, 4), dtype=np.float32)
    logits = np.zeros((2, VOCAB_SIZE), dtype=np.float32)
    odd = bias.copy()
    odd[3] = np.nan  # refused
    script = [
        [
            request(10 * i + 1, 5, 9, embedding_bias=bias, return_log_probs=True),
            request(10 * i + 2, 5, 9, embedding_bias=0 * bias),
            request(10 * i + 3, 5, 9, prompt_embedding_table=table, prompt_vocab_size=2),
            request(10 * i + 4, 5, 9, prompt_embedding_table=table + i),
            request(10 * i + 5, 5, 9, draft_input_ids=[1, 2], draft_logits=logits, temperature=0.5),
            request(10 * i + 6, 5, 9, embedding_bias=odd),
        ]
        for i in range(9)
    ]
    model = CrashingModel(num_steps)
    model.spec = SimpleNamespace(**asdict(model.spec), hidden_size=4)
    path = tmp_path / "box.jsonl"
    box = record(
        path, ScheduledHost(script), model=model, black_box_path=path, max_seq_len=32,
        max_active_requests=None, black_box_iterations=4,
        kv_cache=KvCacheConfig(max_tokens=512, enable_block_reuse=True),
    )  # fmt: skip
    assert (box.header.state is not None) == (num_steps == 14)
    report = replay(box)
    assert report.divergence is None and report.compared == min(5, num_steps + 1)
    rows = {
        request.request_id % 10: name
        for turn in box.iterations
        for request in turn.intake.requests
        for name, value in request.tensors.items()
        if isinstance(value, HostRows)
    }
    assert num_steps == 14 or set(rows) == {1, 2, 3, 4, 5}


def test_the_digest_of_rows_is_worked_out_once(monkeypatch):
    num_digests, sha256 = [], hashlib.sha256
    monkeypatch.setattr(hashlib, "sha256", lambda text: num_digests.append(1) or sha256(text))
    bias = np.linspace(-1, 1, VOCAB_SIZE).astype(np.float32)
    table = np.ones((3, 4), dtype=np.float32)
    logits = np.zeros((2, VOCAB_SIZE), dtype=np.float32)
    host = ScheduledHost(
        [
            [
                request(1, 5, 3, embedding_bias=bias),
                request(2, 5, 3, prompt_embedding_table=table),
                request(3, 5, 3, draft_input_ids=[1, 2], draft_logits=logits, temperature=0.5),
            ]
        ]
    )
    model = CrashingModel(1 << 30)
    model.spec = SimpleNamespace(**asdict(model.spec), hidden_size=4)
    serve(host, None, model=model)
    assert not any(host.final(i).error for i in (1, 2, 3))
    assert len(num_digests) == 3


@pytest.mark.parametrize(
    "value", [np.broadcast_to(np.int8(1), (1 << 23,)), torch.ones(1).expand(1 << 23)]
)
def test_what_admission_refuses_for_its_size_is_copied_nowhere(value):
    """A view of one number: as many as it claims to have would take what memory there is."""
    huge = InferenceRequest(1, {"input_ids": value, "request_output_len": np.array(3)})
    (kept,) = Keeper(VOCAB_SIZE, 0).intake(Intake(0.0, (huge,))).requests
    assert isinstance(kept.tensors["input_ids"], Opaque)
    assert plain_request(huge)["tensors"]["input_ids"] == {"opaque": type(value).__name__}


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_a_tensor_that_its_host_changes_later_is_kept_as_it_was(make):
    ids = make([1, 2, 3])
    given = InferenceRequest(1, {"input_ids": ids, "request_output_len": np.array(3)})
    (kept,) = Keeper(VOCAB_SIZE, 0).intake(Intake(0.0, (given,))).requests
    ids[0] = 2
    assert kept.tensors["input_ids"].tolist() == [1, 2, 3]


def test_few_black_boxes_stay_in_the_temporary_folder(tmp_path):
    for number in range(20):
        path = tmp_path / f"gptmanager-black-box-{number:02}.jsonl"
        path.touch()
        age = 8 * 86400 if number == 19 else 1000 - number
        os.utime(path, (time.time() - age,) * 2)
    (tmp_path / "another.jsonl").touch()
    prune_black_boxes(tmp_path)
    left = sorted(path.name[21:23] for path in tmp_path.glob("gptmanager-*"))
    assert left == [f"{number:02}" for number in range(4, 19)]
    assert (tmp_path / "another.jsonl").exists()


@pytest.fixture(params=[0o000, 0o022])
def temporary(request, tmp_path, monkeypatch):
    """The temporary folder, under the umask of a user who hides nothing, and under the usual one.

    Other threads of this process make no files meanwhile.
    """
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = os.umask(request.param)
    yield tmp_path
    os.umask(before)


def mode(path):
    return oct(path.stat().st_mode & 0o777)


def test_a_black_box_in_the_temporary_folder_is_for_its_owner_alone(temporary):
    serve(ScheduledHost([[request(1, 3, 40)]]), None, model=CrashingModel(5))
    (box,) = temporary.iterdir()
    assert mode(box) == "0o600" and box.stat().st_uid == os.getuid()


@pytest.mark.parametrize("meanwhile", ["kept", "removed", "link"])
def test_a_black_box_is_written_over_for_its_owner_alone(temporary, meanwhile):
    """A cleaner of the temporary folder may have removed it, and anybody may make a link there."""
    file, victim = BlackBoxFile(None), temporary / "victim"
    victim.write_bytes(b"mine")
    path = file.write(b"first")
    assert path.read_bytes() == b"first" and mode(path) == "0o600"
    if meanwhile != "kept":
        path.unlink()
    if meanwhile == "link":
        path.symlink_to(victim)
    assert file.write(b"second") == path and not path.is_symlink()
    assert path.read_bytes() == b"second" and mode(path) == "0o600"
    assert victim.read_bytes() == b"mine" and {*temporary.iterdir()} == {path, victim}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_leaves_no_part_of_a_black_box(temporary, monkeypatch):
    with open("/dev/full", "wb", buffering=0) as full:
        made = temporary / "part"
        made.touch()
        monkeypatch.setattr(tempfile, "mkstemp", lambda *_: (os.dup(full.fileno()), str(made)))
        with pytest.raises(OSError, match="No space left"):
            BlackBoxFile(None).write(b"text")
    assert not [*temporary.iterdir()]


def test_the_file_of_a_host_has_the_mode_that_its_umask_says(temporary):
    path = temporary / "box.jsonl"
    umask = os.umask(0)
    os.umask(umask)
    assert BlackBoxFile(path).write(b"text") == path and path.read_bytes() == b"text"
    assert mode(path) == oct(0o666 & ~umask)
