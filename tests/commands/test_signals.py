"""Ctrl-C, SIGTERM and SIGHUP: exit statuses and messages, at each moment of a command."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from child import Child

STATUSES = [
    (signal.SIGINT, 130, "interrupted"),
    (signal.SIGTERM, 143, "terminated"),
    (signal.SIGHUP, 129, "terminated"),
]
MODEL = "examples/tiny_llama"


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize(("number", "status", "told"), STATUSES)
def test_a_signal_while_the_command_line_is_imported(number, status, told):
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
    assert (done.returncode, done.stderr) == (status, f"gptmanager: {told}\n")


@pytest.mark.parametrize(("number", "status", "told"), STATUSES)
def test_the_second_signal_ends_the_command_at_once(number, status, told):
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
    assert (done.returncode, done.stderr) == (status, f"gptmanager: {told}\n")


@pytest.mark.parametrize("number", [one[0] for one in STATUSES])
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


@pytest.mark.parametrize(("number", "status", "told"), STATUSES)
def test_a_run_tells_how_many_requests_were_done(number, status, told, tmp_path):
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
    assert process.returncode == status
    assert error.endswith(f"1 of 2 requests were done\ngptmanager: {told}\n")
    assert out.read_text().count("\n") == 1
