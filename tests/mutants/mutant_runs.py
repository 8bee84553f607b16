"""Tests of a copy of the project, in which one mistake stands. The project itself is only read."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from mutation_operators import Mutant

COPIED = ("gptmanager", "callbacks", "cuda", "tests", "examples", "docs", "setup.cfg", "README.md")
KILLED, SURVIVED, TIMEOUT = "killed", "survived", "timeout"
NO_COMPILE, EQUIVALENT = "no compile", "equivalent"
DEAD = (KILLED, TIMEOUT)
_NO_COMPILE = re.compile(
    r"does not compile:"
    r"|^E +(?:numba\.core\.errors\.|SyntaxError|RuntimeError: LLVM IR parsing error)"
    r"|^\S*\bllvmlite/\S+:\d+: \w+$",  # where words are put together that do not fit
    re.MULTILINE,
)


@dataclass(frozen=True)
class Trial:
    mutant: Mutant
    verdict: str
    said: str = ""  # by the tests


class Stopped(Exception):
    """The trials were told to end."""


class Tree:
    """A copy of the project, and a cache of what is built from it."""

    def __init__(self, root: Path, folder: Path, limit_s: float) -> None:
        self.folder = folder / "project"
        self._cache = folder / "cache"
        self._limit_s = limit_s
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False
        self._lock = threading.Lock()  # around the two: nothing starts once it is stopped
        self.folder.mkdir()
        for name in COPIED:
            if (root / name).is_dir():
                shutil.copytree(root / name, self.folder / name)
            elif (root / name).exists():
                shutil.copy2(root / name, self.folder / name)

    def try_out(self, mutant: Mutant, tests: Sequence[str]) -> Trial:
        path = self.folder / mutant.file
        sound, built = path.read_text("utf-8"), set(self._built())
        path.write_text(mutant.plant(sound), "utf-8")
        try:
            status, said = self.test(tests)
        finally:
            path.write_text(sound, "utf-8")
            for own in set(self._built()) - built:  # binaries of this mistake alone
                own.unlink()
        return Trial(mutant, verdict(status, said), said)

    def _built(self) -> Iterator[Path]:
        return self._cache.rglob("*.so")

    def take_cache(self, other: Tree) -> None:
        """What was built for the tree without a mistake need not be built again."""
        if other._cache.exists():
            shutil.copytree(other._cache, self._cache, dirs_exist_ok=True)

    def test(self, tests: Sequence[str]) -> tuple[int | None, str]:
        """The status of pytest, None after `limit_s`, and what it printed.

        A test alone has no limit: what compiles for the first time beside others is slow, not dead.
        """
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not gpu", "-o", "timeout=0"]
        with tempfile.TemporaryFile("w+") as output:
            with self._lock:
                if self._stopped:
                    raise Stopped
                self._process = subprocess.Popen(
                    [*command, "-p", "no:cacheprovider", *tests],
                    cwd=self.folder,
                    env=self._environment(),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a Ctrl-C is this process's to handle
                )
            try:
                status = self._process.wait(self._limit_s)
            except subprocess.TimeoutExpired:
                self._kill()
                status = None
            if self._stopped:
                raise Stopped
            output.seek(0)
            return status, output.read()

    def _environment(self) -> dict[str, str]:
        own = {
            "PYTHONPATH": str(self.folder),
            "PYTHONDONTWRITEBYTECODE": "1",  # a mistake may be as long as what it replaces
            "XDG_CACHE_HOME": str(self._cache),
            "NUMBA_CACHE_DIR": str(self._cache / "numba"),
            "OMP_NUM_THREADS": "1",
            "GPTMANAGER_ALL_CASES": "1",
        }
        return {**os.environ, **own}

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            self._kill()


def verdict(status: int | None, said: str) -> str:
    if status is None:
        return TIMEOUT
    if status == 0:
        return SURVIVED
    if _NO_COMPILE.search(said):
        return NO_COMPILE
    return KILLED  # by a test, or with the whole process


@contextlib.contextmanager
def trees(root: Path, count: int, limit_s: float) -> Iterator[list[Tree]]:
    """Yield `count` copies of the tree. At the end, stop all processes and remove the copies."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        made: list[Tree] = []
        try:
            for number in range(count):
                own = Path(folder, str(number))
                own.mkdir()
                made.append(Tree(root, own, limit_s))
            yield made
        finally:
            for tree in made:
                tree.stop()


def try_all(
    made: Sequence[Tree],
    mutants: Sequence[Mutant],
    covering_tests: Callable[[str], list[str]],
) -> Iterator[Trial]:
    """Yield the trials in the order in which they end. Closing the generator stops the others."""
    free: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    for tree in made:
        free.put(tree)
    over = threading.Event()

    def try_one(mutant: Mutant) -> Trial:
        tree = free.get()
        try:
            if over.is_set():
                raise Stopped
            return tree.try_out(mutant, covering_tests(mutant.file))
        finally:
            free.put(tree)

    with ThreadPoolExecutor(len(made)) as pool:
        waiting = []
        try:
            waiting += [pool.submit(try_one, mutant) for mutant in mutants]
            for done in as_completed(waiting):
                yield done.result()
        finally:
            over.set()
            for one in waiting:
                one.cancel()
            for tree in made:
                tree.stop()


def check_tests(
    tree: Tree, files: Sequence[str], covering_tests: Callable[[str], list[str]]
) -> None:
    """Without a mistake they are green; ValueError with what they say where they are not."""
    checked = set[str]()
    for file in files:  # each at a time, because the limit of a mutant holds for its file's tests
        tests = sorted({*covering_tests(file)} - checked)
        checked |= {*tests}
        status, said = tree.test(tests) if tests else (0, "")
        if status != 0:
            reason = "take too long" if status is None else "are red"
            raise ValueError(f"without a mistake the tests of {file} {reason}:\n{said[-4000:]}")
