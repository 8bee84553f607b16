"""Recordings from strangers: nothing is written, nothing is run, and an error says what is wrong.

GPTMANAGER_FUZZ=N: N mutated recordings for each command instead of a few.
"""

from __future__ import annotations

import os
import random
import time

import orjson
import pytest
from recorded_runs import (
    MAX_UTILIZATION,
    CrashingModel,
    ScheduledHost,
    random_run,
    record,
    request,
)

from gptmanager import KvCacheConfig
from gptmanager.cli import main
from gptmanager.recorder import black_box

COUNT = int(os.environ.get("GPTMANAGER_FUZZ", "0")) or 60
COMMANDS = ("replay", "simulate", "picture")


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    """The lines of a black box that begins in the middle, with requests that run."""
    path = tmp_path_factory.mktemp("box") / "box.jsonl"
    host = ScheduledHost([[request(i, 3 + i, 40, beam_width=1 + i % 2) for i in range(5)]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(black_box, "_MIN_SEGMENT", 8)
        patch.setattr(black_box, "_STATE_NS_PER_TURN", 1 << 40)
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

    sink = "gptmanager.callbacks.json_lines_sink.JsonLinesSink"
    clock = add(object_of("gptmanager.statistics.Timestamp", _second=-1, _text="$(reboot)"))
    lock = add(object_of(sink, _file=None))
    fields = {"_path": str(victim), "_lock": lock, "_file": None, "_is_closed": False}
    write = add(object_of(sink, _max_bytes=None, **fields))
    host = object_of("gptmanager.host.CallbackHost", _return_stats=write, gil_wait_us=clock)
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


# Mutations ---------------------------------------------------------------------------------

ODD = [
    *(None, True, False, 0, 1, -1, 2**31, 2**36, 2**63 - 1, -(2**63), 2**64 - 1, 1.5, -0.0, 1e300),
    *(
        "",
        "x",
        "\x1b]0;me\x07",
        "</script><script>",
        "LENGTH",
        "gptmanager.host.CallbackHost",
        "nan",
    ),
    *([], {}, [[]], [1], {"@": 0}, {"float": "nan"}, {"opaque": "object"}, {"processor": "p"}),
    *([[[[[[]]]]]], {"numpy": "int64", "shape": [2**36], "fill": 0}),
    {"torch": "save", "shape": [1], "data": [1]},
    {"class": "gptmanager.host.CallbackHost", "names": [], "values": []},
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
