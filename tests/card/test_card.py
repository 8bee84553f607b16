"""The phases of a first GPU run, where there is no GPU, and their machinery with shell commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from dataclasses import fields, replace
from pathlib import Path

import card_steps
import one_file
import pytest
import running
import torch
import wheels
from card_steps import PHASES, Setup, Step, steps_of
from compare_texts import main as compare_texts
from outcomes import Outcomes
from running import (
    PHASE_S,
    PROBE_S,
    RESERVED_S,
    TIMED_OUT,
    Phase,
    Record,
    read_record,
    status_of,
)
from summary import MOST_LINES, WIDTH, restore, summary, write

from gptmanager import cli
from gptmanager.bench.kernels.benchmark import all_cases
from gptmanager.bench.kernels.cases import Sizes
from gptmanager.cuda import matrix
from gptmanager.cuda.features import Features

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
no_device = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def run_card(phase, tmp_path, *arguments, **environment):
    given = [f"OUT={tmp_path / 'out'}", f"PYTHON={sys.executable}"]
    given.append(f"ARGS=--work {tmp_path / 'work'} {shlex.join(arguments)}")
    return subprocess.run(
        ["make", "--silent", "card", f"PHASE={phase}", *given],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@no_device
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.every(3)
def test_a_phase_where_there_is_no_gpu(phase, tmp_path):
    done = run_card(phase, tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "not run, no CUDA device: compile" in done.stdout
    text = (tmp_path / "out" / f"{phase}.txt").read_text()
    assert text in done.stdout and len(text.splitlines()) <= MOST_LINES
    with tarfile.open(tmp_path / "out" / f"{phase}.tar.gz") as archive:
        assert f"{phase}/summary.txt" in archive.getnames()


@no_device
@pytest.mark.timeout(300)  # it starts many interpreters, one after the other
@pytest.mark.slow
def test_commands_that_run_without_a_gpu_fail_as_they_should(tmp_path):
    """With --anyway they run."""
    done = run_card("a", tmp_path, "--anyway", "--only", "kernels-norms,test_norms")
    assert done.returncode == 2, done.stderr  # make's own, for 1
    assert "0 steps ok, 2 not, 0 not run" in done.stdout and "left for" not in done.stdout
    assert "no CUDA device: torch" in done.stdout
    assert re.search(r"\b[1-9]\d* failed", done.stdout), done.stdout


def commands():
    """Each command of each phase once, without the program that it may run under."""
    found = {}
    for phase in PHASES:
        for step in steps_of(phase, Setup(ROOT, Path("/nowhere"), "python")):
            if "python" in step.command:
                command = step.command[step.command.index("python") + 1 :]
                found.setdefault(command, pytest.param(command, id=f"{phase}-{step.name}"))
    return list(found.values())


@no_device
@pytest.mark.parametrize("command", commands())
def test_each_command_is_one_that_its_program_takes(command, monkeypatch, capsys, tmp_path):
    """And each that needs a GPU ends with 2 and a sentence where there is none."""
    command = [word.replace("/nowhere", str(tmp_path)) for word in command]
    monkeypatch.chdir(ROOT)
    if command[:2] == ["-m", "gptmanager"]:
        monkeypatch.setattr(sys, "argv", ["gptmanager", *command[2:]])
        if "cpu" not in command:
            assert cli.main() == 2
            assert "CUDA device" in capsys.readouterr().err
    elif command[:2] == ["-m", "gptmanager.cuda.matrix"]:
        assert matrix.main(command[2:]) == 2
        assert "no CUDA device" in capsys.readouterr().err
    elif command[0] == "tests/card/one_file.py":
        options = one_file.parser().parse_args(command[1:])
        assert (ROOT / options.file).exists()
    else:
        assert command[0] == "tests/card/compare_texts.py"
        assert compare_texts(command[1:]) == 2


def test_every_part_of_the_kernel_benchmark_and_every_kernel_has_a_step():
    parts = {case.part for case in all_cases(Sizes())}
    assert set(card_steps.PARTS) == parts >= set(card_steps.PROFILED.values())
    kernels = {name.partition("<")[0] for program in matrix.PROGRAMS for name in program.kernels}
    assert set(card_steps.PROFILED) <= kernels
    files = {path.stem for path in (ROOT / "tests/cuda").glob("test_*.py")}
    assert {*card_steps.FIRST_FILES, *card_steps.SANITIZED} <= files


def test_phase_b_times_steps_with_each_kind_of_weights_and_attention():
    steps = {step.name: step.command for step in steps_of("b", Setup(ROOT, Path("."), "python"))}
    assert {"--int8", "--fp8"} <= {*steps["model-8bits"]} and "--flashinfer" not in steps["model"]
    assert "--flashinfer" in steps["model-flashinfer"]
    kernels = {case.name for case in all_cases(Sizes()) if case.part == "matmuls" and case.quick}
    assert any(", fp8, " in name for name in kernels), "phase a checks them with --quick"


def test_phase_b_tries_what_is_off_by_default():
    known = {"" if it.default else it.name.replace("_", "-") for it in fields(Features)} - {""}
    steps = steps_of("b", Setup(ROOT, Path("."), "python"))
    assert known == {"carveout", "extra-syncwarp"}
    assert known <= {step.environment.get("GPTMANAGER_CUDA") for step in steps}


def shell(name, command, limit_s=20.0, **options):
    return Step(name, ("sh", "-c", command), limit_s, **{"least_s": 0.5, **options})


@pytest.fixture
def run(tmp_path):
    """Runs steps as a phase; `said`: what it printed."""

    def run(*steps, seconds=60.0, no_gpu="", **options):
        given = {"environment": {}, "root": tmp_path, "say": run.said.append, **options}
        phase = Phase(steps, tmp_path, seconds=seconds, **given)
        return {record.name: record for record in phase.run(no_gpu)}

    run.said = []
    return run


def test_a_step_that_is_done_is_not_run_again(run, tmp_path):
    steps = [shell("one", "echo run >> one"), shell("two", "echo told; exit 3")]
    run(*steps[:1])
    again = run(*steps)  # like the call after a killed run
    assert (tmp_path / "one").read_text() == "run\n"
    assert (again["one"].status, again["two"].status) == (0, 3)
    assert "told" in (tmp_path / "two.log").read_text()
    assert sum("echo told; exit 3" in line for line in run.said) == 1, "each command is printed"


def test_a_record_that_a_killed_run_left_half(run, tmp_path):
    (tmp_path / "one.record").write_text('{"name": "one", "sta')
    assert run(shell("one", "true"))["one"].is_right


def test_a_step_that_hangs_does_not_stop_the_rest(run, monkeypatch):
    monkeypatch.setattr(running, "_KILL_S", 0.2)
    hangs = shell("hangs", "trap '' TERM; sleep 60 & wait; sleep 60", limit_s=1)
    started = time.monotonic()
    found = run(hangs, shell("next", "true"))
    assert found["hangs"].status in TIMED_OUT and found["hangs"].is_done
    assert found["hangs"].note == "ran to its limit" and found["next"].is_right
    assert time.monotonic() - started < 60


def test_what_does_not_fit_is_left_for_the_next_run(run, tmp_path):
    steps = [shell("cut", "sleep 60"), shell("late", "true", least_s=30)]
    found = run(*steps, seconds=26.0)
    log = (tmp_path / "cut.log").read_text()
    assert "timeout --kill-after=5 1 sh" in log, "25 s are kept to kill it, and for the archive"
    assert found["cut"].note == "cut off by the end of the phase" and not found["cut"].is_done
    assert (found["late"].status, found["late"].note) == (None, "no time left")
    assert all(record.is_left for record in found.values())
    assert run(steps[1])["late"].is_right


@pytest.mark.parametrize("phase", PHASES)
def test_each_step_fits_into_a_phase(phase):
    """So each run of a phase ends a step at least, and the last run ends the last one."""
    for step in steps_of(phase, Setup(ROOT, Path("."), "python")):
        assert step.least_s < step.limit_s <= PHASE_S - RESERVED_S - PROBE_S, step.name


def test_phase_b_in_runs_of_nine_minutes(tmp_path):
    """Its benchmarks take as long as they are told to, by a clock that each of them moves on."""
    steps = [
        replace(step, command=("true",)) for step in steps_of("b", Setup(ROOT, Path("."), "python"))
    ]
    runs = []
    for _ in range(4):
        began, now = [], [0.0]

        def say(line, began=began, now=now):
            name, _, told = line.split("s  ", 1)[1].partition(": ")
            if not told.startswith("ok"):
                began.append(name)
                now[0] += next(step.least_s for step in steps if step.name == name)

        phase = Phase(
            *(steps, tmp_path),
            **{"seconds": PHASE_S, "environment": {}, "root": tmp_path},
            **{"say": say, "clock": lambda now=now: now[0]},
        )
        records = phase.run()
        assert now[0] <= PHASE_S - RESERVED_S
        runs.append(began)
        if not any(record.is_left for record in records):
            break
        assert status_of(records) == 3
    assert status_of(records) == 0 and len(runs) <= 3
    assert runs[0][:4] == ["compile", "model", "kernels-matmuls", "kernels-attention"]
    assert sorted(it for began in runs for it in began) == sorted(step.name for step in steps)


def test_the_summary_begins_with_what_is_left(tmp_path):
    steps = [shell(name, "true") for name in ("done", "cut", "late", "lacking", "next")]
    records = [
        Record("done", status=0, is_done=True),
        Record("cut", status=124, note="cut off by the end of the phase"),
        Record("late", note="no time left"),
        Record("lacking", note="ncu is not installed"),
    ]  # records of a run that is killed now
    lines = summary("b", {}, [], steps, records, tmp_path, "")
    assert lines[:2] == [
        "phase b: 1 steps ok, 0 not, 1 not run",
        "3 steps are left for the next run of the same command: cut, late, next",
    ]
    assert "not run, ncu is not installed: lacking" in lines
    assert not any("no time left" in line for line in lines)
    lines = summary("b", {}, [], steps[:1], records[:1], tmp_path, "")
    assert not any("left" in line for line in lines)
    assert status_of(records) == 1 and status_of(records[:3]) == 3 and status_of(records[:1]) == 0


def test_another_machine_goes_on_from_the_archive(run, tmp_path):
    """The machine is lent for minutes, and comes back empty."""
    out, fresh = tmp_path / "out", tmp_path / "fresh"
    fresh.mkdir()
    assert restore(out, "b", fresh, but=("compile",)) == []
    (tmp_path / "model.json").write_text("{}")
    run(shell("compile", "true"), shell("model", "true"), shell("wrong", "false"))
    (tmp_path / "cut.record").write_text(json.dumps({"name": "cut", "status": 124}))
    write(out, "b", ["lines"], tmp_path)
    assert restore(out, "b", fresh, but=("compile",))
    kept = {path.name for path in fresh.iterdir()}
    assert kept == {"cut.record", "model.json", "model.log", "model.record", "wrong.log",
                    "wrong.record"}  # fmt: skip
    assert read_record(fresh, "model").is_done and not read_record(fresh, "cut").is_done
    (fresh / "model.json").write_text("[]")
    again = restore(out, "b", fresh, but=("compile",))
    assert again == [] and (fresh / "model.json").read_text() == "[]"
    (fresh / "wrong.record").unlink()  # as after a run that was killed while it unpacked
    assert restore(out, "b", fresh, but=("compile",)) and read_record(fresh, "wrong").is_done
    assert (fresh / "model.json").read_text() == "[]"


def test_an_archive_that_was_copied_in_part(tmp_path):
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "one.log").write_bytes(os.urandom(100_000))
    archive = tmp_path / "b.tar.gz"
    for size in (0, 20, 50_000):
        write(tmp_path, "b", ["lines"], tmp_path / "steps")
        archive.write_bytes(archive.read_bytes()[:size])
        (tmp_path / f"fresh-{size}").mkdir()
        assert restore(tmp_path, "b", tmp_path / f"fresh-{size}", but=()) == []


def test_a_signal_ends_the_phase(tmp_path):
    steps = [shell("long", "sleep 60"), shell("next", "true")]
    phase = Phase(steps, tmp_path, seconds=60, environment={}, root=tmp_path, say=lambda line: None)
    timer = threading.Timer(0.5, phase.end)
    timer.start()
    records = phase.run()
    assert not records[0].is_done and records[0].note == "cut off by the end of the phase"
    assert records[1].note == "the phase was ended" and all(record.is_left for record in records)


def test_steps_of_a_lane_run_side_by_side(run, tmp_path):
    """Each waits for the other's file."""
    meet = "touch {0}; for i in $(seq 100); do [ -e {1} ] && exit 0; sleep 0.1; done; exit 1"
    pair = [shell(own, meet.format(own, other), lane="x") for own, other in ("ab", "ba")]
    assert all(record.is_right for record in run(*pair, num_lanes=2).values())


def test_a_tool_that_is_not_installed(run):
    found = run(shell("profile", "true", tool="no-such-profiler"))
    assert found["profile"].note == "no-such-profiler is not installed"


def test_settings_of_a_step(run, tmp_path):
    step = shell("one", 'echo "$ONE-$TWO"', environment={"TWO": "2"})
    run(step, environment={"ONE": "1"})
    assert (tmp_path / "one.log").read_text().endswith("1-2\n")
    assert any("TWO=2 sh -c" in line for line in run.said)


TESTS = """
import os, pytest
pytestmark = pytest.mark.gpu
def test_a(): pass
def test_ends_its_process(): os._exit(3)
def test_fails(): assert 0
def test_ends_its_process_too(): os._exit(1)
@pytest.mark.skip(reason="needs a second GPU")
def test_skipped(): pass
def test_z(): pass
"""


@pytest.fixture
def tests_of_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    (tmp_path / "setup.cfg").write_text("[tool:pytest]\nfilterwarnings = error\n")
    (tmp_path / "test_it.py").write_text(TESTS)

    def run(name="test_it.py", **options):
        told = ["--outcomes", str(tmp_path / "outcomes")]
        status = one_file.main([str(tmp_path / name), *told])
        return status, Outcomes.read(tmp_path / "outcomes")

    return run


def test_a_test_that_ends_its_process_ends_no_other(tests_of_a_file, tmp_path):
    status, found = tests_of_a_file()
    assert status == 1 and found.has_ended
    assert found.text == "2 passed, 1 failed, 1 skipped, 2 ended their process"
    assert [node.rpartition("::")[2] for node in found.lost] == [
        *("test_ends_its_process", "test_ends_its_process_too"),
    ]
    before = (tmp_path / "outcomes").read_text()
    assert tests_of_a_file()[0] == 1, "what has run is not run again"
    assert (tmp_path / "outcomes").read_text().startswith(before)
    assert tests_of_a_file()[1].started == found.started


def test_a_file_without_such_tests_and_one_that_cannot_be_read(tests_of_a_file, tmp_path):
    (tmp_path / "test_none.py").write_text("def test_on_the_cpu(): assert 0\n")
    assert tests_of_a_file("test_none.py")[0] == 0
    (tmp_path / "outcomes").unlink()
    (tmp_path / "test_broken.py").write_text("import no_such_module\n")
    assert tests_of_a_file("test_broken.py")[0] == 2


def test_texts_are_compared(tmp_path, capsys):
    files = tmp_path / "cpu.jsonl", tmp_path / "gpu.jsonl"
    for file, last in zip(files, ([7], [8]), strict=True):
        rows = [{"request_id": 1, "output_ids": [5]}, {"request_id": 2, "output_ids": last}]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pair = list(map(str, files))
    assert compare_texts(pair) == 1
    assert "request 2: [7] and [8]" in capsys.readouterr().out
    assert compare_texts([*pair, "--least", "0.5"]) == 0
    assert compare_texts([pair[0], pair[0]]) == 0
    files[1].write_text("")
    assert compare_texts(pair) == 2


def test_a_summary_has_at_most_60_lines_whatever_went_wrong(tmp_path):
    steps = [shell(f"test_{number}", "true", kind="tests") for number in range(90)]
    for step in steps:
        lines = [f"started tests/x.py::{name}" for name in ("a", "b")]
        (tmp_path / f"{step.name}.outcomes").write_text("\n".join([*lines, "failed tests/x.py::a"]))
    for count in (1, 12, 40, 90):
        records = [Record(step.name, status=1, is_done=True) for step in steps[:count]]
        records += [Record(step.name, status=0, is_done=True) for step in steps[count:]]
        lines = summary("a", {}, ["note " * 100], steps, records, tmp_path, "")
        assert len(lines) <= MOST_LINES and max(map(len, lines)) <= WIDTH
        assert lines[0] == f"phase a: {90 - count} steps ok, {count} not, 0 not run"
        assert any("1 failed, 1 ended their process, then cut off" in it for it in lines) is (
            count <= 12
        )


def test_the_archive_stays_small(tmp_path):
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "one.log").write_bytes(b"begin" + os.urandom(3_000_000) + b"end")
    (tmp_path / "steps" / "huge.ncu-rep").write_bytes(os.urandom(5_000_000))
    (tmp_path / "steps" / "small.json").write_text("{}")
    write(tmp_path / "out", "a", ["line"], tmp_path / "steps")
    assert (tmp_path / "out" / "a.tar.gz").stat().st_size < 500_000
    with tarfile.open(tmp_path / "out" / "a.tar.gz") as archive:
        assert archive.getnames() == ["a/summary.txt", "a/one.log", "a/small.json"]
        log = archive.extractfile("a/one.log").read()
    assert log.startswith(b"begin") and log.endswith(b"end")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.tar.gz", "a.txt"]


@pytest.mark.slow
def test_the_probe_names_what_cannot_be_imported(tmp_path):
    """Without what pytest needs, each test file would fail alone."""
    (tmp_path / "pytest.py").write_text("import no_such_module")
    command = [sys.executable, FOLDER / "probe.py"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    probe = json.loads(done.stdout)
    assert "pytest" in probe["missing"]
    lines = summary("a", probe, [], [], [], tmp_path, "")
    told = "pytest cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"
    assert told in lines


def test_the_summary_has_the_error_of_each_step_also_if_many_failed(tmp_path):
    steps = [shell(f"step{number}", "") for number in range(30)]
    for step in steps:
        (tmp_path / f"{step.name}.log").write_text("$ command\nloading\nerror: why\n")
    for wrong, told in ((1, ["loading", "error: why"]), (20, ["error: why"])):
        records = [Record(step.name, status=2, is_done=True) for step in steps[:wrong]]
        lines = summary("a", {}, [], steps, records, tmp_path, "")
        assert [line.strip() for line in lines].count("error: why") == wrong
        assert [line.strip() for line in lines].count("loading") == wrong * ("loading" in told)


def test_a_summary_of_what_benchmarks_report(tmp_path, monkeypatch):
    """Reports as the benchmarks write them, of a CPU."""
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    tiny = ["--model", "examples/tiny_llama", "--device", "cpu", "--requests", "2"]
    sizes = [
        "--lengths",
        "4:8",
        "--batches",
        "1,2",
        "--contexts",
        "16",
        "--only",
        "check,steps,load",
    ]
    sizes += ["--int8", "--fp8"]
    given = ["bench", "e2e", *tiny, *sizes, "--output", str(tmp_path / "model.json")]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["gptmanager", *given])
    assert cli.main() == 0
    step = shell("model", "true", kind="model")
    records = [Record("model", status=0, is_done=True)]
    lines = "\n".join(summary("b", {}, [], [step], records, tmp_path, ""))
    assert re.search(r"int8: \S+ output tokens/s, \S+ x plain, 1 x 16: \S+ ms, 2 x 16: ", lines)
    assert "fp8: skipped: weights_dtype = 'fp8' is refused" in lines
    for words in ("logits: ok", "step of 1 x 16: ", " x floor", "load: ", "copy 0.", "in this run"):
        assert words in lines
    report = json.loads((tmp_path / "model.json").read_text())
    report["load"][1] = {"streaming": True, "status": "failed", "note": "OSError: disk gone"}
    (tmp_path / "model.json").write_text(json.dumps({**report, "running": "ablations"}))
    lines = summary("b", {}, [], [step], [Record("model", status=124)], tmp_path, "")
    assert lines[4] == "    ended in ablations" and lines[5].startswith("    logits: ok, error ")
    assert "    load, streaming: failed: OSError: disk gone" in lines


def test_wheels(tmp_path):
    fits = {
        "orjson-3.9-py3-none-any": True,
        "x-1-py2.py3-none-any": True,
        "x-1-cp311-cp311-manylinux_2_17_x86_64": True,
        "x-1-cp312-cp312-manylinux_2_17_x86_64": False,
        "x-1-cp38-abi3-manylinux_2_28_x86_64": True,
        "x-1-cp313-abi3-manylinux_2_28_x86_64": False,
        "x-1-cp311-cp311-manylinux_2_17_aarch64": False,
        "no-wheel": False,
    }
    assert {stem: wheels.fits(stem, (3, 11), "x86_64") for stem in fits} == fits
    for name in ("invented_package-1.0-py3-none-any", "torch-9-py3-none-any", "x-1-cp27-cp27m-any"):
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as archive:
            archive.writestr(f"{name.partition('-')[0]}_module.py", "")
    notes = wheels.unpack(tmp_path.glob("*.whl"), tmp_path / "site")
    assert notes == ["x-1-cp27-cp27m-any.whl is for another Python or another machine"]
    assert [path.name for path in (tmp_path / "site").iterdir()] == ["invented_package_module.py"]


def test_a_call_that_is_wrong(tmp_path):
    assert run_card("d", tmp_path).returncode == 2
    done = run_card("a", tmp_path, "--only", "no-such-step")
    assert done.returncode == 2 and "no step is called so" in done.stderr


def test_what_a_sanitizer_found_in_tests_that_pass(tmp_path):
    step = shell("memcheck-x", "false", kind="tests")
    (tmp_path / "memcheck-x.outcomes").write_text("started x.py::a\npassed x.py::a\nend\n")
    (tmp_path / "memcheck-x.log").write_text("$ command\n==== ERROR SUMMARY: 3 errors\n")
    records = [Record("memcheck-x", status=1, is_done=True)]
    lines = "\n".join(summary("c", {}, [], [step], records, tmp_path, ""))
    assert "1 passed" in lines and "ERROR SUMMARY: 3 errors" in lines


def test_steps_that_ran_other_code_are_reported(tmp_path):
    step = shell("one", "true")
    for code, is_told in (("now", False), ("before", True)):
        records = [Record("one", status=0, is_done=True, code=code)]
        lines = summary("a", {}, [], [step], records, tmp_path, "now")
        assert any("ran with other code" in line for line in lines) is is_told
