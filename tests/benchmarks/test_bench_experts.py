"""`gptmanager bench experts` at a small size."""

from __future__ import annotations

import json

import pytest

from gptmanager import cli
from gptmanager.bench import experts


def test_the_report_compares_experts_with_a_dense_matmul(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("HIDDEN", 64), ("WIDTH", 32), ("COUNT", 16)):
        monkeypatch.setattr(experts, name, value)
    command = ["bench", "experts", "--tokens", "1,4", "--rounds", "1"]
    assert cli.main([*command, "--weights-dtype", "int8", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [it["tokens"] for it in report["cases"]] == [1, 4]
    assert report["cases"][0]["experts_read"] == 8
    for case in report["cases"]:
        assert case["ratio"] == case["experts_per_second"] / case["dense_per_second"] > 0
    assert cli.main(command) == 0
    assert "of dense" in capsys.readouterr().out
