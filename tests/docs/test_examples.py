"""The example scripts run."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_the_asyncio_host_streams_and_cancels(capsys):
    completions = runpy.run_path(str(EXAMPLES / "asyncio_host.py"))["main"](EXAMPLES / "tiny_llama")
    assert completions[:2] == [" 42", " 27"]
    assert completions[2].startswith(" 1, 2, 3") and "12" not in completions[2]
    assert "17 + 25 =| 42" in capsys.readouterr().out


def test_the_reward_of_the_rollout_loop_rises(capsys):
    sys.path.insert(0, str(EXAMPLES))  # a script imports its neighbor
    try:
        rewards = runpy.run_path(str(EXAMPLES / "rollout_loop.py"))["main"](5, sleeps=True)
    finally:
        sys.path.remove(str(EXAMPLES))
    assert rewards[-1] > rewards[0] + 0.03
    assert "step 4: reward" in capsys.readouterr().out
