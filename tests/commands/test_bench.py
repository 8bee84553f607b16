"""`gptmanager bench`: the load, the report, and the peer on the same weights."""

from __future__ import annotations

import json

import pytest
import torch
from bench_load import LOAD, TINY
from checkpoints import CONFIGS, checkpoint, random_model
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from gptmanager import OptionalParams, SchedulerConfig, cli
from gptmanager.bench import (
    SHAPES,
    BenchOptions,
    Load,
    TransformersPeer,
    bench,
    random_llama,
    run_manager,
)
from gptmanager.bench.adapter_load import adapter_load
from gptmanager.bench.load import LLAMA_8B, read_config
from gptmanager.errors import ConfigError, GptManagerError

TINY_QWEN2 = {**TINY, "model_type": "qwen2", "tie_word_embeddings": True, "rope_theta": 1e6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny checkpoint in bfloat16 whose end token would end most requests early."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model = random_model(CONFIGS["llama"]).to(torch.bfloat16)
    config, state = checkpoint(model)
    config |= {"eos_token_id": list(range(90)), "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_the_load_is_drawn_from_the_ranges():
    load = Load(num_requests=200, prompt_len=(3, 5), output_len=(7, 8))
    requests = load.requests(50)
    assert len(requests) == 200
    assert {len(prompt) for prompt, _ in requests} == {3, 4, 5}
    assert {new_tokens for _, new_tokens in requests} == {7, 8}
    assert {token for prompt, _ in requests for token in prompt} == set(range(50))
    assert requests == load.requests(50)


def test_the_report(folder):
    report = bench(BenchOptions(folder, LOAD, repeats=2))

    requests = LOAD.requests(96)
    assert report["requests"] == 5
    assert (report["prompt_len"], report["output_len"]) == ("3:20", "2:9")
    assert report["prompt_tokens"] == sum(len(prompt) for prompt, _ in requests)
    assert report["output_tokens"] == sum(new_tokens for _, new_tokens in requests)
    assert report["model"] == {"model_type": "llama", "hidden_size": 32, "vocab_size": 96}
    assert report["threads"] == torch.get_num_threads()
    assert report.keys() >= {"date", "machine", "versions", "omp_wait_policy"}
    (ours,) = report["engines"].values()
    assert ours["output_tokens_per_second"] == max(ours["of_every_run"]) > 0
    assert len(ours["of_every_run"]) == 2
    for name in ("time_to_first_token_ms", "time_per_output_token_ms", "queue_ms"):
        assert 0 <= ours[name]["p50"] <= ours[name]["p90"] <= ours[name]["p99"]
    assert "same_outputs" not in report


def test_adapters_are_a_run_of_their_own(folder):
    report = bench(BenchOptions(folder, LOAD, repeats=1, adapters=2, adapter_size=4))
    engines = report["engines"]
    assert [*engines] == ["gptmanager", "with adapters", "one with an adapter"]
    assert report["adapters"] == "2 of rank 4"
    ours = engines["gptmanager"]["output_tokens_per_second"]
    for name in ("with adapters", "one with an adapter"):
        ratio = report[f"{name.replace(' ', '_')}_to_without"]
        assert ratio == pytest.approx(
            engines[name]["output_tokens_per_second"] / ours, rel=0.01, abs=0.01
        )


def test_requests_of_the_load_have_the_adapters_in_turn(folder):
    config = read_config(folder)
    load = adapter_load(config, 2, 4, 5, seed=1)
    assert load.tasks == [0, 1, 0, 1, 0]
    assert load.only_first().tasks == [0, None, None, None, None]
    requests, params = LOAD.requests(96), OptionalParams()
    outputs = [
        run_manager(folder, requests, params, SchedulerConfig(), adapters=it).outputs
        for it in (None, load._replace(tasks=[None] * 5), load, load.only_first())
    ]
    assert outputs[0] == outputs[1] != outputs[2]
    assert outputs[3] == (outputs[2][0], *outputs[0][1:])


def test_the_peer_runs_the_same(folder):
    report = bench(BenchOptions(folder, LOAD, repeats=2, peer="transformers"))
    ours, theirs = report["engines"]["gptmanager"], report["engines"]["transformers"]
    assert len(theirs["of_every_run"]) == 2
    assert report["ratio_to_transformers"] == pytest.approx(
        ours["output_tokens_per_second"] / theirs["output_tokens_per_second"], rel=0.01, abs=0.01
    )
    assert report["output_tokens"] == sum(new_tokens for _, new_tokens in LOAD.requests(96))


@pytest.mark.parametrize("config", [TINY, TINY_QWEN2], ids=["llama", "qwen2"])
def test_the_peer_generates_the_same_from_random_weights(config):
    source = (config, random_llama(config, seed=3))
    requests = Load(8, (3, 40), (2, 20)).requests(TINY["vocab_size"])
    ours = run_manager(source, requests, OptionalParams(), SchedulerConfig())
    peer = TransformersPeer(source, OptionalParams())
    for _ in range(2):  # it is used again in each round
        theirs = peer.run(requests)
        assert theirs.outputs == ours.outputs
    assert [len(output) for output in ours.outputs] == [new_tokens for _, new_tokens in requests]
    assert theirs.tokens_per_second == sum(map(len, theirs.outputs)) / theirs.seconds


def test_random_weights_of_qwen2_have_biases():
    weights = random_llama(TINY_QWEN2, seed=3)
    biases = [name for name in weights if name.endswith(".bias")]
    assert len(biases) == 6 and all(0 < weights[name].std() < 0.1 for name in biases)
    assert "lm_head.weight" not in weights


def test_the_shape_of_qwen2_has_as_many_parameters_as_the_published_model():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES["qwen2-0.5b"]))
    assert sum(parameter.numel() for parameter in model.parameters()) == 494_032_768


def test_a_shape_is_of_random_weights_alone(folder):
    with pytest.raises(ConfigError, match="pass either --shape or --model"):
        bench(BenchOptions(folder, shape="small"))
    with pytest.raises(ConfigError, match="--shape must be one of small, qwen2-0.5b, got 'large'"):
        bench(BenchOptions(shape="large"))


def test_the_report_names_the_dtype(folder, monkeypatch):
    assert bench(BenchOptions(folder, LOAD, repeats=1))["dtype"] == "bfloat16"
    monkeypatch.setitem(SHAPES, "small", TINY)
    assert bench(BenchOptions(load=LOAD, repeats=1))["dtype"] == "float32"


def test_a_failed_peer_is_reported():
    source = (TINY, random_llama(TINY, seed=3))
    peer = TransformersPeer(source, OptionalParams())
    with pytest.raises(GptManagerError, match="transformers failed: .*"):
        peer.run([([1, 2, 5000], 4)])  # beyond its vocabulary


def test_a_load_that_does_not_fit_the_model(folder):
    for load in (Load(2, (158, 158), (9, 9)), Load(2, (170, 170), (1, 1))):
        with pytest.raises(ConfigError, match="the load does not fit the model: "):
            bench(BenchOptions(folder, load, repeats=1))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model_type": "llama"}'])
def test_a_config_that_cannot_be_read(tmp_path, text):
    if text:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match="config.json"):
        bench(BenchOptions(tmp_path, LOAD))


def test_the_command_prints_a_table(folder, capsys):
    arguments = ["bench", "--model", str(folder), "--num-requests", "3", "--repeats", "2"]
    arguments += ["--prompt-len", "4:8", "--output-len", "3", "--peer", "transformers"]
    assert cli.main(arguments) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert "output len                    3:3" in lines
    assert "output tokens                             9" in lines
    assert "  gptmanager" in lines and "  transformers" in lines
    assert [line.split()[0] for line in err.splitlines()] == ["gptmanager", "transformers"] * 2


def test_the_command_prints_json(capsys):
    arguments = ["bench", "--num-requests", "2", "--repeats", "1", "--json"]
    assert cli.main([*arguments, "--prompt-len", "4", "--output-len", "3"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"]["hidden_size"] == 256 and report["output_tokens"] == 6


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--shape", "large"], "argument --shape: invalid choice: 'large'"),
        (["--model", ".", "--shape", "small"], "--shape: not allowed with argument --model"),
        (
            ["--prompt-len", "5:x"],
            "argument --prompt-len: must be LOW:HIGH, or one number, got '5:x'",
        ),
        (["--prompt-len", "0:3"], "argument --prompt-len: must be a positive integer, got '0'"),
        (
            ["--output-len", "9:3"],
            "argument --output-len: must be LOW:HIGH with LOW at most HIGH, got '9:3'",
        ),
        (["--output-len", ""], "argument --output-len: must be LOW:HIGH, or one number, got ''"),
        (["--output-len", "1:2:3"], "must be LOW:HIGH, or one number, got '1:2:3'"),
        (["--repeats", "0"], "argument --repeats: must be a positive integer, got '0'"),
        (["--num-requests", "-1"], "argument --num-requests: must be a positive integer, got '-1'"),
        (["--peer", "vllm"], "argument --peer: invalid choice: 'vllm' (choose from"),
    ],
)
def test_an_error_names_the_option(capsys, options, error):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["bench", *options])
    assert exit_.value.code == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize("config", [*SHAPES.values(), LLAMA_8B])
def test_models_of_the_benchmarks_have_heads_of_one_width(config):
    heads = config["num_attention_heads"]
    assert config["hidden_size"] % heads == heads % config["num_key_value_heads"] == 0
