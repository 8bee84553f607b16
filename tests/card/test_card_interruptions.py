"""Phases that are killed, run twice at the same time, or find no place on a disk."""

from __future__ import annotations

import errno
import importlib.util
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import card_steps
import exclusive
import pytest
from card_steps import Step
from exclusive import NotWritable, Running, Taken, check_writable, only_call
from running import Phase, read_record, status_of
from summary import write

FOLDER = Path(__file__).parent


def shell(name, command):
    return Step(name, ("sh", "-c", command), 20.0, 0.5)


@pytest.fixture
def card(monkeypatch):
    """The script, with two steps and without a look at the machine."""
    spec = importlib.util.spec_from_file_location("card_main", FOLDER / "__main__.py")
    card = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(card)
    steps = [shell("one", "echo first"), shell("two", "echo second")]
    monkeypatch.setattr(card_steps, "steps_of", lambda phase, setup: steps)
    monkeypatch.setattr(card, "probe_machine", lambda *_: ({"gpu": "a GPU"}, 0))
    monkeypatch.setattr(card, "fingerprint", lambda root: "code")
    monkeypatch.setattr(card.signal, "signal", lambda *_: None)
    return card


def arguments(tmp_path, *more):
    return ["a", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), *more]


def test_a_second_call_at_the_same_time_is_refused(card, tmp_path, capsys):
    with only_call(tmp_path / "work"):
        assert card.main(arguments(tmp_path)) == 2
    told = capsys.readouterr()
    assert f"error: process {os.getpid()} runs a phase in {tmp_path}/work: wait" in told.err
    assert not (tmp_path / "out").exists()
    assert card.main(arguments(tmp_path)) == 0, "the first one has ended"


def test_the_folder_of_a_call_that_was_killed_is_free(tmp_path):
    code = (
        "import exclusive, os, pathlib, signal\n"
        f"with exclusive.only_call(pathlib.Path({str(tmp_path)!r})):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=FOLDER, check=False)
    assert done.returncode == -signal.SIGKILL
    with only_call(tmp_path), pytest.raises(Taken), only_call(tmp_path):
        pass


def test_steps_of_a_call_that_was_killed_are_ended(tmp_path):
    """They would use the GPU while the next call measures."""
    file = tmp_path / "running.json"
    left = subprocess.Popen(["sleep", "60"], start_new_session=True)
    Running(file).add(left.pid)
    assert Running(file).end_left() == [left.pid]
    assert left.wait(30) == -signal.SIGKILL
    assert Running(file).end_left() == [] == Running(tmp_path / "none").end_left()


def test_a_process_that_has_the_number_of_a_step_is_not_ended(tmp_path, monkeypatch):
    file = tmp_path / "running.json"
    monkeypatch.setattr(exclusive, "_begin", lambda pid: "7")
    Running(file).add(os.getpid())
    monkeypatch.undo()
    assert Running(file).end_left() == []


def test_a_phase_keeps_what_runs_in_a_file(tmp_path):
    file = tmp_path / "running.json"
    steps = [shell("one", f"until grep -q '\"' {file}; do sleep 0.05; done")]
    given = {"seconds": 60, "environment": {}, "root": tmp_path, "say": lambda line: None}
    (record,) = Phase(steps, tmp_path, running=file, **given).run()
    assert record.is_right and file.read_text() == "{}"


@pytest.mark.parametrize("name", ["out", "work"])
def test_a_folder_that_cannot_be_written_is_an_error_before_the_first_step(
    card, tmp_path, capsys, name
):
    (tmp_path / name).write_text("a file")
    assert card.main(arguments(tmp_path)) == 2
    told = capsys.readouterr()
    assert f"error: {tmp_path}/{name} cannot be written: File exists" in told.err
    assert "one" not in told.out and (tmp_path / name).read_text() == "a file"


def test_a_disk_without_room_is_an_error_and_keeps_nothing_of_the_trial(tmp_path, monkeypatch):
    def full(path, data):
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(NotWritable, match="cannot be written: No space left on device"):
        check_writable(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("failures", [1, 10])
def test_a_summary_that_cannot_be_written_ends_no_step(
    card, tmp_path, capsys, monkeypatch, failures
):
    """The last one counts: a disk may be full for a while."""
    count = []

    def sometimes(*given):
        count.append(1)
        if len(count) <= failures:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*given)

    monkeypatch.setattr(card, "write", sometimes)
    assert card.main(arguments(tmp_path)) == (1 if failures > 2 else 0)
    told = capsys.readouterr()
    assert "phase a: 2 steps ok" in told.out
    error = f"error: {tmp_path}/out cannot be written: No space left on device; the logs are in"
    assert (error in told.err) is (failures > 2)
    assert all(read_record(tmp_path / "work" / "a", name).is_done for name in ("one", "two"))


def test_a_step_whose_log_cannot_be_written_runs_in_the_next_run(card, tmp_path):
    (tmp_path / "one.log").mkdir()
    steps = [shell("one", "echo first"), shell("two", "echo second")]
    given = {"seconds": 60, "environment": {}, "root": tmp_path, "say": lambda line: None}
    first, second = Phase(steps, tmp_path, **given).run()
    assert (first.status, first.note) == (None, "its log cannot be written: Is a directory")
    assert second.is_right and status_of([first, second]) == 1
    (tmp_path / "one.log").rmdir()
    assert all(record.is_right for record in Phase(steps, tmp_path, **given).run())


def test_parts_of_archives_do_not_stay(tmp_path, monkeypatch):
    out, steps = tmp_path / "out", tmp_path / "steps"
    steps.mkdir()
    out.mkdir()
    (out / ".a.tar.gz.123").write_bytes(b"of a run that was killed")
    write(out, "a", ["first"], steps)
    monkeypatch.setattr(tarfile, "open", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        write(out, "a", ["second"], steps)
    assert sorted(path.name for path in out.iterdir()) == ["a.tar.gz", "a.txt"]


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "soon"])
def test_minutes_are_a_time(card, tmp_path, capsys, minutes):
    with pytest.raises(SystemExit):
        card.main(arguments(tmp_path, "--minutes", minutes))
    assert "argument --minutes" in capsys.readouterr().err


def test_a_call_that_is_killed_in_a_step_goes_on(tmp_path):
    """A whole call, and the step that it leaves does not run beside the next call."""
    script = tmp_path / "card.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(FOLDER)!r})\n"
        "import importlib.util, card_steps\n"
        f"spec = importlib.util.spec_from_file_location('card', {str(FOLDER / '__main__.py')!r})\n"
        "card = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(card)\n"
        "steps = [card_steps.Step(name, ('sh', '-c', command), 30.0, 0.5) for name, command in (\n"
        f"    ('one', 'true'), ('two', 'echo $$ >> {tmp_path}/two; [ -e {tmp_path}/again ]"
        " || sleep 25'))]\n"
        "card_steps.steps_of = lambda *_: steps\n"
        "card.probe_machine = lambda *_: ({'gpu': 'a GPU'}, 0)\n"
        "sys.exit(card.main(sys.argv[1:]))\n"
    )
    command = [sys.executable, str(script), *arguments(tmp_path)]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not (tmp_path / "two").exists():
        assert first.poll() is None
        time.sleep(0.05)
    while '"' not in (tmp_path / "work" / "running.json").read_text():
        time.sleep(0.05)
    first.kill()
    first.wait()
    text = (tmp_path / "out" / "a.txt").read_text()
    assert "1 step is left for the next run of the same command: two" in text
    (tmp_path / "again").touch()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "a step of a run that was killed" in done.stdout
    assert "phase a: 2 steps ok, 0 not, 0 not run" in done.stdout
    before, _ = (tmp_path / "two").read_text().split()
    state = Path(f"/proc/{before}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
