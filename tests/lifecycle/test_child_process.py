"""A child process that is stopped, killed, forked with its host, or cannot be started."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys

import orjson
import pytest

from gptmanager.lifecycle import child_process
from gptmanager.lifecycle.child_process import (
    ChildProcess,
    NoAnswerError,
    NotStartedError,
    RefusedError,
    TooSlowError,
)

MODULE = "gptmanager.callbacks.text.template_rendering"


def question(template, content=""):
    message = {"role": "user", "content": content}
    return orjson.dumps({"template": template, "messages": [message], "variables": {}})


@pytest.fixture
def child():
    child = ChildProcess(MODULE, {}, 1 << 27)
    assert child.ask(question("ready"), 30) == "ready"
    yield child
    child.stop()


def test_a_search_path_that_is_not_utf_8(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path, f"{tmp_path}/a\udcffb"])
    child = ChildProcess(MODULE, {}, 1 << 27)
    assert child.ask(question("ready"), 30) == "ready"
    child.stop()


def test_a_library_that_was_replaced_is_named():
    child = ChildProcess("gptmanager.no_longer_there", {}, 1 << 27)
    with pytest.raises(NotStartedError, match="status 1 before its first answer; if the library"):
        child.ask(question("ready"), 30)


@pytest.mark.parametrize("size", [10, 4 << 20])  # less, and more than the buffer of a pipe
def test_a_stopped_process_ends_in_time(child, size):
    os.kill(child._process.pid, signal.SIGSTOP)
    with pytest.raises(TooSlowError, match=r"it takes more than 0\.3 s"):
        child.ask(question("{{ messages[0].role }}", "x" * size), 0.3)
    text = "é" * size
    assert child.ask(question("{{ messages[0].content }}", text), 30) == text


def test_a_killed_process_is_reported_and_started_anew(child):
    os.kill(child._process.pid, signal.SIGSTOP)

    def kill():
        child._process.kill()
        return True

    with pytest.raises(NoAnswerError, match="bytes of memory, or its process was killed"):
        child.ask(question("a", "x" * (4 << 20)), 30, kill)
    assert child.ask(question("b"), 30) == "b"
    child._process.kill()  # between two questions nobody notices
    child._process.wait()
    assert child.ask(question("c"), 30) == "c"


def test_an_unwanted_answer_is_not_waited_for(child):
    os.kill(child._process.pid, signal.SIGSTOP)
    with pytest.raises(NoAnswerError, match="not wanted"):
        child.ask(question("a"), 600, lambda: False)


def test_what_the_module_refuses_leaves_the_process(child):
    pid = child._process.pid
    with pytest.raises(RefusedError, match="line 1"):
        child.ask(question("{% if %}"), 30)
    with pytest.raises(RefusedError, match="messages"):
        child.ask(b"{}", 30)
    with pytest.raises(RefusedError):
        child.ask(b"no json", 30)
    assert child.ask(question("d"), 30) == "d" and child._process.pid == pid


def test_without_descriptors_there_is_no_process():
    """And none is left half open."""
    child = ChildProcess(MODULE, {}, 1 << 27)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len(os.listdir("/proc/self/fd"))
    try:
        for room in range(6):
            top = max(int(name) for name in os.listdir("/proc/self/fd")) + 1 + room
            fillers = []
            resource.setrlimit(resource.RLIMIT_NOFILE, (top, hard))
            with pytest.raises(OSError, match="Too many"):
                while True:
                    fillers.append(os.open("/dev/null", os.O_RDONLY))
            for _ in range(min(room, len(fillers))):
                os.close(fillers.pop())
            try:
                with pytest.raises(NotStartedError, match=r"no process can be started: .*Too many"):
                    child.ask(question("a"), 30)
            finally:
                for file in fillers:
                    os.close(file)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if sys.version_info >= (3, 11):  # subprocess of Python 3.10 leaves its pipes open
        assert len(os.listdir("/proc/self/fd")) <= num_open
    assert child.ask(question("a"), 30) == "a"
    child.stop()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_host_has_a_process_of_its_own(child):
    """The parent's process answers only the parent, and continues after the fork ends."""
    forked = os.fork()
    if not forked:
        try:
            os._exit(0 if child.ask(question("mine"), 30) == "mine" else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
    pid = child._process.pid
    assert child.ask(question("theirs"), 30) == "theirs" and child._process.pid == pid


def test_the_process_does_not_get_the_signals_of_the_terminal(child):
    """Ctrl-C goes to all processes of a group."""
    child.ask(question("a"), 30)
    assert os.getpgid(child._process.pid) != os.getpgid(0)


def test_a_process_ends_with_its_owner():
    child = ChildProcess(MODULE, {}, 1 << 27)
    child.ask(question("a"), 30)
    process = child._process
    del child
    gc.collect()
    assert process.returncode == -signal.SIGKILL


def test_a_process_that_holds_much_after_an_answer_is_started_anew(child, monkeypatch):
    first = child._process.pid
    assert child.ask(question("a"), 30) == "a" and child._process.pid == first
    monkeypatch.setattr(child_process, "_MOST_KEPT_BYTES", -(1 << 40))
    assert child.ask(question("b"), 30) == "b" and child._process is None
    assert child.ask(question("c"), 30) == "c"


def test_memory_that_an_answer_freed_goes_back_to_the_system():
    """Also from below a block that is still in use. More than is allowed, it does not get."""
    child = ChildProcess("fragmenting_child", {}, 1 << 26)
    try:
        assert child.ask(b"256", 30) == 256  # 16 MiB
        assert child.ask(b"1", 30) == 1  # the first answer's memory has been given back by now
        size = child_process._resident_bytes(child._process.pid)
        assert size - child._first_size < 8 << 20
        with pytest.raises(RefusedError, match="MemoryError"):
            child.ask(b"2048", 30)  # 128 MiB
    finally:
        child.stop()
