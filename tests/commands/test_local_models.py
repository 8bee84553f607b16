"""`gptmanager models`, and `--model NAME`: what is on this machine, found without a download."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gptmanager import GptManager, ModelType, cli
from gptmanager.environment.machine.local_models import download_hint, find_model, local_models
from gptmanager.errors import ConfigError
from gptmanager.testing import RecordingCallbacks


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub with a folder, GGUF files, split models, and a broken repository."""
    cache = tmp_path / "hub"
    for name, files in {
        "org--folder": ["config.json", "model.safetensors"],
        "org--quantized": ["Some.Q4_K_M.gguf"],
        "org--several": ["a-Q4_0.gguf", "a-Q8_0.gguf"],
        "org--split": [f"b-0000{number}-of-00003.gguf" for number in (1, 2, 3)],
        "org--two": [f"{it}-0000{n}-of-00002.gguf" for it in ("c-Q4_0", "c-Q8_0") for n in (1, 2)],
    }.items():
        folder = cache / f"models--{name}"
        (folder / "snapshots" / "abc").mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("abc")
        for file in files:
            (folder / "snapshots" / "abc" / file).write_text("12345")
    (cache / "models--org--broken" / "snapshots").mkdir(parents=True)
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    return cache


def test_models_of_the_checkout_and_the_cache_are_found(cache: Path) -> None:
    found = {model.name: model for model in local_models()}
    snapshots = "models--org--several/snapshots/abc"

    assert found["tiny_llama"].origin == "example"
    assert {name for name in found if name.startswith("org/")} == {
        "org/folder",
        "org/quantized",
        "org/several/a-Q4_0",
        "org/several/a-Q8_0",
        "org/split",
        "org/two/c-Q4_0",
        "org/two/c-Q8_0",
    }
    assert found["org/folder"].num_bytes == found["org/quantized"].num_bytes == 5
    assert find_model("ORG/fold") == found["org/folder"].path
    assert find_model("org/several/a-q8") == cache / snapshots / "a-Q8_0.gguf"
    first = find_model("org/split")
    assert first is not None and first.name == "b-00001-of-00003.gguf"
    assert found["org/split"].num_bytes == 15 and found["org/two/c-Q8_0"].num_bytes == 10
    assert find_model("org/") is None  # several
    assert find_model("org/broken") is None


def test_only_files_that_loading_reads_are_counted(cache: Path) -> None:
    def sizes() -> dict[str, int]:
        return {it.name: it.num_bytes for it in local_models() if it.name.startswith("org/f")}

    folder = cache / "models--org--folder" / "snapshots" / "abc"
    (folder / "model.Q4_0.gguf").write_text("123")
    (folder / "consolidated.safetensors").write_text("1234567")
    assert sizes() == {"org/folder": 5}
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    assert sizes() == {"org/folder": 3}  # the GGUF file: without an index, there is no checkpoint
    weight_map = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(weight_map))
    assert sizes() == {"org/folder": 5}
    for odd in ('{"weight_map": 5}', '{"weight_map": {"a": 5}}', "[", "[]", "{}"):
        (folder / "model.safetensors.index.json").write_text(odd)
        assert sizes() == {"org/folder": 0}


def test_models_are_found_without_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert find_model("tiny_llama") is not None


def test_models_of_packages_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "llm_x-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-x\nVersion: 1.2\n")
    files = ["My-Model.Q4_0.gguf", "Mine-00001-of-00002.gguf", "Mine-00002-of-00002.gguf"]
    files.append("__init__.py")
    (info / "RECORD").write_text("".join(f"llm_x/{file},,\n" for file in files))
    (tmp_path / "llm_x").mkdir()
    for file in files:  # Python 3.12 leaves out files that do not exist
        (tmp_path / "llm_x" / file).touch()
    other = tmp_path / "llm_y-1.0.dist-info"
    other.mkdir()
    (other / "RECORD").write_text("llm_y/__init__.py,,\n")  # and no METADATA: it is not read
    monkeypatch.syspath_prepend(tmp_path)
    (model,) = (model for model in local_models() if model.name.startswith("My-"))

    assert model.origin == "package llm-x 1.2"
    assert model.path == tmp_path / "llm_x" / "My-Model.Q4_0.gguf"
    assert find_model("my-model") == model.path
    assert find_model("mine") == tmp_path / "llm_x" / "Mine-00001-of-00002.gguf"


def test_the_command_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["models"]) == 0
    text = capsys.readouterr().out
    assert "org/quantized" in text and "hub cache" in text
    head, *lines = text.splitlines()
    assert {line[head.index("path")] for line in lines} == {"/"}

    assert cli.main(["models", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["models"]
    assert {"name", "origin", "path", "bytes"} == listed[0].keys()


def test_a_name_is_accepted_like_a_path(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = cli.main(["convert", "tiny_llama", str(tmp_path / "copy")])
    assert code == 0 and (tmp_path / "copy" / "config.json").is_file()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nowhere", "or a name that `gptmanager models` lists, got 'nowhere'\n"),
        ("org/lost", "download it with `hf download org/lost`\n"),
    ],
)
def test_an_error_of_a_missing_model_says_what_to_do(
    name: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["run", "--model", name, "--prompt", "x"])
    assert capsys.readouterr().err.endswith(told)


def test_a_manager_takes_the_path_of_a_name() -> None:
    path = find_model("tiny_llama")
    with pytest.raises(ConfigError, match=f"the model of this name is '{path}': pass this path"):
        GptManager(
            "tiny_llama", ModelType.INFLIGHT_FUSED_BATCHING, **RecordingCallbacks().keywords()
        )


@pytest.mark.parametrize("name", ["x", "/a/b", "../b", "a/b/c", "a/b;rm", "~/b", "a/$(x)", "a/"])
def test_only_ids_of_the_hub_are_put_into_a_command(name: str) -> None:
    assert download_hint(name) is None
