"""The first start on a machine: kernels are compiled by several processes, which share a cache."""

import ctypes
import errno
import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from child import Child
from numba import carray

from gptmanager.kernels import PackedMatrix, compilation
from gptmanager.kernels.compilation import compile_all
from gptmanager.kernels.gemm import matmul_plan
from gptmanager.kernels.simd import machine_code
from gptmanager.kernels.simd.lanes import pointer_to


def first(address: int) -> None:
    carray(pointer_to(address), 1, np.int64)[0] += 1


def second(address: int) -> None:
    carray(pointer_to(address), 1, np.int64)[0] += 2


def third(address: int) -> None:
    carray(pointer_to(address), 1, np.int64)[0] += 3


BODIES = [first, second, third]


def results() -> list[int]:
    numbers = []
    for body in BODIES:
        number = ctypes.c_int64(0)
        function = ctypes.CFUNCTYPE(None, ctypes.c_int64)(machine_code.compiled(body))
        function(ctypes.addressof(number))
        numbers.append(number.value)
    return numbers


@pytest.fixture(autouse=True)
def new_machine(monkeypatch, tmp_path):
    """Nothing is compiled yet, and there are two cores."""
    forget()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compilation, "num_cores", lambda: 2)
    monkeypatch.setattr(compilation, "free_memory_bytes", lambda: 8 << 30)
    yield
    forget()


@pytest.fixture
def alone(monkeypatch):
    """`compile_all` starts no other processes."""
    monkeypatch.setattr(compilation, "num_cores", lambda: 1)


@pytest.fixture
def compiled_here(monkeypatch):
    """The bodies that this process compiles, by name."""
    found = []
    watch_compilations(monkeypatch, found.append)
    return found


def watch_compilations(monkeypatch: pytest.MonkeyPatch, tell: Callable[[str], object]) -> None:
    """Call `tell` with the name of each body that this process compiles, before it does."""
    compile_it = machine_code.CFunc._compile_uncached
    monkeypatch.setattr(
        machine_code.CFunc,
        "_compile_uncached",
        lambda function: (tell(function.__name__[:-13]), compile_it(function))[1],
    )


def forget() -> None:
    """Forget all machine code, as in a new process."""
    machine_code.compiled.cache_clear()
    machine_code._function.cache_clear()


def test_another_process_compiles_too(monkeypatch, compiled_here):
    def compile_slowly(body):
        """The first body takes this process as long as the others take the other one."""
        while body is first and not (machine_code.is_kept(second) and machine_code.is_kept(third)):
            time.sleep(0.02)
        return machine_code.compile_if_free(body)

    told = []
    monkeypatch.setattr(compilation, "compile_if_free", compile_slowly)
    compile_all(BODIES, lambda *now: told.append(now))
    assert compiled_here == ["first"]
    assert told[0] == ("kernels", 0, 3) and told[-1] == ("kernels", 3, 3)
    assert told == sorted(told)
    assert results() == [1, 2, 3]
    told.clear()
    compile_all(BODIES, lambda *now: told.append(now))
    assert not told  # everything is kept


def replaced(monkeypatch, program):
    """The other processes run that program instead."""
    monkeypatch.setattr(compilation, "_PROGRAM", program)


@pytest.mark.parametrize(
    "program",
    ["", "import no_such_module", "import os; os.abort()"],
)
def test_a_process_that_cannot_compile_leaves_its_work_to_this_one(
    monkeypatch, compiled_here, program
):
    replaced(monkeypatch, program)
    told = []
    compile_all(BODIES, lambda *now: told.append(now))
    assert sorted(compiled_here) == ["first", "second", "third"]
    assert told[-1] == ("kernels", 3, 3) and results() == [1, 2, 3]


@pytest.fixture
def started(monkeypatch):
    """The other processes."""
    found = []
    start = subprocess.Popen
    monkeypatch.setattr(
        compilation.subprocess,
        "Popen",
        lambda *a, **k: (found.append(start(*a, **k)), found[-1])[1],
    )
    return found


TWIN = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import pytest, test_compilation as it
it.watch_compilations(pytest.MonkeyPatch(), lambda name: (print(name, flush=True), input()))
for body in it.BODIES:
    it.machine_code.compiled(body)
"""


@pytest.mark.slow
def test_processes_that_start_together_compile_each_body_once(alone, compiled_here, tmp_path):
    def tell(_, num_done, total):
        if num_done == 2:  # the other process goes on when only its body is left
            twin.stdin.write("\n")
            twin.stdin.flush()

    command, pipe = [sys.executable, "-c", TWIN, json.dumps(sys.path)], subprocess.PIPE
    with Child(command, text=True, stdin=pipe, stdout=pipe) as twin:
        assert twin.stdout.readline() == "first\n"
        compile_all(BODIES, tell)
        compiled_then, _ = twin.communicate("\n\n")
    assert compiled_here == ["second", "third"] and not compiled_then
    assert results() == [1, 2, 3]
    assert not list(tmp_path.rglob("*.lock"))


HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "wb")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
input()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that has locked the second body, as while it compiles this body."""
    with machine_code._lock(machine_code._function(second)._cache):
        (path,) = tmp_path.rglob("*.lock")
    command, pipe = [sys.executable, "-c", HOLDER, str(path)], subprocess.PIPE
    with Child(command, text=True, stdin=pipe, stdout=pipe) as process:
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def test_a_process_that_is_killed_leaves_its_body_to_this_one(alone, holder, compiled_here, caplog):
    told = []

    def tell(_, num_done, total):
        told.append((num_done, total))
        if num_done == 2:
            holder.kill()

    compile_all(BODIES, tell)
    assert compiled_here == ["first", "third", "second"] and results() == [1, 2, 3]
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert not caplog.records


def test_a_process_that_is_stopped_leaves_its_body_to_this_one(
    monkeypatch, alone, holder, compiled_here, caplog
):
    holder.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(machine_code, "_PATIENCE_S", 0.1)
    compile_all(BODIES)
    assert compiled_here == ["first", "third", "second"] and results() == [1, 2, 3]
    (record,) = caplog.records
    assert "another process has been compiling the kernel second" in record.message


def no_locks(*_):
    raise OSError(errno.ENOLCK, "No locks available")


def test_without_locks_each_body_is_compiled(monkeypatch, compiled_here, caplog):
    replaced(monkeypatch, "import time; time.sleep(600)")
    monkeypatch.setattr(machine_code, "flock", no_locks)
    compile_all(BODIES)
    assert compiled_here == ["first", "second", "third"] and results() == [1, 2, 3]
    assert not caplog.records


def test_in_a_folder_without_permission_for_a_lock_each_body_is_compiled(
    monkeypatch, compiled_here, tmp_path
):
    for body in BODIES:
        with machine_code._lock(machine_code._function(body)._cache):
            (path,) = [it for it in tmp_path.rglob("*.lock") if it.is_file()]
        path.mkdir()  # even the superuser cannot open it as a file
    compile_all(BODIES)
    assert sorted(compiled_here) == ["first", "second", "third"] and results() == [1, 2, 3]


def test_an_interruption_ends_the_other_processes(monkeypatch, started):
    replaced(monkeypatch, "import time; time.sleep(600)")

    def interrupt(body):
        raise KeyboardInterrupt

    monkeypatch.setattr(compilation, "compile_if_free", interrupt)
    with pytest.raises(KeyboardInterrupt):
        compile_all(BODIES)
    assert [process.returncode for process in started] == [-9]


@pytest.mark.parametrize(
    ("cores", "free", "executable", "count"),
    [
        *[(1, 8 << 30, "python", 1), (2, 8 << 30, "python", 2), (64, 64 << 30, "python", 3)],
        *[(8, 768 << 20, "python", 1), (8, 3 << 30, "python", 3), (8, 8 << 30, "", 1)],
    ],
)
def test_how_many_processes_compile(monkeypatch, cores, free, executable, count):
    monkeypatch.setattr(compilation, "num_cores", lambda: cores)
    monkeypatch.setattr(compilation, "free_memory_bytes", lambda: free)
    monkeypatch.setattr(sys, "executable", executable)
    assert compilation._num_processes(BODIES) == count


def test_without_a_folder_this_process_compiles_alone(monkeypatch, caplog, compiled_here):
    machine_code._log_no_cache.cache_clear()
    monkeypatch.setattr(machine_code._CacheImpl, "_locator_classes", ())
    assert compilation._num_processes(BODIES) == 1
    compile_all(BODIES)
    assert sorted(compiled_here) == ["first", "second", "third"] and results() == [1, 2, 3]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8"])
def test_the_bodies_of_matmuls_are_those_that_are_used(monkeypatch, dtype, deterministic):
    used = []
    monkeypatch.setattr(matmul_plan, "compiled", lambda body: used.append(body) or 1)
    quantized = dtype == "int8"
    matrix = PackedMatrix(32, 32, getattr(torch, "float32" if quantized else dtype), quantized)
    matmul_plan.plan_matmul(matrix, silu=False, deterministic=deterministic)
    assert set(used) == {*matmul_plan.matmul_bodies(matrix.values.dtype, deterministic)}
