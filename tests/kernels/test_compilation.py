"""The first start on a machine: kernels are compiled by several processes, which share a cache."""

import ctypes
import logging
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
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
    machine_code.compiled.cache_clear()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compilation, "num_cores", lambda: 2)
    monkeypatch.setattr(compilation, "free_memory_bytes", lambda: 8 << 30)
    yield
    machine_code.compiled.cache_clear()


@pytest.fixture
def compiled_here(monkeypatch):
    """The bodies that this process compiles, by name."""
    found = []
    compile_it = machine_code.CFunc._compile_uncached
    monkeypatch.setattr(
        machine_code.CFunc,
        "_compile_uncached",
        lambda function: (found.append(function.__name__[:-13]), compile_it(function))[1],
    )
    return found


def test_another_process_compiles_too(monkeypatch, compiled_here):
    def compile_slowly(body):
        """The first body takes this process as long as the others take the other one."""
        while body is first and not (machine_code.is_kept(second) and machine_code.is_kept(third)):
            time.sleep(0.02)
        return machine_code.compiled(body)

    told = []
    monkeypatch.setattr(compilation, "compiled", compile_slowly)
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
    [
        "",
        "input(); print('compiled', flush=True); input(); print('no')",
        "import os, sys; sys.stdin.readline(); os.abort()",
    ],
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


STOPPED = """
import os, pathlib, signal
input(); print('compiled', flush=True); input()
pathlib.Path('IT_HAS_ONE').touch(); os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_process_that_is_stopped_leaves_its_work_to_this_one(
    monkeypatch, tmp_path, started, compiled_here, caplog
):
    has_one, told = tmp_path / "it has one", []

    def compile_slowly(body):
        """Nothing is left when the other process has taken its body."""
        while not has_one.exists():
            time.sleep(0.01)
        return machine_code.compiled(body)

    replaced(monkeypatch, STOPPED.replace("IT_HAS_ONE", str(has_one)))
    monkeypatch.setattr(compilation, "compiled", compile_slowly)
    monkeypatch.setattr(compilation, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(compilation, "_PATIENCE", 0.1)
    compile_all(BODIES, lambda *now: told.append(now))
    assert sorted(compiled_here) == ["first", "second", "third"]
    assert told[-1] == ("kernels", 3, 3) and results() == [1, 2, 3]
    assert [process.returncode for process in started] == [-9]
    assert [record.message[:36] for record in caplog.records] == [
        "processes that compile kernels have "
    ]


def test_an_interruption_ends_the_other_processes(monkeypatch, started):
    replaced(monkeypatch, "import time; time.sleep(600)")

    def interrupt(body):
        raise KeyboardInterrupt

    monkeypatch.setattr(compilation, "compiled", interrupt)
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
def test_the_bodies_of_products_are_those_that_are_used(monkeypatch, dtype, deterministic):
    used = []
    monkeypatch.setattr(matmul_plan, "compiled", lambda body: used.append(body) or 1)
    quantized = dtype == "int8"
    matrix = PackedMatrix(32, 32, getattr(torch, "float32" if quantized else dtype), quantized)
    matmul_plan.plan_matmul(matrix, silu=False, deterministic=deterministic)
    assert set(used) == {*matmul_plan.matmul_bodies(matrix.values.dtype, deterministic)}
