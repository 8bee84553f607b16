"""A GPU whose context is broken ends the tests of its process, with a sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from sticky_errors import StickyErrors

CONFTEST = """
from types import SimpleNamespace
from sticky_errors import StickyErrors

def pytest_configure(config):
    def synchronize():
        if {sticks}:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\\nmore")

    config.addinivalue_line("markers", "gpu: needs a GPU")
    device = SimpleNamespace(is_initialized=lambda: True, synchronize=synchronize)
    config.pluginmanager.register(StickyErrors(device), "sticky errors")
"""
TESTS = """
import pytest
def test_on_the_cpu(): assert 0
@pytest.mark.gpu
def test_first(): assert 0
@pytest.mark.gpu
def test_second(): pass
"""


@pytest.mark.parametrize("sticks", [True, False])
@pytest.mark.slow
def test_the_session_ends(tmp_path, sticks):
    (tmp_path / "conftest.py").write_text(CONFTEST.replace("{sticks}", str(sticks)))
    (tmp_path / "test_it.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert ("broken: CUDA error: an illegal memory access was" in done.stdout) is sticks
    counts = "2 failed in" if sticks else "2 failed, 1 passed in"
    assert counts in done.stdout, done.stdout


def test_an_unused_device():
    def synchronize():
        raise AssertionError("that would make a context")

    device = SimpleNamespace(is_initialized=lambda: False, synchronize=synchronize)
    assert StickyErrors(device).sentence() == ""


@pytest.mark.parametrize("sentence", ["it is broken", ""])
def test_a_broken_process_leaves_at_once(sentence):
    left = []
    hooks = StickyErrors(leave=left.append)
    hooks._sentence = sentence
    hooks.pytest_unconfigure()
    assert left == ([1] if sentence else [])
