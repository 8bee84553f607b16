"""The example scripts run."""

from __future__ import annotations

import runpy
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_the_asyncio_host_streams_and_cancels(capsys):
    completions = runpy.run_path(str(EXAMPLES / "asyncio_host.py"))["main"](EXAMPLES / "tiny_llama")
    assert completions[:2] == [" 42", " 27"]
    assert completions[2].startswith(" 1, 2, 3") and "12" not in completions[2]
    assert "17 + 25 =| 42" in capsys.readouterr().out
