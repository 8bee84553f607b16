"""`bench --peer llama-cpp`: files that are the model, programs that stand for llama.cpp's, and what
a report says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CONFIGS, PagedDriver, random_model
from gguf_files import model_metadata, model_tensors
from gguf_files import write_gguf as write_tensors
from text_checkpoint import save_text_checkpoint

from gptmanager import OptionalParams, ParallelConfig, cli
from gptmanager.bench import peer_throughput
from gptmanager.bench.load import SMALL_LLAMA, Load, random_llama
from gptmanager.bench.peer_throughput import BenchOptions, bench
from gptmanager.bench.peers import llama_cpp_peer, own_script
from gptmanager.bench.peers.gguf_writer import write_gguf
from gptmanager.callbacks import load_tokenizer
from gptmanager.errors import ConfigError, GptManagerError
from gptmanager.models import load_model
from gptmanager.models.checkpoint_parts import open_tensors, read_config
from gptmanager.terminal.options import manager_options

TINY = {
    **SMALL_LLAMA,
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ECHO = "import json, sys; print(json.dumps({'perplexity': json.load(sys.stdin)['context']}))"
QWEN = {**TINY, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
# each program notes its arguments
PROGRAMS = {
    "llama-quantize": "import shutil; shutil.copy(sys.argv[1], sys.argv[2])",
    "llama-bench": """
print('{"n_prompt": 512, "n_gen": 0, "avg_ts": 100.0}')
print('{"n_prompt": 0, "n_gen": 128, "avg_ts": 10.0}')
""",
    "llama-batched-bench": """
lost = pathlib.Path(__file__).with_name("lost")
print("a log", file=sys.stderr)
if lost.exists():
    print('{"t_pp": 1.0, "t_tg": 3.0}', file=sys.stderr)
lost.touch()
""",
    "llama-perplexity": """
print("[1]5.1,[2]6.2,\\nFinal estimate: PPL = 6.2000 +/- 0.1", file=sys.stderr)
""",
}


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    notes = f"open({str(tmp_path / 'notes')!r}, 'a').write(json.dumps(sys.argv) + '\\n')"
    for name, body in PROGRAMS.items():
        text = f"#!{sys.executable}\nimport json, pathlib, sys\n{notes}\n{body}\n"
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, Any]]:
    """Runs of this library, which answer at once."""
    runs: list[tuple[Path, Any]] = []

    def run_later(path: Path, params: Any, threads: int) -> Any:
        def run() -> dict[str, float]:
            runs.append((path, params))
            return {"prompt": 300.0 + len(runs), "alone": 20.0, "batch": 576.0}

        return run

    monkeypatch.setattr(llama_cpp_peer, "_ours", run_later)
    return runs


def source(config: dict[str, Any] = TINY) -> Any:
    return config, random_llama(config, 0)


@pytest.mark.parametrize("config", [TINY, QWEN], ids=["llama", "qwen2"])
def test_a_written_file_is_the_model(tmp_path: Path, config: dict[str, Any]) -> None:
    tensors = random_llama(config, 0)
    tokens = [f"Ġ{index}" for index in range(96)]
    keys = {"model": "gpt2", "pre": "qwen2", "tokens": tokens, "merges": []}
    tokenizer = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    write_gguf(tmp_path / "a.gguf", config, tensors, tokenizer)

    assert load_tokenizer(tmp_path / "a.gguf").token_to_id("Ġ7") == 7
    read = read_config(tmp_path / "a.gguf")
    wanted = {k: v for k, v in config.items() if isinstance(v, (int, float)) and k in read}
    assert {key: read[key] for key in wanted} == {k: pytest.approx(v) for k, v in wanted.items()}
    found = open_tensors(tmp_path / "a.gguf")
    for name, tensor in tensors.items():
        stored = torch.cat([piece.clone() for _, piece in found.pieces(name, 1 << 40)])
        assert torch.equal(stored.bfloat16(), tensor.bfloat16()), name
    assert load_model(tmp_path / "a.gguf").spec.vocab_size == 96


def test_another_family_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="type gemma cannot be written as GGUF; pass a GGUF file"):
        write_gguf(tmp_path / "a.gguf", {**TINY, "model_type": "gemma"}, {})


def test_engines_alternate_and_the_best_counts(
    programs: Path, ours: list[Any], tmp_path: Path
) -> None:
    started: list[str] = []
    (tmp_path / "files").mkdir()
    report = llama_cpp_peer.compare(
        *(source(), programs, tmp_path / "files"),
        threads=2,
        rounds=2,
        on_start=lambda name, number, count: started.append(name),
    )

    assert started[:7] == started[7:] == list(report["engines"])
    assert started[:3] == ["gptmanager bfloat16", "gptmanager int8", "gptmanager int4"]
    assert started[3:7] == [f"llama.cpp {name}" for name in llama_cpp_peer.TYPES]
    assert report["engines"]["gptmanager int4"]["prompt"] == 306  # from the second round
    assert report["engines"]["llama.cpp Q4_0"] == {"prompt": 100.0, "alone": 10.0, "batch": 192.0}
    assert report["ratios"]["int4 to our int8"] == {"prompt": 1.0, "alone": 1.0, "batch": 1.0}
    assert report["ratios"]["int8 to Q8_0"] == {"prompt": 3.05, "alone": 2.0, "batch": 3.0}
    assert [params.get("weights_dtype") for _, params in ours[:3]] == [None, "int8", "int4"]
    calls = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    quantized = [call[3] for call in calls if call[0].endswith("llama-quantize")]
    assert quantized == ["Q8_0", "Q4_0", "Q4_K_M"]
    assert all(call[3:5] == ["-t", "2"] for call in calls if call[0].endswith("-bench"))


def test_without_the_programs_the_peer_is_skipped_with_a_sentence(
    ours: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(bench.__globals__["SHAPES"], "small", TINY)
    report = bench(BenchOptions(peer="llama-cpp", repeats=1))
    assert list(report["engines"]) == [f"gptmanager {n}" for n in ("bfloat16", "int8", "int4")]
    assert report["notes"][0].startswith("llama.cpp is skipped: ")
    assert report["notes"][0].endswith(" as --peer-binary")
    assert report["processor"] and "ratios" not in report


def test_a_folder_without_the_programs_is_refused_before_anything_runs(
    ours: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(bench.__globals__["SHAPES"], "small", TINY)
    options = BenchOptions(peer="llama-cpp", peer_binary=tmp_path, repeats=1)
    with pytest.raises(ConfigError, match=f"--peer-binary {tmp_path}: .* no llama-bench, "):
        bench(options)
    assert not ours


def test_a_gguf_file_is_run_as_it_is(programs: Path, ours: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    write_gguf(file, *source())
    report = llama_cpp_peer.compare(file, programs, tmp_path, threads=1, rounds=1)

    assert list(report["engines"]) == ["gptmanager as the file", "llama.cpp as the file"]
    assert ours == [(file, {})]


def test_a_folder_of_a_split_file_is_its_first_part(
    programs: Path, ours: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    model = random_model({**CONFIGS["llama"], "num_hidden_layers": 1})
    tensors = model_tensors("llama", model.config.to_dict(), model.state_dict())
    for number, names in enumerate((list(tensors)[::2], list(tensors)[1::2])):
        metadata = {"split.no": number, "split.count": 2}
        if number == 0:
            metadata |= model_metadata("llama", model.config.to_dict())
        own = {name: tensors[name] for name in names}
        write_tensors(folder / f"m-{number + 1:05}-of-00002.gguf", metadata, own)
    listed = Path.glob
    monkeypatch.setattr(Path, "glob", lambda *given: sorted(listed(*given), reverse=True))
    llama_cpp_peer.compare(folder, programs, tmp_path, threads=1, rounds=1)
    assert ours == [(folder / "m-00001-of-00002.gguf", {})]


def test_options_that_would_be_ignored_are_refused() -> None:
    arguments = ["bench", "--peer", "llama-cpp"]
    params = manager_options(cli.command_parser().parse_args(arguments)).params
    assert peer_throughput._unused_by_llama_cpp(BenchOptions(params=params)) == []
    params.weights_dtype = "int4"
    given = BenchOptions(peer="llama-cpp", params=params, load=Load(5))
    with pytest.raises(ConfigError, match="leave out the options that set weights_dtype, load"):
        bench(given)


def test_a_program_that_fails_is_quoted(programs: Path, ours: list[Any], tmp_path: Path) -> None:
    (programs / "llama-bench").write_text("#!/bin/sh\necho no such model >&2\nexit 3\n")
    with pytest.raises(GptManagerError, match="llama-bench failed with exit status 3: no such"):
        llama_cpp_peer.compare(source(), programs, tmp_path, threads=1, rounds=1)
    (programs / "llama-bench").write_text(f"#!{sys.executable}\nprint('{{')\n")
    with pytest.raises(GptManagerError, match="figures cannot be read"):
        llama_cpp_peer.compare(source(), programs, tmp_path, threads=1, rounds=1)


def test_options_need_the_peer_and_a_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--peer-binary needs --peer llama-cpp"):
        bench(BenchOptions(peer_binary=tmp_path))
    with pytest.raises(ConfigError, match="--text needs --peer llama-cpp"):
        bench(BenchOptions(text=tmp_path))
    with pytest.raises(ConfigError, match="--text needs a GGUF file as --model: random weights"):
        bench(BenchOptions(peer="llama-cpp", text=tmp_path))
    with pytest.raises(ConfigError, match="--adapters is not measured with --peer llama-cpp"):
        bench(BenchOptions(peer="llama-cpp", adapters=2))
    ranks = OptionalParams(parallel_config=ParallelConfig(tensor_parallel_size=2))
    with pytest.raises(ConfigError, match="--peer needs a single rank: run without parallelism"):
        bench(BenchOptions(peer="llama-cpp", params=ranks))


def test_both_perplexities_of_a_text_are_reported(
    programs: Path, ours: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, text = tmp_path / "a.gguf", tmp_path / "text"
    write_gguf(file, *source())
    text.write_text("some words")
    monkeypatch.setattr(llama_cpp_peer, "_OWN_SCRIPT", (sys.executable, "-c", ECHO))
    given: Any = {"threads": 1, "rounds": 1, "text": text}
    report = llama_cpp_peer.compare(file, programs, tmp_path, **given)

    own = "gptmanager as the file"
    assert report["perplexity"] == {own: 512.0, "llama.cpp as the file": 6.2}
    calls = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    assert calls[-1][-6:] == ["-c", "512", "--chunks", "12", "-t", "1"]
    (programs / "llama-perplexity").write_text("#!/bin/sh\necho too few tokens\n")
    with pytest.raises(GptManagerError, match="llama-perplexity printed no estimate: .*too few"):
        llama_cpp_peer.compare(file, programs, tmp_path, **given)
    (programs / "llama-perplexity").unlink()
    with pytest.raises(ConfigError, match="the folder has no llama-perplexity"):
        llama_cpp_peer.compare(file, programs, tmp_path, **given)
    report = llama_cpp_peer.compare(file, None, tmp_path, **given)
    assert report["perplexity"] == {own: 512.0}


@pytest.mark.parametrize("first", [False, True])
def test_a_perplexity_counts_the_second_half_of_each_chunk(tmp_path: Path, first: bool) -> None:
    folder = save_text_checkpoint(tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    if first:
        tokenizer["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "x", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [],
            "special_tokens": {"x": {"id": "x", "ids": [7], "tokens": ["x"]}},
        }
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    text = tmp_path / "text"
    text.write_text("The weather is fine, and so are we. " * 3)
    ids = load_tokenizer(folder).encode(text.read_text()).ids
    given = {"model": str(folder), "params": {}, "text": str(text), "context": 16, "chunks": 2}

    driver = PagedDriver(load_model(folder), 2)
    losses = []
    for slot in range(2):
        chunk = ids[16 * slot : 16 * slot + 16]
        chunk[0] = 7 if first else chunk[0]
        logits = driver.forward([(slot, chunk)])
        losses.append(torch.nn.functional.cross_entropy(logits[8:-1], torch.tensor(chunk[9:])))
    expected = torch.stack(losses).mean().exp().item()
    assert own_script.perplexity(given)["perplexity"] == pytest.approx(expected, rel=1e-4)
    with pytest.raises(ConfigError, match=r"text has \d+ tokens: at least 4000 are needed"):
        own_script.perplexity({**given, "context": 4000})


@pytest.mark.slow
def test_this_library_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp_peer, "PROMPT", 20)
    monkeypatch.setattr(llama_cpp_peer, "ALONE", 3)
    monkeypatch.setattr(llama_cpp_peer, "BATCH", (2, 4, 2))
    write_gguf(tmp_path / "a.gguf", *source())
    found = llama_cpp_peer._ours(tmp_path / "a.gguf", {"weights_dtype": "int4"}, 1)()
    assert found.keys() == {"prompt", "alone", "batch"} and min(found.values()) > 0
