"""Ctrl-C, SIGTERM and SIGHUP: how they end a command, and messages, at each moment of it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from child import Child

ENDS = [
    (signal.SIGINT, "interrupted"),
    (signal.SIGTERM, "terminated"),
    (signal.SIGHUP, "terminated"),
]
MODEL = "examples/tiny_llama"


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize(("number", "told"), ENDS)
def test_a_signal_while_the_command_line_is_imported(number, told):
    done = run_python(f"""
import os, sys

class Interrupting:
    def find_spec(name, path, target=None):
        if name == "gptmanager.cli":
            os.kill(os.getpid(), {int(number)})

from gptmanager.__main__ import main
sys.meta_path.insert(0, Interrupting)
sys.argv[1:] = ["run"]
main()
""")
    assert (done.returncode, done.stderr) == (-number, f"gptmanager: {told}\n")


@pytest.mark.parametrize(("number", "told"), ENDS)
def test_the_second_signal_ends_the_command_at_once(number, told):
    done = run_python(f"""
import os
from gptmanager.terminal.signals import raising_signals
with raising_signals() as arrived:
    try:
        os.kill(os.getpid(), {int(number)})
    finally:
        print(arrived, flush=True)
        os.kill(os.getpid(), {int(number)})
        print("not reached", flush=True)
""")
    assert done.stdout == f"[{int(number)}]\n"
    assert (done.returncode, done.stderr) == (-number, f"gptmanager: {told}\n")


@pytest.mark.parametrize("number", [one[0] for one in ENDS])
def test_a_signal_while_python_exits_changes_nothing(number):
    done = run_python(f"""
import os, sys
from gptmanager.__main__ import main

class Late:
    def __del__(self, kill=os.kill, pid=os.getpid()):
        kill(pid, {int(number)})

sys.late = Late()
sys.argv[1:] = ["--version"]
main()
""")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "told"), ENDS)
def test_a_run_says_how_many_requests_were_done(number, told, tmp_path):
    out, path = tmp_path / "out.jsonl", tmp_path / "requests.jsonl"
    short, long = {"prompt": "a", "max_new_tokens": 1}, {"prompt": "b", "max_new_tokens": 400}
    path.write_text("".join(json.dumps(one) + "\n" for one in (short, {**long, "end_id": -1})))
    command = [sys.executable, "-m", "gptmanager", "run", "--model", MODEL, "--pace", "0.3"]
    with Child(
        [*command, "--requests", str(path), "--output", str(out)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        while not (out.exists() and out.read_text().endswith("\n")):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        error = process.stderr.read()
    assert process.returncode == -number
    assert error.endswith(f"1 of 2 requests were done\ngptmanager: {told}\n")
    assert out.read_text().count("\n") == 1


@pytest.mark.slow
def test_ctrl_c_also_ends_the_script_that_runs_a_command(tmp_path):
    """A shell continues its script if the command exits with a status, whatever this status is."""
    script, path = tmp_path / "script.sh", tmp_path / "requests.jsonl"
    path.write_text(json.dumps({"prompt": "b", "max_new_tokens": 400, "end_id": -1}))
    command = f"{sys.executable} -m gptmanager run --model {MODEL} --pace 0.3 --requests {path}"
    script.write_text(f"trap 'echo the first ends' EXIT\n{command}\necho continued\n")
    with Child(
        ["bash", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        while "joins" not in (line := process.stderr.readline()):
            assert line
        os.killpg(process.pid, signal.SIGINT)  # a terminal does the same
        assert process.stdout.read() == "the first ends\n"
    assert process.returncode == -signal.SIGINT


def test_a_process_that_signals_of_its_own_do_not_end_exits_with_the_status():
    done = run_python("""
import signal
from gptmanager.terminal.signals import end_by
signal.raise_signal = lambda number: None  # like the first process of a container
end_by(signal.SIGTERM)
""")
    assert (done.returncode, done.stderr) == (143, "")
