"""`gptmanager env`: what it prints, and what it keeps to itself."""

import json
import platform
import sys
from importlib import metadata
from importlib.metadata import version
from pathlib import Path

import pytest

from gptmanager import ModelType, cli
from gptmanager.bench import environment_main
from gptmanager.bench.roofline import Ceilings
from gptmanager.callbacks import PrometheusSink, broadcast
from gptmanager.decoding.guided.guided import GuidedDecoding
from gptmanager.environment.legible_json import legible
from gptmanager.errors import ConfigError
from gptmanager.models.hf.library import load_transformers_library
from gptmanager.server.extras import load_extra


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
        (["torch>=2", 'numpy[x]<9,>=1; extra == "a"'], {"a": "installed"}),
        (
            ['numpy>=2000; extra == "e"'],
            {"e": f"lacks numpy>=2000 ({version('numpy')} is installed)"},
        ),
        (['no-such-thing>=1; extra == "b"', 'numpy; extra == "b"'], {"b": "lacks no-such-thing"}),
        (['no-such; extra == "d"', 'no-such[x]>=1; extra == "d"'], {"d": "lacks no-such"}),
        (['none-such; python_version < "3" and extra == "c"'], {}),
    ],
)
def test_extras_are_installed_or_lack_packages(monkeypatch, lines, extras):
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    assert environment_main._requirements() == {"requirements": "met", "extras": extras}


def test_requirements_of_the_library_that_are_not_met(monkeypatch):
    lines = ["torch>=2", "none-such>=1", "numpy>=1999.5", 'rich>=13; extra == "a"']
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    unmet = f"lacks none-such, numpy>=1999.5 ({version('numpy')} is installed)"
    assert environment_main._requirements() == {"requirements": unmet, "extras": {"a": "installed"}}


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda: load_extra("server", "none"), "gptmanager serve needs httptools>=.*, uvicorn>="),
        (lambda: load_extra("triton", "none"), "gptmanager serve needs .*, grpcio>="),
        (load_transformers_library, "model_backend = 'transformers' needs transformers>="),
        (lambda: GuidedDecoding(None), "guided decoding needs llguidance>="),
        (lambda: broadcast(transport="mpi"), "broadcast.transport='mpi'. needs mpi4py>="),
        (lambda: PrometheusSink(model_name="m"), "PrometheusSink needs prometheus-client>="),
    ],
)
def test_a_package_that_is_too_old_is_named_with_the_command_that_upgrades_it(
    monkeypatch, use, text
):
    monkeypatch.setattr(metadata, "version", lambda name: "0.1.0")
    with pytest.raises(ConfigError, match=rf"{text}.* \(0.1.0 is installed\).*: pip install '"):
        use()


@pytest.mark.parametrize(
    ("package", "use", "text"),
    [
        ("uvicorn", lambda: load_extra("server", "uvicorn"), "gptmanager serve needs uvicorn"),
        ("grpc", lambda: load_extra("triton", "grpc"), "gptmanager serve needs grpc"),
        ("transformers", load_transformers_library, "model_backend = .* needs transformers"),
        ("llguidance", lambda: GuidedDecoding(None), "guided decoding needs llguidance"),
        (
            "prometheus_client",
            lambda: PrometheusSink(model_name="m"),
            "Prom.* needs prometheus_client",
        ),
    ],
)
def test_a_package_that_is_missing_is_named_with_the_command_that_installs_it(
    monkeypatch, package, use, text
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"^{text}.*: pip install '"):
        use()


def test_what_reports_may_hold_is_json():
    """Also what is of no type of JSON, keys and texts that are not UTF-8, and what holds these."""
    report = {Path("a"): Ceilings(1.0, 2.0, "\udc80"), "c": (ModelType.V1, {1: None})}
    fields = {"copy_bytes_per_s": 1.0, "matmul_flops_per_s": 2.0, "dtype": "\\udc80"}
    assert legible(report) == {"a": fields, "c": ["V1", {1: None}]}
    assert legible([Path("a")], lambda value: (value.name, 2)) == [["a", 2]]
