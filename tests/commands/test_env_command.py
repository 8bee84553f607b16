"""`gptmanager env`: what it prints, and what it keeps to itself."""

import json
import platform
from pathlib import Path

import pytest

from gptmanager import ModelType, cli
from gptmanager.bench import environment_main
from gptmanager.bench.roofline import Ceilings
from gptmanager.environment.legible_json import legible


def test_the_report_has_what_a_bug_report_needs_and_no_secret(capsys, monkeypatch):
    monkeypatch.setenv("GPTMANAGER_SERVE_API_KEY", "SECRET")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert cli.main(["env"]) == 0
    text = capsys.readouterr().out
    assert cli.main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["python"] == platform.python_version()
    assert "torch" in found["versions"] and "used" in found["cores"] and found["extras"]["server"]
    assert found["environment"]["GPTMANAGER_SERVE_API_KEY"] == "set"
    assert found["environment"]["OMP_NUM_THREADS"] == "1"
    for name in ("system", "cpu", "kernels", "memory", "caches", "gpu", "switches"):
        assert found[name] and f"\n{name}" in f"\n{text}"
    assert "SECRET" not in text + json.dumps(found)


def test_a_machine_without_a_folder_for_kernels_gets_a_report(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/file")
    monkeypatch.setattr("tempfile.tempdir", f"{tmp_path}/file")
    assert cli.main(["env", "--json"]) == 0
    caches = json.loads(capsys.readouterr().out)["caches"]
    assert caches["kernels of the GPU"] == "none can be written"


@pytest.mark.parametrize(
    ("lines", "extras"),
    [
        (["torch>=2", 'numpy[x]>=1; extra == "a"'], {"a": "installed"}),
        (['no-such-thing>=1; extra == "b"', 'numpy; extra == "b"'], {"b": "lacks no-such-thing"}),
        (['no-such; extra == "d"', 'no-such[x]>=1; extra == "d"'], {"d": "lacks no-such"}),
        (['none-such; python_version < "3" and extra == "c"'], {}),
    ],
)
def test_extras_are_installed_or_lack_packages(monkeypatch, lines, extras):
    monkeypatch.setattr(environment_main.metadata, "requires", lambda name: lines)
    assert environment_main._extras() == extras


def test_what_reports_may_hold_is_json():
    """Also what is of no type of JSON, keys and texts that are not UTF-8, and what holds these."""
    report = {Path("a"): Ceilings(1.0, 2.0, "\udc80"), "c": (ModelType.V1, {1: None})}
    fields = {"copy_bytes_per_s": 1.0, "matmul_flops_per_s": 2.0, "dtype": "\\udc80"}
    assert legible(report) == {"a": fields, "c": ["V1", {1: None}]}
    assert legible([Path("a")], lambda value: (value.name, 2)) == [["a", 2]]
