"""The tool that plants mistakes: what it plants, and what it says of a small project."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import covering
import pytest
from child import Child
from covering import covering_tests, files
from mutant_runs import (
    KILLED,
    NO_COMPILE,
    SURVIVED,
    TIMEOUT,
    Trial,
    check_tests,
    trees,
    try_all,
    verdict,
)
from mutation_operators import Mutant, mutants_of, sample

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
KERNEL = """\
#include "numerics.cuh"  // a + b
__global__ void f(float* x, int n) {
    int i = size_t(blockIdx.x) * 4 + threadIdx.x;
    if (i >= n) return;  // i < n
    __syncthreads();
    x[i] = max(x[i], -INFINITY);
    x[i] *= n > 3 ? 1.5f : i;
}
"""
BODY = '''\
def clamp(x: int, low: int, high: int) -> int:
    """x - low"""
    if x < low and low < high:
        x = (low + 1) * x
    put(x, low)
    return min(x, high)
'''


def planted(file, text):
    """Kind and changed line, without its indentation."""
    return {(it.kind, it.after.strip()) for it in mutants_of(file, text)}


def test_mistakes_in_cuda():
    found = planted("cuda/f.cu", KERNEL)
    assert {
        ("arithmetic", "int i = size_t(blockIdx.x) * 4 - threadIdx.x;"),
        ("conversion", "int i = int(blockIdx.x) * 4 + threadIdx.x;"),
        ("constant", "int i = size_t(blockIdx.x) * 5 + threadIdx.x;"),
        ("comparison", "if (i > n) return;  // i < n"),
        ("condition", "if (!(i >= n)) return;  // i < n"),
        ("condition", "if (true) return;  // i < n"),
        ("dropped", "if (i >= n) ;  // i < n"),
        ("dropped", ";"),
        ("extreme", "x[i] = min(x[i], -INFINITY);"),
        ("index", "x[i + 1] = max(x[i], -INFINITY);"),
        ("constant", "x[i] = max(x[i], 0.0f);"),
        ("swapped", "x[i] *= n > 3 ? i : 1.5f;"),
    } <= found
    assert planted("cuda/f.cu", "x = f(a, b);") > {("swapped", "x = f(b, a);")}
    assert ("swapped", "x = max(b, a);") not in planted("cuda/f.cu", "x = max(a, b);")
    lines = KERNEL.splitlines()
    assert all(mutant.line not in (1, 8) for mutant in mutants_of("cuda/f.cu", KERNEL))
    for mutant in mutants_of("cuda/f.cu", KERNEL):
        changed = mutant.plant(KERNEL).splitlines()
        assert [a == b for a, b in zip(lines, changed, strict=True)].count(False) == 1
        assert mutant.after.partition("//")[2] == mutant.before.partition("//")[2]


def test_mistakes_in_python():
    assert planted("f.py", BODY) >= {
        ("comparison", "if x <= low and low < high:"),
        ("logic", "if x < low or low < high:"),
        ("condition", "if not (x < low and low < high):"),
        ("arithmetic", "x = (low - 1) * x"),
        ("arithmetic", "x = (low + 1) + x"),
        ("constant", "x = (low + 2) * x"),
        ("dropped", "pass"),
        ("extreme", "return max(x, high)"),
    }
    assert not planted("f.py", "for a, b in zip(c, d, strict=True):\n    f(a, b)\n") - {
        ("dropped", "pass")
    }
    assert not planted("f.py", "x = (\n    a\n    - b\n)\n")  # nothing where a sign has its line
    for mutant in mutants_of("f.py", BODY):
        compile(mutant.plant(BODY), "f.py", "exec")
        assert mutant.line > 2


def test_a_sample_is_that_of_its_seed():
    mutants = mutants_of("cuda/f.cu", KERNEL)
    chosen = sample(mutants, 5, seed=3)
    assert chosen == sample(mutants, 5, seed=3) and len({*chosen}) == 5
    assert chosen != sample(mutants, 5, seed=4)
    assert sample(mutants, 1000, seed=3) == mutants


def test_every_file_has_tests():
    own = {"cuda/norms.cu", "cuda/attention/pages.cuh", "gptmanager/kernels/cpu.py"}
    core = {"gptmanager/kv_cache/block.py", "gptmanager/loop/limits.py"}
    assert {*own, *core, "gptmanager/scheduler/capacity.py"} <= {*files(ROOT)}
    assert all(covering_tests(ROOT, file) for file in files(ROOT))
    for file in ("cuda/norms.cu", "cuda/numerics.cuh", "gptmanager/kernels/cpu.py"):
        assert mutants_of(file, (ROOT / file).read_text("utf-8"))


def test_every_named_test_exists():
    tables = (covering._CUDA, covering._LAUNCHES, covering._EMULATED, covering._CPU)
    tables = (*tables, covering._OTHERS, covering._CORE)
    named = {name for table in tables for names in table.values() for name in names.split()}
    assert {"test_loop", "test_gemm"} < named
    assert named <= {path.stem for path in (ROOT / "tests").rglob("test_*.py")}


def test_tests_of_a_kernel_are_those_that_launch_it(tmp_path):
    """A test of the same name may be one of the CPU's kernel."""
    paths = ("cuda/a.cu", "tests/kernels/test_a.py", "tests/cuda/test_a_kernel.py")
    for root, count in ((tmp_path / "whole", 3), (tmp_path / "without", 2)):
        for path in paths[:count]:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).touch()
    assert covering_tests(tmp_path / "whole", "cuda/a.cu") == ["tests/cuda/test_a_kernel.py"]
    with pytest.raises(ValueError, match="cuda/a.cu has no tests in"):
        covering_tests(tmp_path / "without", "cuda/a.cu")
    assert covering_tests(ROOT, "cuda/delta_rule.cu") == ["tests/cuda/test_recurrent_kernels.py"]
    providers = "gptmanager/assembly/attention_trial.py"
    assert providers in files(ROOT) and covering_tests(ROOT, providers)


def test_tests_of_a_new_header_are_those_of_its_users(tmp_path):
    for path in ("cuda/new.cuh", "cuda/a.cu", "cuda/b.cu", "tests/cuda/test_a.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text('#include "new.cuh"' if path == "cuda/a.cu" else "")
    assert covering_tests(tmp_path, "cuda/new.cuh") == ["tests/cuda/test_a.py"]
    with pytest.raises(ValueError, match="cuda/b.cu has no tests in"):
        covering_tests(tmp_path, "cuda/b.cu")


def test_equivalent_mutants_are_of_the_code_as_it_is():
    command = runpy.run_path(str(FOLDER / "__main__.py"))
    known = command["read_equivalent"]((FOLDER / "equivalent.txt").read_text("utf-8"))
    texts = {file: (ROOT / file).read_text("utf-8") for file, _, _ in known}
    planted = {
        command["identity"](it) for file, text in texts.items() for it in mutants_of(file, text)
    }
    assert [it for it in known if it not in planted] == []


def test_no_name_of_a_file_is_cut(tmp_path, monkeypatch, capsys):
    """Also where the table goes to a pipe."""
    monkeypatch.setenv("COLUMNS", "60")
    command = runpy.run_path(str(FOLDER / "__main__.py"))
    file, report = "gptmanager/kernels/attention/attention_arguments.py", tmp_path / "report"
    trials = [Trial(Mutant(file, 1, "any", "", " "), verdict) for verdict in (KILLED, SURVIVED)]
    command["show"](trials, report)
    assert f"{file} " in capsys.readouterr().out and file in report.read_text()


@pytest.fixture
def project(tmp_path):
    """A project of one function and one test."""
    root = tmp_path / "project"
    (root / "tests").mkdir(parents=True)
    (root / "gptmanager").mkdir()
    (root / "gptmanager" / "__init__.py").touch()
    (root / "gptmanager" / "kernels.py").write_text("def double(x):\n    return x + x\n")
    (root / "tests" / "test_double.py").write_text(
        "from gptmanager.kernels import double\n\ndef test_double():\n    assert double(2) == 4\n"
    )
    (root / "setup.cfg").write_text(
        "[tool:pytest]\naddopts = -p no:schemathesis\ntimeout = 0.2\nmarkers =\n    gpu: one\n"
    )
    return root


def mistake(after):
    return Mutant("gptmanager/kernels.py", 2, "any", "    return x + x", f"    return {after}")


@pytest.mark.slow
def test_what_becomes_of_mistakes(project):
    mistakes = {
        "x - x": KILLED,
        "x * 2": SURVIVED,
        "__import__('time').sleep(0.4) or x * 2": SURVIVED,
        "x +": NO_COMPILE,
        "__import__('os').abort()": KILLED,
    }
    before = {path: path.read_bytes() for path in project.rglob("*.py")}

    def tests(file):
        return ["tests/test_double.py"]

    with trees(project, 2, limit_s=60) as made:
        check_tests(made[0], ["gptmanager/kernels.py"], tests)
        trials = list(try_all(made, [*map(mistake, mistakes)], tests))
        folder = made[0].folder
        assert (folder / "gptmanager" / "kernels.py").read_text().endswith("x + x\n")
    found = {trial.mutant.after.removeprefix("    return "): trial.verdict for trial in trials}
    assert found == mistakes
    assert not folder.exists() and before == {path: path.read_bytes() for path in before}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("E   RuntimeError: LLVM IR parsing error\nE   <string>:90:61: error: align 3", NO_COMPILE),
        ("E   TypeError: mask\n\n/lib/llvmlite/ir/instructions.py:742: TypeError\n", NO_COMPILE),
        ("E   numba.core.errors.TypingError: Failed in nopython mode", NO_COMPILE),
        ("E   AssertionError: assert 4 == 5\n\ntests/test_words.py:7: AssertionError\n", KILLED),
        ("    from llvmlite import ir\nE   RuntimeError: no LLVM IR parsing error", KILLED),
    ],
)
def test_text_that_is_not_code_is_not_dead(said, expected):
    assert verdict(1, said) == expected


def test_tests_that_take_too_long(project):
    with trees(project, 1, limit_s=0.01) as made:
        trials = list(try_all(made, [mistake("x")], lambda file: ["tests/test_double.py"]))
    assert [trial.verdict for trial in trials] == [TIMEOUT]


def test_tests_that_are_red_without_a_mistake(project):
    (project / "gptmanager" / "kernels.py").write_text("def double(x):\n    return x\n")
    with trees(project, 1, limit_s=60) as made:
        with pytest.raises(
            ValueError, match="without a mistake the tests of any are red(.|\n)*1 failed"
        ):
            check_tests(made[0], ["any"], lambda file: ["tests/test_double.py"])


def test_an_interrupted_command_reports_what_it_has(tmp_path):
    """Its copies are gone, and nothing runs."""
    report = tmp_path / "mutants.diff"
    options = [
        "--file",
        "cuda/sampling/token_masks.cu",
        "--per-file",
        "3",
        "--jobs",
        "1",
        "--unchecked",
    ]
    with Child(
        [sys.executable, FOLDER, *options, "--report", report],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        deadline = time.monotonic() + 30
        while not list(tmp_path.glob("mutants-*/0/cache")) and time.monotonic() < deadline:
            if list(tmp_path.glob("mutants-*/0/project/setup.cfg")):
                break
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=30)
    assert process.returncode == 130, said
    assert re.search(r"interrupted: \d of 3 were not tried", said) and report.exists()
    assert not list(tmp_path.glob("mutants-*"))


def test_what_was_built_without_a_mistake_is_kept(project):
    """A mistake's own is not: the next one would find it under the same name, or fill the disk."""
    (project / "tests" / "test_double.py").write_text(
        "import os, pathlib\nfrom gptmanager.kernels import double\n\ndef test_double():\n"
        "    folder = pathlib.Path(os.environ['XDG_CACHE_HOME'])\n"
        "    folder.mkdir(exist_ok=True)\n"
        "    (folder / f'{double(2)}.so').touch()\n"
    )
    with trees(project, 2, limit_s=60) as made:
        check_tests(made[0], ["any"], lambda file: ["tests/test_double.py"])
        made[1].take_cache(made[0])
        for tree in made:
            assert tree.try_out(mistake("x + 5"), ["tests/test_double.py"]).verdict == SURVIVED
            assert [path.name for path in (tree.folder.parent / "cache").iterdir()] == ["4.so"]
