"""Recordings from strangers: nothing is written, nothing is run, and an error says what is wrong.

GPTMANAGER_FUZZ=N: N times as many mutated recordings.
"""

from __future__ import annotations

import os
import random
import re
import time

import orjson
import pytest
from fuzz import FUZZ
from recorded_runs import (
    MAX_UTILIZATION,
    CrashingModel,
    ScheduledHost,
    random_run,
    record,
    request,
)

from gptmanager import GptManager, InferenceRequest, KvCacheConfig, ModelType, OptionalParams
from gptmanager.cli import main
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.recorder import black_box
from gptmanager.recorder.recording_file import read_recording
from gptmanager.replay import replay, replaying
from gptmanager.simulator import load, simulation
from gptmanager.testing import RecordingCallbacks, ScriptedModel

COUNT = 30 * FUZZ
COMMANDS = ("replay", "simulate", "picture")


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    """The lines of a black box that begins in the middle, with requests that run."""
    path = tmp_path_factory.mktemp("box") / "box.jsonl"
    host = ScheduledHost([[request(i, 3 + i, 40, beam_width=1 + i % 2) for i in range(5)]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(black_box, "_MIN_SEGMENT", 8)
        patch.setattr(black_box, "_STATE_NS_PER_ITERATION", 1 << 40)
        record(
            *(path, host, MAX_UTILIZATION),
            model=CrashingModel(37),
            black_box_path=path,
            black_box_iterations=8,
            kv_cache=KvCacheConfig(max_tokens=200, tokens_per_block=4, enable_block_reuse=True),
        )
    return path.read_bytes().splitlines()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The lines of a whole run with beams, streams, stop words, stops and refused requests."""
    path = tmp_path_factory.mktemp("run") / "run.jsonl"
    random_run(11, path)
    return path.read_bytes().splitlines()


def call(command, path, folder):
    """The exit status of a command on a recording; what it may write goes to `folder`."""
    arguments = {
        "replay": ["replay", str(path)],
        "simulate": ["simulate", "--recording", str(path)],
        "picture": ["picture", str(path), "--output", str(folder / "picture.html")],
    }
    return main(arguments[command])


# What a file of version 1 could do: its objects named classes, and its state attributes ----------


def object_of(cls, **attributes):
    return {"class": cls, "names": list(attributes), "values": list(attributes.values())}


def graph_with_host(victim):
    """The loop's host is one of the file's making, whose statistics go to a file of its choice."""
    objects = [{"dict": [], "values": []}]

    def add(entry):
        objects.append(entry)
        return {"@": len(objects) - 1}

    sink = "gptmanager.callbacks.sinks.json_lines.JsonLinesSink"
    clock = add(object_of("gptmanager.statistics.PhaseTimes", nanoseconds="$(reboot)", _started=0))
    lock = add(object_of(sink, _file=None))
    fields = {"_path": str(victim), "_lock": lock, "_file": None, "_is_closed": False}
    write = add(object_of(sink, _max_bytes=None, **fields))
    host = object_of(
        "gptmanager.host.callback_host.CallbackHost", _return_stats=write, gil_wait_us=clock
    )
    objects[0] = {"dict": ["host"], "values": [add(host)]}
    return {"objects": objects, "root": {"@": 0}}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_recording_cannot_name_a_class(box, tmp_path, capsys, command):
    victim, path = tmp_path / "start_file", tmp_path / "r.jsonl"
    victim.write_text("# mine\n")
    header = orjson.loads(box[0])
    header["state"] = graph_with_host(victim)
    path.write_bytes(b"\n".join([orjson.dumps(header), *box[1:]]))
    assert call(command, path, tmp_path) == 2
    assert victim.read_text() == "# mine\n" and {*tmp_path.iterdir()} == {victim, path}
    assert capsys.readouterr().err.startswith(f"gptmanager: {path}, line 1: ")


# What a few bytes may ask for --------------------------------------------------------------


def changed(lines, number, change):
    """The file with line `number` as `change` leaves it."""
    value = orjson.loads(lines[number])
    change(value)
    return b"\n".join([*lines[:number], orjson.dumps(value), *lines[number + 1 :]])


def enlarge(header, **sizes):
    """Other sizes, as if the options had asked for no less."""
    blueprint = header["blueprint"]
    blueprint["sizes"].update(sizes)
    blueprint["params"]["max_seq_len"] = None
    blueprint["params"]["kv_cache_config"].update(max_tokens=None, enable_block_reuse=True)


def test_a_fill_has_no_more_values_than_the_file_could_hold(run, tmp_path, capsys):
    path, number = tmp_path / "r.jsonl", first_request(run)
    for shape in ([2**36], [2**31 - 1, 2**31 - 1], [2**22]):
        filled = {"numpy": "int64", "shape": shape, "fill": 3}

        def fill(line, filled=filled):
            line["intake"]["requests"][0]["tensors"]["input_ids"] = filled

        path.write_bytes(changed(run, number, fill))
        for command in COMMANDS:
            assert call(command, path, tmp_path) == 2
            assert f"line {number + 1}: " in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_weights_of_an_adapter_that_no_library_could_count(run, tmp_path, capsys, kind):
    path, number = tmp_path / "r.jsonl", first_request(run)

    def fill(line):
        filled = {kind: "float32", "shape": [2**31 - 1] * 32, "fill": 0}
        line["intake"]["requests"][0]["tensors"]["lora_weights"] = filled

    path.write_bytes(changed(run, number, fill))
    for command in COMMANDS:
        assert call(command, path, tmp_path) == 2
        told = capsys.readouterr().err
        assert f"line {number + 1}: " in told and "lora_weights must have a valid shape, of" in told


def first_request(lines):
    return next(n for n, line in enumerate(lines) if n and orjson.loads(line)["intake"]["requests"])


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["blueprint"]["sizes"].update(num_blocks=2**36),
        lambda header: header["blueprint"]["sizes"].update(num_host_blocks=2**36),
        lambda header: header["blueprint"]["sizes"].update(max_seq_len=2**40),
        lambda header: header["blueprint"]["sizes"].update(tokens_per_block=0),
        lambda header: header["blueprint"]["params"].update(max_batch_size=2**31 - 1),
        lambda header: header["blueprint"].update(max_beam_width=2**31),
        lambda header: header["blueprint"]["params"].update(
            speculative_decoding_config={"max_ngram": 2**30}
        ),
        lambda header: header["blueprint"]["scheduler"].update(create_scheduler="os.system"),
        lambda header: header["blueprint"].update(vocab_size=True),
        lambda header: header.update(fields={"Row": 7}),
        lambda header: header.update(version=1),
        lambda header: header.update(library="\x1b[2J", version="\x1b[2J"),
    ],
)
def test_a_header_that_no_run_has_is_refused(run, tmp_path, capsys, change):
    path = tmp_path / "r.jsonl"
    path.write_bytes(changed(run, 0, change))
    for command in COMMANDS:
        assert call(command, path, tmp_path) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"gptmanager: {path}, line 1: ") and "\x1b" not in err


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_blocks": 1 << 20, "num_host_blocks": (1 << 20) + 1},
        {"num_blocks": (1 << 21) + 1},
        {"num_blocks": 1 << 20, "tokens_per_block": 1 << 20},
        {"contiguous": True, "tokens_per_block": 48},
        {"max_input_len": 1 << 20},
    ],
)
def test_sizes_that_disagree_are_refused_before_memory_is_taken(
    run, tmp_path, capsys, monkeypatch, sizes
):
    for module in (replaying, simulation):
        monkeypatch.setattr(module, "build_loop", None)
    path = tmp_path / "r.jsonl"
    path.write_bytes(changed(run, 0, lambda header: enlarge(header, **sizes)))
    for command in COMMANDS:
        assert call(command, path, tmp_path) == 2
        assert capsys.readouterr().err.startswith(f"gptmanager: {path}, line 1: sizes.")


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["blueprint"]["params"].update(max_seq_len=8),
        lambda header: header["blueprint"]["params"]["kv_cache_config"].update(max_tokens=8),
        lambda header: header["blueprint"]["sizes"].update(num_host_blocks=3),
    ],
)
def test_sizes_that_the_options_would_not_give_are_refused(run, tmp_path, capsys, change):
    path = tmp_path / "r.jsonl"
    path.write_bytes(changed(run, 0, lambda header: (enlarge(header), change(header))))
    path.write_bytes(
        path.read_bytes().replace(b'"enable_block_reuse":true', b'"enable_block_reuse":false')
    )
    assert call("replay", path, tmp_path) == 2
    assert capsys.readouterr().err.startswith(f"gptmanager: {path}, line 1: sizes.")


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"num_blocks": 1 << 20}, ["--tokens-per-block", "1"]),
        ({"num_blocks": 1 << 10, "num_host_blocks": 1 << 20}, ["--tokens-per-block", "1"]),
        ({}, ["--kv-cache-tokens", str((1 << 31) - 1)]),
    ],
)
def test_what_options_make_of_a_file_is_checked_like_a_file(
    run, tmp_path, capsys, monkeypatch, sizes, options
):
    """A file of 7 KB took all memory: the blocks of its sizes became smaller ones."""
    monkeypatch.setattr(simulation, "build_loop", None)
    path = tmp_path / "r.jsonl"
    path.write_bytes(changed(run, 0, lambda header: enlarge(header, **sizes)))
    loads = [["--recording", str(path)], *([] if sizes else [[]])]
    for loaded in loads:
        assert main(["simulate", *loaded, *options]) == 2
        err = capsys.readouterr().err
        assert err.startswith("gptmanager: the simulated manager: sizes.num_"), err


def test_a_path_that_is_not_a_file_is_refused(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, "/dev/zero", tmp_path / "none"):
        assert call("replay", path, tmp_path) == 2
        assert capsys.readouterr().err.startswith(f"gptmanager: {path}")


@pytest.mark.parametrize("depth", [40, 900, 100_000])
def test_lists_in_lists_need_no_stack(run, tmp_path, capsys, depth):
    path, number = tmp_path / "r.jsonl", first_request(run)
    deep = changed(run, number, lambda line: line["intake"]["requests"][0].update(priority="DEEP"))
    path.write_bytes(deep.replace(b'"DEEP"', b"[" * depth + b"]" * depth))
    for command in COMMANDS:
        assert call(command, path, tmp_path) == 2
        assert f"line {number + 1}" in capsys.readouterr().err


def test_a_simulation_runs_no_further_than_the_recording_could_tell(tmp_path, capsys, monkeypatch):
    path = tmp_path / "r.jsonl"
    record(path, ScheduledHost([[request(i, 3, 4) for i in range(3)]]))
    lines = path.read_bytes().splitlines()

    def lengthen(line):
        tensor = line["intake"]["requests"][0]["tensors"]["request_output_len"]
        tensor["data"] = [2**31 - 1]

    header = orjson.loads(lines[0])
    enlarge(header, max_seq_len=2**18, num_blocks=2**16, max_input_len=99)
    lines[0] = orjson.dumps(header)
    path.write_bytes(changed(lines, 1, lengthen))
    monkeypatch.setattr("gptmanager.simulator.load._SPARE_STEPS", 500)
    assert call("simulate", path, tmp_path) == 2
    assert "request-steps, far more than its recording" in capsys.readouterr().err


def test_a_picture_follows_a_limited_number_of_waiting_requests(run, tmp_path, monkeypatch):
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"\n".join(run))
    assert call("picture", path, tmp_path) == 0
    monkeypatch.setattr("gptmanager.picture.recorded._SPARE_WORK", 0)
    monkeypatch.setattr("gptmanager.picture.recorded._WORK_PER_ROW", 0)
    assert call("picture", path, tmp_path) == 2


def test_a_picture_is_not_drawn_over_its_recording(run, tmp_path, capsys):
    path = tmp_path / "r.html"
    path.write_bytes(b"\n".join(run))
    assert main(["picture", str(path), "--output", str(path)]) == 2
    assert "must be different files" in capsys.readouterr().err
    assert path.read_bytes() == b"\n".join(run)


# What its texts may do ---------------------------------------------------------------------


def test_texts_steer_no_terminal_and_run_in_no_page(tmp_path, capsys):
    evil = "</title></text><script>alert(1)</script>\x1b]0;me\x07\x9b2J\u202e\0"
    path = tmp_path / "r.jsonl"
    record(path, ScheduledHost([[request(1, 3, 4), request(2, 3, 4)]]))

    def speak(line):
        line["ends"] = [[2, "ERROR", evil]]
        line["intake"]["failures"] = [[2, evil]]
        line["intake"]["requests"][0]["tensors"][evil] = 1

    path.write_bytes(changed(path.read_bytes().splitlines(), 1, speak))
    for command in COMMANDS:
        call(command, path, tmp_path)
        shown = "".join(capsys.readouterr())
        assert not set(shown) & set("\x1b\x07\x9b\u202e\0")
    page = (tmp_path / "picture.html").read_text()
    assert "alert(1)" in page and "<script>alert" not in page
    assert not set(page) & set("\x1b\x07\x9b\u202e\0")


# What a state may say of itself ------------------------------------------------------------


def spoil(box, names, change):
    """The file with the field of the state that `names` lead to as `change` makes it."""
    header = orjson.loads(box[0])
    at, fields = header["state"], header["fields"]
    place = fields["LoopState"].index("request_table")
    for name in names:
        at = at[place]
        if isinstance(name, int):
            place = name
        else:
            owner, field = name.split(".")
            place = fields[owner].index(field)
    at[place] = change(at[place])
    return b"\n".join([orjson.dumps(header), *box[1:]])


KV_CACHE = ("RequestTableState.allocator", "AllocatorState.kv_cache")
REUSE = (*KV_CACHE, "KvCacheState.reuse")
REQUEST = ("RequestTableState.active", 0)


@pytest.mark.parametrize(
    ("names", "change"),
    [
        ((*KV_CACHE, "KvCacheState.free"), lambda free: [*free, free[0]]),
        ((*KV_CACHE, "KvCacheState.free"), lambda free: free[1:]),
        ((*KV_CACHE, "KvCacheState.free"), lambda free: [2**40, *free[1:]]),
        ((*KV_CACHE, "KvCacheState.sequences"), lambda sequences: sequences[1:]),
        ((*KV_CACHE, "KvCacheState.sequences", 0, "SequenceState.num_slots"), lambda n: n + 99),
        ((*KV_CACHE, "KvCacheState.sequences", 0, "SequenceState.tables"), lambda tables: []),
        ((*REUSE, "ReuseState.nodes", 0, "CachedBlockState.parent"), lambda parent: 5),
        ((*REUSE, "ReuseState.nodes", 0, "CachedBlockState.tokens"), lambda tokens: tokens * 9),
        ((*REUSE, "ReuseState.storing"), lambda storing: [*storing, 77]),
        (("RequestTableState.allocator", "AllocatorState.free_slots"), lambda slots: [9, *slots]),
        (("RequestTableState.timed",), lambda timed: [12345]),
        (("RequestTableState.active",), lambda active: [active[0], *active]),
        ((*REQUEST, "RequestState.progress", "ProgressState.max_new_tokens"), lambda length: 2**40),
        ((*REQUEST, "RequestState.end_rule", "EndRuleState.max_new_tokens"), lambda length: 2**40),
        ((*REQUEST, "RequestState.progress", "ProgressState.prompt_len"), lambda length: -1),
        ((*REQUEST, "RequestState.progress", "ProgressState.orig_prompt_len"), lambda length: 0),
        ((*REQUEST, "RequestState.progress", "ProgressState.num_sent"), lambda count: 0),
        ((*REQUEST, "RequestState.tokens"), lambda tokens: []),
        ((*REQUEST, "RequestState.progress", "ProgressState.slot"), lambda slot: 2**31),
        ((*REQUEST, "RequestState.progress", "ProgressState.state"), lambda state: 9),
        ((*REQUEST, "RequestState.priority"), lambda priority: "high"),
    ],
)
def test_a_state_that_contradicts_itself_is_refused(box, tmp_path, capsys, names, change):
    path = tmp_path / "r.jsonl"
    path.write_bytes(spoil(box, names, change))
    assert call("replay", path, tmp_path) == 2
    assert capsys.readouterr().err.startswith(f"gptmanager: {path}, line 1: ")
    path.write_bytes(spoil(box, names, lambda value: value))
    assert call("replay", path, tmp_path) == 0


# Mutations ---------------------------------------------------------------------------------

ODD = [
    *(None, True, False, 0, 1, -1, 2**31, 2**36, 2**63 - 1, -(2**63), 2**64 - 1, 1.5, -0.0, 1e300),
    *(
        "",
        "x",
        "\x1b]0;me\x07",
        "</script><script>",
        "LENGTH",
        "gptmanager.host.callback_host.CallbackHost",
        "nan",
    ),
    *([], {}, [[]], [1], {"@": 0}, {"float": "nan"}, {"opaque": "object"}, {"processor": "p"}),
    *({"int": "0x1" + "0" * 40}, {"int": "0xg"}, {"int": 7}),
    *([[[[[[]]]]]], {"numpy": "int64", "shape": [2**36], "fill": 0}),
    {"torch": "save", "shape": [1], "data": [1]},
    {"class": "gptmanager.host.callback_host.CallbackHost", "names": [], "values": []},
]


def places(value, found):
    """(container, key) of everything inside, however deep."""
    keys = value if isinstance(value, dict) else range(len(value))
    for key in keys:
        found.append((value, key))
        if isinstance(value[key], (dict, list)):
            places(value[key], found)
    return found


def mutate_values(lines, chance):
    """A few values become others, go, come twice, or change places."""
    lines = list(lines)
    for _ in range(chance.choice((1, 1, 2, 4))):
        number = 0 if chance.random() < 0.4 else chance.randrange(len(lines))
        value = orjson.loads(lines[number])
        container, key = chance.choice(places(value, []))
        kind = chance.randrange(6)
        old = container[key]
        if kind == 0:
            del container[key]
        elif kind == 1 and type(old) is int:
            container[key] = old + chance.choice((-1, 1, 7, -old - 1, 1 << 20, 1 << 33))
        elif kind == 2 and isinstance(old, list) and old:
            old.insert(chance.randrange(len(old)), chance.choice(old))
        elif kind == 3:
            other, place = chance.choice(places(value, []))
            if other is not old:
                container[key] = orjson.loads(orjson.dumps(other[place]))
        else:
            container[key] = chance.choice(ODD)
        lines[number] = orjson.dumps(value)
    return b"\n".join(lines) + b"\n"


def mutate_bytes(lines, chance):
    """Bytes change, go, or come twice; lines change places."""
    data = bytearray(b"\n".join(lines) + b"\n")
    for _ in range(chance.choice((1, 1, 2, 8))):
        kind, place = chance.randrange(5), chance.randrange(len(data))
        end = place + chance.choice((1, 2, 30, 3000))
        if kind == 0:
            data[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del data[place:end]
        elif kind == 2:
            data[place:place] = data[place:end]
        elif kind == 3:
            data[place : place + 1] = chance.choice((b"9", b"-", b"[", b"}", b"null", b'"', b"\0"))
        else:
            parts = bytes(data).split(b"\n")
            chance.shuffle(parts[1:])
            chosen = chance.choice(parts)
            parts.insert(chance.randrange(len(parts)), chosen)
            data = bytearray(b"\n".join(parts))
    return bytes(data)


@pytest.mark.timeout(60 + COUNT)
@pytest.mark.parametrize("command", COMMANDS)
def test_whatever_a_recording_says_ends_in_a_named_error(box, run, tmp_path, capsys, command):
    """Exit status 0, 1 or 2 and no other exception; nothing else is written."""
    path = tmp_path / "r.jsonl"
    ends = {0: 0, 1: 0, 2: 0}
    for seed in range(COUNT):
        chance = random.Random(f"{command} {seed}")
        lines = run if chance.random() < 0.6 else box
        mutate = mutate_values if chance.random() < 0.7 else mutate_bytes
        path.write_bytes(mutate(lines, chance))
        started = time.process_time()
        try:
            status = call(command, path, tmp_path)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        out, err = capsys.readouterr()
        assert time.process_time() - started < 60, seed
        assert "Traceback" not in err and "\x1b" not in out + err, (seed, err)
        assert (status == 2) == ("gptmanager: " in err), (seed, err)
        ends[status] += 1
    assert ends[2] > COUNT // 4 and {p.name for p in tmp_path.iterdir()} <= {
        path.name,
        "picture.html",
    }


# What a few bytes may ask for, and names that no UTF-8 holds ----------------------------------


def test_a_request_that_would_run_alone_for_ever_ends_a_simulation_soon(run, tmp_path, capsys):
    lines = [orjson.loads(line) for line in run]
    enlarge(lines[0], num_blocks=1 << 16, max_seq_len=1 << 16, max_input_len=1 << 15)
    tensors = {
        "input_ids": {"numpy": "int32", "shape": [1], "data": [3]},
        "request_output_len": {"numpy": "int32", "shape": [1], "data": [(1 << 16) - 2]},
    }
    lines[1]["intake"]["requests"].append({"request_id": 1 << 40, "tensors": tensors})
    path = tmp_path / "long.jsonl"
    path.write_bytes(b"\n".join(map(orjson.dumps, lines)))
    turns = []
    with pytest.MonkeyPatch.context() as patch:
        iterate = TokenLoop.iterate
        patch.setattr(TokenLoop, "iterate", lambda loop: turns.append(None) or iterate(loop))
        patch.setattr(load, "_SPARE_STEPS", 1 << 16)
        patch.setattr(load, "_MAX_STEPS_RATIO", 2)
        assert call("simulate", path, tmp_path) == 2
    told = re.search(r"more than (\d+) request-steps, far more than its", capsys.readouterr().err)
    assert 1000 < len(turns) <= int(told[1]) // load.ITERATION_STEPS + 1


@pytest.mark.parametrize("command", ["replay", "simulate"])
def test_a_recording_that_needs_more_memory_than_there_is(
    run, tmp_path, capsys, command, monkeypatch
):
    def refuse(*arguments, **keywords):
        raise MemoryError

    monkeypatch.setattr(replaying, "build_loop", refuse)
    monkeypatch.setattr(simulation, "build_loop", refuse)
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"\n".join(run))
    assert call(command, path, tmp_path) == 2
    assert "needs more memory than is available" in capsys.readouterr().err


def test_a_picture_of_a_file_whose_name_is_not_utf_8(run, tmp_path, capsys):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\x1b[31m<b>.jsonl")
    with open(path, "wb") as file:
        file.write(b"\n".join(run))
    output = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\x1b[2J.html")
    assert main(["picture", path, "--output", output]) == 0
    with open(output, encoding="utf-8") as file:
        drawn = file.read()
    assert "\ufffd[31m&lt;b&gt;.jsonl" in drawn and "\x1b" not in drawn
    assert "\x1b" not in capsys.readouterr().out


def test_texts_that_no_utf8_holds_do_not_end_a_recording(tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jsonl")
    lone = "\ud800"
    host = RecordingCallbacks(
        [
            InferenceRequest.from_tokens(1, [1, 2], 3, cache_salt=lone),
            InferenceRequest.from_tokens(2, [1, 2], 3, cache_salt="\ud801"),
            InferenceRequest.from_tokens(3, [1, 2], 3, client_id=lone),
            InferenceRequest(4, {"input_ids": [lone], "request_output_len": lone}),
        ]
    )
    with GptManager(
        ScriptedModel(lambda history: 3),
        ModelType.INFLIGHT_FUSED_BATCHING,
        optional_params=OptionalParams(recording_path=path),
        **host.keywords(),
    ) as manager:
        manager.wait_idle(60)
    assert manager.recording_error == ""
    recording = read_recording(path)
    requests = [r for turn in recording.iterations for r in turn.intake.requests]
    assert [r.cache_salt for r in requests[:2]] == ["\\ud800", "\\ud801"]
    assert replay(recording).divergence is None
