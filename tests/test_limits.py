"""A test that hangs fails, and ends neither the run's report nor its exit.

The limit of pytest-timeout is a signal. It cannot end a test in code of C that never returns, nor a
thread that a failed test has left: Python would wait for this thread at the end of the run.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from child import Child

ROOT = Path(__file__).resolve().parents[1]

IN_C = """
import itertools

def test_never_ends():
    sum(itertools.repeat(0))
"""

IN_A_THREAD = """
import threading, conftest

def test_leaves_a_thread():
    conftest._EXIT_S = 0.5
    threading.Thread(target=threading.Event().wait).start()
    assert False
"""


@pytest.mark.parametrize(
    ("test", "limit", "told"),
    [
        (IN_C, "1", "in test_never_ends"),
        (IN_A_THREAD, "20", "FAILED test_it.py::test_leaves_a_thread"),
    ],
    ids=["in C", "in a thread"],
)
@pytest.mark.every(2)
def test_a_run_ends_with_a_failure_that_names_the_test(test, limit, told, tmp_path):
    (tmp_path / "test_it.py").write_text(test)
    settings = "--config-file", ROOT / "setup.cfg", "--rootdir", tmp_path, "--timeout", limit
    ended = subprocess.run(
        [
            sys.executable,
            *"-m pytest -p conftest -p no:cacheprovider test_it.py".split(),
            *settings,
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *sys.path])},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert ended.returncode == 1
    assert told in ended.stdout + ended.stderr


def test_a_block_that_raises_kills_its_child():
    with pytest.raises(ValueError, match="planted"), Child(["sleep", "600"]) as child:
        raise ValueError("planted")
    assert child.returncode == -signal.SIGKILL


def test_a_child_that_outlives_the_limit_of_its_test_is_killed(monkeypatch):
    def reach_limit(timeout=None):
        raise TimeoutError("planted")

    child = Child(["sleep", "600"])
    with monkeypatch.context() as patch:
        patch.setattr(child, "wait", reach_limit)
        with pytest.raises(TimeoutError, match="planted"):
            child.__exit__(None, None, None)
    assert child.wait() == -signal.SIGKILL
