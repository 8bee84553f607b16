"""The command line: `gptmanager run` from requests to results, and what it exits with."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import json
import logging
import os
import pty
import re
import signal
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from child import Child
from screen import Screen
from text_checkpoint import END_ID, byte_tokenizer, save_text_checkpoint

from gptmanager import __version__, cli
from gptmanager.callbacks import generate
from gptmanager.callbacks.text.text_encoder import TextEncoder
from gptmanager.commands.latencies import latencies
from gptmanager.errors import ManagerDeadError, RecordingError
from gptmanager.recorder.recording_file import read_recording
from gptmanager.replay import replay

TINY_LLAMA = Path(__file__).resolve().parents[2] / "examples" / "tiny_llama"
SCHEMA = json.loads(files("gptmanager").joinpath("statistics.schema.json").read_text())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_text_checkpoint(tmp_path_factory.mktemp("checkpoints") / "text")


def write_requests(path, *requests):
    lines = (line if isinstance(line, str) else json.dumps(line) for line in requests)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return str(path)


def read_lines(path):
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


UNWRITABLE = "what the command prints cannot be written to the standard output"


class Outcome:
    def __init__(self, code, capsys):
        self.code = code
        self.out, self.err = capsys.readouterr()

    @property
    def summary(self):
        return json.loads(self.out)


@pytest.fixture
def call(capsys):
    def call(*arguments):
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as exit_:  # argparse
            code = exit_.code
        return Outcome(code, capsys)

    return call


@pytest.fixture
def run(call, model, tmp_path):
    def run(*requests, options=()):
        path = write_requests(tmp_path / "requests.jsonl", *requests)
        return call("run", "--model", model, "--requests", path, *options)

    return run


def test_a_device_that_there_is_not_is_refused(run):
    outcome = run({"prompt": "Once"}, options=["--device", "tpu"])
    assert outcome.code == 2
    assert "gptmanager: --device = 'tpu' must be 'cpu', 'cuda'" in outcome.err


# Running a file ----------------------------------------------------------------------------------


def test_every_line_has_its_result_in_the_file(run, model, tmp_path):
    # Given texts and token ids, streaming and not, that share a batch
    requests = [
        {"request_id": 40, "prompt": "Once", "max_new_tokens": 9},
        {"input_ids": [80, 81, 82], "max_new_tokens": 4, "streaming": False},
        {"request_id": 7, "prompt": "upon a time", "max_new_tokens": 6, "streaming": False},
        {"prompt": "é 日本", "top_k": 5, "random_seed": 3},
    ]
    out = tmp_path / "new" / "folder" / "out.jsonl"

    # When they are run
    outcome = run(*requests, options=["--output", out, "--max-batch-size", 3])

    # Then each has what it would have alone, in the order of the lines
    assert outcome.code == 0
    results = read_lines(out)
    assert [(r["line"], r["request_id"]) for r in results] == [(1, 40), (2, 2), (3, 7), (4, 4)]
    assert [r.get("prompt") for r in results] == ["Once", None, "upon a time", "é 日本"]
    assert results[0]["text"] == generate(model, "Once", 9)
    assert results[1]["output_ids"] == generate(model, [80, 81, 82], 4)
    assert results[2]["text"] == generate(model, "upon a time", 6)
    assert len(results[3]["output_ids"]) == 64  # the default
    for result in results:
        assert result["finish_reason"] == "LENGTH"
        assert result["text"] == byte_tokenizer().decode(result["output_ids"])
        assert result["metrics"]["generated_tokens"] == len(result["output_ids"])
        assert isinstance(result["metrics"]["prompt_tokens"], int)


def test_wrong_lines_are_answered_and_the_others_run(run, tmp_path):
    out = tmp_path / "out.jsonl"
    outcome = run(
        {"prompt": "Once", "max_new_tokens": 2},
        '{"prompt": "no end',
        {"prompt": "Once", "max_token": 2},
        {"prompt": "Once", "temperature": -1},
        {"input_ids": [END_ID + 1]},
        {"request_id": 1, "prompt": "again"},
        "",
        {"prompt": "upon", "max_new_tokens": 3},
        options=["--output", out],
    )

    assert outcome.code == 1
    errors = {result["line"]: result.get("error", "") for result in read_lines(out)}
    assert list(errors) == [1, 2, 3, 4, 5, 6, 8]
    assert errors[1] == errors[8] == ""
    assert errors[2].startswith("InvalidRequestError: line 2: invalid JSON")
    assert errors[3] == "InvalidRequestError: line 3: unknown field 'max_token'"
    assert errors[4] == (
        "InvalidRequestError: Incorrect sampling config: temperature = -1 must be at least 0"
    )
    assert errors[5].startswith("InvalidRequestError: input_ids[0] = 257 is outside the vocabulary")
    assert errors[6] == "InvalidRequestError: line 6: request_id = 1 is already used in line 1"
    # and a person has seen each of them once
    for error in filter(None, errors.values()):
        assert outcome.err.count(error) == 1
    assert re.search(r"^requests +7$", outcome.out, re.MULTILINE)
    assert re.search(r"^failed +5$", outcome.out, re.MULTILINE)


def test_json_prints_the_summary_and_nothing_else(run):
    outcome = run({"prompt": "Once", "max_new_tokens": 2}, {"prompt": 5}, options=["--json"])
    assert outcome.code == 1
    assert outcome.summary["requests"] == 2 and outcome.summary["failed"] == 1
    told = "request 2: InvalidRequestError: line 2: prompt must be a string, got 5\n"
    assert outcome.err == told


def test_the_summary_is_what_the_files_say(run, tmp_path):
    out, stats = tmp_path / "out.jsonl", tmp_path / "new" / "stats.jsonl"
    requests = [{"prompt": "x" * (3 + i), "max_new_tokens": 4 + 3 * i} for i in range(5)]
    outcome = run(
        *requests,
        options=["--json", "--output", out, "--stats", stats, "--max-batch-size", 2],
    )

    # every record keeps the schema
    records = read_lines(stats)
    validator = jsonschema.Draft202012Validator(SCHEMA)
    for record in records:
        validator.validate(record)
    # and the summary can be had of the files by hand
    summary, results = outcome.summary, read_lines(out)
    assert outcome.code == summary["failed"] == 0
    assert summary["requests"] == len(results) == 5
    assert summary["prompt_tokens"] == 3 + 4 + 5 + 6 + 7
    assert summary["output_tokens"] == 4 + 7 + 10 + 13 + 16
    assert summary["output_tokens"] == sum(len(result["output_ids"]) for result in results)
    rate = summary["output_tokens_per_second"]
    rounded = 0.0005 + 0.05 * summary["seconds"] / rate  # both are: to 1 ms, to 0.1 tokens/s
    assert summary["seconds"] == pytest.approx(50 / rate, abs=1.01 * rounded)
    sizes = [record["Scheduled Requests"] for record in records]
    assert sum(sizes) == 50 and max(sizes) == 2
    assert summary["mean_batch_size"] == round(sum(sizes) / len(sizes), 1)
    used = [record["Used KV cache blocks"] / record["Max KV cache blocks"] for record in records]
    assert summary["max_kv_cache_use"] == round(max(used), 4)
    metrics = [result["metrics"] for result in results]
    each = [
        1e3 * (m["last_token_s"] - m["first_token_s"]) / (m["generated_tokens"] - 1)
        for m in metrics
    ]
    assert summary["time_per_output_token_ms"]["p50"] == pytest.approx(np.median(each), abs=0.01)
    # who waits in the queue has to wait for the first token, too
    first, queue = summary["time_to_first_token_ms"], summary["queue_ms"]
    assert first["p99"] > queue["p99"] > 0
    assert first["p99"] > 1e3 * max(m["first_token_s"] for m in metrics)
    assert first["p50"] <= first["p90"] <= first["p99"] <= 1e3 * summary["seconds"]


def test_latencies_by_hand():
    metrics = [
        {"queue_s": 0.0, "first_token_s": 0.1, "last_token_s": 0.50006, "generated_tokens": 5},
        {"queue_s": 0.2, "first_token_s": 0.3, "last_token_s": 0.3, "generated_tokens": 1},
        {"queue_s": 0.0, "first_token_s": 0.2, "last_token_s": 0.8, "generated_tokens": 4},
        {
            "queue_s": np.nan,
            "first_token_s": np.nan,
            "last_token_s": np.nan,
            "generated_tokens": 0,
        },
    ]
    assert latencies(metrics, [0.0, 0.0, 1.0, 2.0]) == {
        "time_to_first_token_ms": {"p50": 300.0, "p90": 1020.0, "p99": 1182.0},
        "time_per_output_token_ms": {"p50": 150.01, "p90": 190.0, "p99": 199.0},
        "queue_ms": {"p50": 200.0, "p90": 840.0, "p99": 984.0},
    }
    assert latencies([], [])["queue_ms"] == {}


def test_a_second_run_writes_its_files_anew(run, tmp_path):
    options = ["--output", tmp_path / "out", "--stats", tmp_path / "stats"]
    for _ in range(2):
        assert run({"prompt": "Once", "max_new_tokens": 3}, options=options).code == 0
    assert len(read_lines(tmp_path / "out")) == 1
    assert len(read_lines(tmp_path / "stats")) == 3


def test_requests_from_the_standard_input(call, model, monkeypatch):
    text = io.BytesIO('{"prompt": "é", "max_new_tokens": 2}\n'.encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(text))
    outcome = call("run", "--model", model, "--requests", "-", "--json")
    assert outcome.code == 0
    assert outcome.summary["output_tokens"] == 2


def test_answers_of_a_piped_prompt_are_in_the_json(call, model, monkeypatch):
    lines = b'{"prompt": "ab", "max_new_tokens": 3}\n{"prompt": 5}\n'
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines)))
    outcome = call("run", "--model", model, "--requests", "-", "--json")
    assert outcome.code == 1 and outcome.summary["requests"] == 2
    first, second = outcome.summary["answers"]
    assert first["prompt"] == "ab" and len(first["output_ids"]) <= 3 and first["text"] is not None
    assert second["line"] == 2 and second["error"].startswith("InvalidRequestError")


def test_output_may_be_the_standard_output(run, tmp_path):
    outcome = run({"prompt": "ab", "max_new_tokens": 3}, {"prompt": "c"}, options=("--output", "-"))
    assert outcome.code == 0
    assert [json.loads(line)["line"] for line in outcome.out.splitlines()] == [1, 2]
    assert not Path("-").exists()
    refused = run({"prompt": "ab"}, options=("--output", "-", "--json"))
    assert refused.code == 2 and "--json and --output -" in refused.err


def test_a_prompt_prints_its_answer_alone(call, model):
    outcome = call("run", "--model", model, "--prompt", "ab", "--max-new-tokens", 3)
    as_json = call("run", "--model", model, "--prompt", "ab", "--max-new-tokens", 3, "--json")
    (answer,) = as_json.summary["answers"]
    assert outcome.code == 0 and outcome.out == answer["text"] + "\n"
    failed = call("run", "--model", model, "--prompt", "ab" * 5000)
    assert failed.code == 1 and failed.out == "" and "request 1: " in failed.err
    neither = call("run", "--model", model)
    assert neither.code == 2 and "one of the arguments --requests --prompt" in neither.err


def test_no_requests(run):
    outcome = run("")
    assert outcome.code == 0
    assert "requests.jsonl has no requests" in outcome.err
    assert re.search(r"^time to first token +not measured$", outcome.out, re.MULTILINE)


def test_stop_texts_and_the_checkpoints_end_token(run, model, tmp_path):
    out = tmp_path / "out.jsonl"
    whole = generate(model, [65], 30)
    tokenizer = byte_tokenizer()
    # the first byte that is a letter of its own and has not come before
    position = next(
        i for i, token in enumerate(whole) if i and token < 94 and token not in whole[:i]
    )
    stop = tokenizer.decode([whole[position]])
    request = {"input_ids": [65], "max_new_tokens": 30}
    outcome = run(
        {**request, "stop": "never"},
        {**request, "end_id": whole[position], "stop": []},
        request,
        options=["--output", out, "--stop", "never", "--stop", stop],
    )

    assert outcome.code == 0
    free, ended, stopped = read_lines(out)
    assert free["output_ids"] == whole
    assert ended["finish_reason"] == "END_ID" and ended["output_ids"] == whole[:position]
    assert stopped["finish_reason"] == "STOP_WORDS" and stopped["text"] == ended["text"]
    assert stopped["output_ids"] == whole[: position + 1]  # with the token that ends the text


def test_a_stop_text_ends_an_answer_however_it_is_split_into_tokens(call):
    """The model writes " day" as one token, and the tokens of "ay" are others."""
    prompt = ("--prompt", "Tom had a red ball. ", "--max-new-tokens", 6)
    outcome = call("run", "--model", TINY_LLAMA, *prompt, "--stop", "ay")
    assert outcome.out == "ext d\n"


def test_without_a_tokenizer_token_ids_run(call, tmp_path):
    model = save_text_checkpoint(tmp_path / "ids", with_tokenizer=False)
    requests = write_requests(
        tmp_path / "requests.jsonl", {"input_ids": [80, 81], "max_new_tokens": 3}, {"prompt": "a"}
    )
    out = tmp_path / "out.jsonl"
    outcome = call("run", "--model", model, "--requests", requests, "--output", out)

    assert outcome.code == 1
    good, bad = read_lines(out)
    assert good["output_ids"] == generate(model, [80, 81], 3) and "text" not in good
    assert "the model has no tokenizer" in bad["error"]
    assert f"{' '.join(map(str, good['output_ids']))}\n" in outcome.err


def test_the_log_says_which_requests_join_and_leave(run):
    outcome = run({"prompt": "Once", "max_new_tokens": 3}, {"request_id": 9, "prompt": "upon"})
    lines = [line.partition(" s  ")[2] for line in outcome.err.splitlines()[1:]]
    assert lines[:2] == ["request 1 joins: Once", "request 9 joins: upon"]
    assert lines[2].startswith("request 1 leaves after 3 tokens, LENGTH: ")
    assert lines[3].startswith("request 9 leaves after 64 tokens, LENGTH: ")


def test_a_recorded_run_can_be_replayed(run, tmp_path):
    path = tmp_path / "recording.jsonl"
    assert run({"prompt": "Once"}, {"prompt": "upon"}, options=["--record", path]).code == 0
    assert replay(read_recording(path)).divergence is None


def create_that_raises(**others):
    raise KeyError("of the scheduler")


def test_the_log_shows_where_a_scheduler_raised(call, caplog):
    caplog.set_level(logging.INFO)
    outcome = call("simulate", "--num-requests", 1, "--scheduler", "test_cli:create_that_raises")
    assert outcome.code == 2 and "KeyError: 'of the scheduler'" in outcome.err
    assert ", in create_that_raises\n" in caplog.text


@pytest.mark.parametrize(
    "options",
    [
        ["--policy", "max_utilization"],
        ["--policy", "static_batch", "--max-batch-size", "2"],
        ["--chunked-context", "--max-num-tokens", "16", "--tokens-per-block", "8"],
        ["--kv-cache-tokens", "128", "--tokens-per-block", "8", "--deterministic"],
        ["--pace", "0.001"],
    ],
)
def test_options_do_not_change_what_is_generated(run, tmp_path, options):
    requests = [{"prompt": "x" * (1 + 5 * i), "max_new_tokens": 8} for i in range(5)]
    outputs = []
    for extra in ([], options):
        out = tmp_path / "out.jsonl"
        assert run(*requests, options=["--output", out, *extra]).code == 0
        outputs.append([result["output_ids"] for result in read_lines(out)])
    assert outputs[0] == outputs[1]


def test_the_seed_is_that_of_requests_without_one(run, tmp_path):
    request = {"prompt": "Once", "temperature": 1.0}
    outputs = []
    for seed in (0, 0, 1):
        out = tmp_path / "out.jsonl"
        assert run(request, options=["--seed", seed, "--output", out]).code == 0
        outputs.append(read_lines(out)[0]["output_ids"])
    assert outputs[0] == outputs[1] != outputs[2]


def test_sampling_options_are_for_the_lines_without_the_field(run, tmp_path):
    fields = {"temperature": 2.0, "top_k": 40, "frequency_penalty": -1.5}
    own = {"prompt": "Once", "random_seed": 3}
    out = tmp_path / "out.jsonl"
    given = {**own, **fields}, own, {**own, "temperature": 0, "top_k": None}
    options = ["--temperature", "2", "--top-k", "40", "--frequency-penalty", "-1.5"]
    assert run(*given, options=[*options, "--output", out]).code == 0
    with_fields, with_options, greedy = (line["output_ids"] for line in read_lines(out))
    assert with_fields == with_options != greedy


# What is wrong with a call -----------------------------------------------------------------------


def test_without_a_command_the_help_is_shown(call):
    outcome = call()
    assert outcome.code == 2 and outcome.out == ""
    for command in ("run", "bench", "replay", "simulate", "picture"):
        assert re.search(rf"^ +{command} ", outcome.err, re.MULTILINE)


@pytest.mark.parametrize("fails", [False, True])
def test_garbage_is_not_searched_during_the_import_of_a_command(call, monkeypatch, fails):
    searched, frozen = [], gc.get_freeze_count()

    def imported(_):
        searched.append(gc.isenabled())
        if fails:
            raise OSError("torn")
        return lambda _: 0

    monkeypatch.setattr(cli, "named", imported)
    assert call("models").code == int(fails)
    assert searched == [False] and gc.isenabled() and gc.get_freeze_count() == frozen


def test_help_and_version(call):
    assert call("--version").out == f"gptmanager {__version__}\n"
    for command in ("run", "bench", "replay", "simulate", "picture"):
        outcome = call(command, "--help")
        assert outcome.code == 0 and f"gptmanager {command}" in outcome.out
        assert max(map(len, outcome.out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            ["--max-batch-size", "0"],
            "argument --max-batch-size: must be a positive integer, got '0'",
        ),
        (["--threads", "-2"], "argument --threads: must be a positive integer, got '-2'"),
        (
            ["--max-new-tokens", "x"],
            "argument --max-new-tokens: must be a positive integer, got 'x'",
        ),
        (["--pace", "-1"], "argument --pace: must be a time in seconds"),
        (["--pace", "nan"], "argument --pace: must be a time in seconds"),
        (["--policy", "fifo"], "argument --policy: invalid choice: 'fifo'"),
        (
            ["--model", "/nowhere"],
            "argument --model: must be a folder, a file, or a name",
        ),
        (["--seed", "-1"], "gptmanager: --seed = -1 must be"),
        (["--max-seq-len", "1"], "gptmanager: --max-seq-len = 1 must be"),
        (["--output", "/dev/null/out"], "gptmanager: --output /dev/null/out: "),
        (["--stats", "/dev/null/out"], "gptmanager: --stats /dev/null/out: "),
    ],
)
def test_an_error_names_the_option(run, options, error):
    outcome = run({"prompt": "Once"}, options=options)
    assert outcome.code == 2
    assert error in outcome.err
    assert "Traceback" not in outcome.err and outcome.out == ""


@pytest.mark.parametrize(
    ("arguments", "prog"),
    [
        (["replay", "x.jsonl", "--nope"], "gptmanager replay"),
        (["bench", "--nope"], "gptmanager bench"),
        (["bench", "kernels", "--nope"], "gptmanager bench kernels"),
        (["--nope"], "gptmanager"),
    ],
)
def test_an_unknown_option_is_reported_by_its_command(call, arguments, prog):
    outcome = call(*arguments)
    assert outcome.code == 2
    assert outcome.err.splitlines()[0].startswith(f"usage: {prog} ")
    assert outcome.err.endswith(f"\n{prog}: error: unrecognized arguments: --nope\n")


@pytest.mark.parametrize(
    ("arguments", "end"),
    [
        (
            ["run", "--modle", "x"],
            "required: --model; unknown option --modle: did you mean --model?",
        ),
        (
            ["serve", "--modle=x"],
            "required: --model; unknown option --modle: did you mean --model?",
        ),
        (["env", "--jsn"], "unrecognized arguments: --jsn; did you mean --json?"),
        (["--hlp"], "unrecognized arguments: --hlp; did you mean --help?"),
        (
            ["serve", "--model", ".", "--max-num-seqs", "8", "--ctx-size", "9"],
            "--max-num-seqs: did you mean --max-batch-size?; --ctx-size: did you mean "
            "--kv-cache-tokens?",
        ),
        (["serve", "--model", ".", "--max_model_len=8"], "8; did you mean --max-seq-len?"),
        (["serve", "--model", ".", "-np", "8"], "-np 8; did you mean --max-batch-size?"),
        (["serve", "--model", ".", "--top-k", "1"], "; set a field of each request instead"),
        (["serve", "--model", ".", "--metrics"], "arguments: --metrics; leave it out"),
        (["serve", "--model", ".", "--keep", "4"], "arguments: --keep 4"),  # no abbreviation
        (["serve", "-hf", "a/b"], "argument 'f'; unknown option -hf: did you mean --model?"),
        (["serve", "a b"], "required: --model; did you mean --model 'a b'?"),
        (["run", "--max-batch=3"], "unknown option --max-batch: did you mean --max-batch-size?"),
        (["run", "--zzz"], "required: --model; unknown option --zzz"),
        (["rnu", "--model", "x"], "'env', 'journal')"),  # an option of a command, not of all
        (["--modle", "x"], "'env', 'journal'); unknown option --modle"),
        (["--model", "x"], "'env', 'journal'); --model must be after the name of its command"),
        (["--json", "env"], "--json must be after the name of the command: gptmanager env --json"),
        (["bench", "--json", "kernels"], "name of the command: gptmanager bench kernels --json"),
        (["bench", "--quick", "kernels"], "name of the command: gptmanager bench kernels --quick"),
        (["--jsn", "env", "--json"], "name of the command: gptmanager env --json --jsn"),
        (["run", "--", "--modle"], "required: --model"),
    ],
)
def test_the_error_of_a_misspelled_option_names_it_and_a_similar_one(call, arguments, end):
    outcome = call(*arguments)
    assert outcome.code == 2 and outcome.err.endswith(f"{end}\n")


STEERING = "x\x1b[31m\x07\u202e\udc80"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([STEERING], "invalid choice: "),
        (["replay", "x.jsonl", f"--{STEERING}"], "unrecognized arguments: --x�[31m��"),
        (["replay", STEERING], "x�[31m��"),
        (["replay", "x.jsonl", "--scheduler", f"{STEERING}:make"], "x.jsonl"),
        (["picture", STEERING, "--output", "y.html"], "x�[31m��"),
        (["simulate", "--policies", STEERING], "must be one of"),
        (["simulate", "--cost", STEERING], "--cost x�[31m��"),
        (["bench", "--model", STEERING], "must be a folder, a file, or a name"),
        (["bench", "e2e", "--device", "cpu", "--only", STEERING], "--only x�[31m��"),
        (["run", "--model", ".", "--requests", STEERING], "config.json"),
    ],
)
def test_what_arguments_hold_cannot_steer_the_terminal(call, arguments, told):
    outcome = call(*arguments)
    assert outcome.code == 2 and told in outcome.err
    assert all(line.isprintable() for line in outcome.err.splitlines())


def test_names_of_files_cannot_steer_the_terminal(call, model, tmp_path):
    requests = write_requests(tmp_path / "\x1b[31mred", "")
    outcome = call("run", "--model", model, "--requests", requests)
    assert outcome.code == 0 and "/�[31mred has no requests" in outcome.err
    assert all(line.isprintable() for line in outcome.err.splitlines())


def test_a_file_of_requests_that_is_not_there(call, model):
    outcome = call("run", "--model", model, "--requests", "nowhere.jsonl")
    assert outcome.code == 2
    assert outcome.err == "gptmanager: --requests nowhere.jsonl: No such file or directory\n"


def test_a_folder_without_a_checkpoint(call, tmp_path):
    requests = write_requests(tmp_path / "requests.jsonl", {"input_ids": [1]})
    outcome = call("run", "--model", tmp_path, "--requests", requests)
    assert outcome.code == 2 and "config.json" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("simulate --record LONG/x", "argument --record: must be in an existing folder, got"),
        ("serve --model . --adapter-dir LONG", "argument --adapter-dir: must be a folder, got"),
        ("run --model MODEL --requests LONG", "--requests"),
        ("run --model MODEL --prompt a --output LONG", "--output"),
        ("run --model MODEL --prompt a --record LONG", "cannot write the recording"),
        ("serve --model MODEL --port 0 --chat-template LONG", "--chat-template ="),
    ],
)
def test_a_path_that_is_too_long_is_an_error_of_its_option(call, model, arguments, told):
    long = "a" * 300
    outcome = call(*arguments.replace("LONG", long).replace("MODEL", str(model)).split())
    assert outcome.code == 2
    assert re.search(rf"{told} '?{long}", outcome.err), outcome.err


def test_a_path_in_a_loop_of_links_is_an_error_of_its_option(call, tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    outcome = call("picture", tmp_path / "a", "--output", tmp_path / "a.html")
    assert outcome.code == 2
    assert outcome.err == f"gptmanager: {tmp_path}/a: Too many levels of symbolic links\n"


def test_the_requests_are_not_overwritten(run, tmp_path):
    path = tmp_path / "requests.jsonl"
    outcome = run({"prompt": "Once"}, options=["--output", path])
    assert outcome.code == 2
    assert "must be different files" in outcome.err
    assert read_lines(path) == [{"prompt": "Once"}]


def test_steps_that_fail_end_their_requests(run, monkeypatch, tmp_path):
    def fail(*arguments):
        raise RuntimeError("boom")

    monkeypatch.setattr("gptmanager.executor.torch_executor.TorchExecutor.sample", fail)
    out = tmp_path / "out.jsonl"
    outcome = run(
        {"prompt": "Once"}, {"prompt": "upon"}, options=["--output", out, "--max-batch-size", 1]
    )
    assert outcome.code == 1
    results = read_lines(out)
    assert len(results) == 2
    for result in results:  # by an iteration that failed, or with the manager
        assert "RuntimeError: boom" in result["error"], result


def test_a_file_that_is_not_a_recording_is_a_wrong_call(call, tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text("no recording\n")
    for arguments in (
        ["replay", "nowhere.jsonl"],
        ["replay", text],
        ["picture", text, "--output", tmp_path / "x.html"],
        ["simulate", "--recording", text],
        ["simulate", "--fit", "nowhere.jsonl"],
    ):
        outcome = call(*arguments)
        assert outcome.code == 2 and outcome.out == ""
        assert outcome.err.startswith("gptmanager: ") and outcome.err.count("\n") == 1
        assert "nowhere.jsonl" in outcome.err or str(text) in outcome.err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(28, "No space left on device"), 1),
        (ManagerDeadError("gone"), 1),
        (RecordingError("nothing to read"), 2),
        (RuntimeError("can't start new thread"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_no_error_ends_in_a_traceback(run, monkeypatch, error, code):
    def fail(*arguments):
        raise error

    monkeypatch.setattr("gptmanager.commands.run.main.serve_file", fail)
    outcome = run({"prompt": "Once"})
    assert outcome.code == code and "Traceback" not in outcome.err
    assert outcome.err.startswith("gptmanager: ")


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (ImportError, "libtorch_cpu.so: failed to map segment from shared object"),
        (OSError, "no libllvmlite.so"),
        (SystemError, "error return without exception set"),  # by Python without memory
        (MemoryError, ""),
    ],
)
def test_a_command_that_cannot_be_imported(call, monkeypatch, kind, why):
    def fail(_):
        raise kind(why)

    monkeypatch.setattr(cli, "named", fail)
    outcome = call("models")
    hint = "check the installation, and the memory limit of this process (ulimit -v)"
    assert outcome.code == 1
    assert outcome.err == (
        "gptmanager: gptmanager.commands.checkpoints.models_main cannot be imported: "
        f"{why or 'out of memory'}; {hint}\n"
    )


def test_a_current_folder_that_was_removed(call, tmp_path, monkeypatch):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    outcome = call("models")
    assert outcome.code == 2 and outcome.err == (
        "gptmanager: the current folder cannot be used: No such file or directory; change to "
        "another one (cd)\n"
    )


# Bytes that are not text -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--model", ".", "--prompt", "a\udcffb"],
        ["chat", "--model", ".", "--system", "a\udcffb"],
        ["chat", "--model", ".", "--stop", "a\udcffb"],
    ],
)
def test_a_text_in_another_encoding_than_that_of_the_locale(call, arguments):
    outcome = call(*arguments)
    assert outcome.code == 2
    told = rf"argument {arguments[-2]}: must be a text in [\w-]+, got 'a\\udcffb'\n$"
    assert re.search(told, outcome.err), outcome.err


def test_a_path_that_is_not_utf_8_in_a_report(call, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/a\udcffb")
    caches = json.loads(call("env", "--json").out)["caches"]
    assert caches["kernels of the GPU"] == rf"{tmp_path}/a\udcffb/gptmanager/cuda"


def test_a_text_that_the_standard_output_cannot_encode(call, tmp_path, monkeypatch):
    path = tmp_path / "ä漢.jsonl"
    options = ["--num-requests", 2, "--policies", "max_utilization", "--record", path]
    assert call("simulate", *options).code == 0
    written = io.BytesIO()
    with io.TextIOWrapper(written, "latin-1") as latin:
        monkeypatch.setattr(sys, "stdout", latin)
        outcome = call("picture", path, "--output", path.with_suffix(".html"))
        assert outcome.code == 0 and b"/\xe4\\u6f22.html  " in written.getvalue()


# Files and streams that fail ---------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--record", "--stats", "--output"])
def test_a_file_that_cannot_be_written_is_reported_and_fails_the_run(run, option):
    outcome = run({"prompt": "Once", "max_new_tokens": 3}, options=[option, "/dev/full"])
    assert outcome.code == 1
    assert f"gptmanager: {option} /dev/full: " in outcome.err and "Traceback" not in outcome.err
    if option != "--output":  # the answers are there
        assert re.search(r"^requests +1$", outcome.out, re.MULTILINE)


def test_a_simulated_recording_that_cannot_be_written(call):
    options = ["--num-requests", 3, "--policies", "max_utilization", "--record", "/dev/full"]
    outcome = call("simulate", *options)
    assert outcome.code == 1 and "gptmanager: --record /dev/full: OSError" in outcome.err


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 1), (errno.EACCES, 2)])
def test_a_file_that_cannot_be_written(call, model, tmp_path, monkeypatch, number, code):
    """A full disk is a failure; a path that cannot be written is a wrong call."""

    def fail(*_):
        raise OSError(number, "why")

    monkeypatch.setattr("gptmanager.models.conversion._write_json", fail)
    outcome = call("convert", model, tmp_path / "new")
    assert outcome.code == code and outcome.err.endswith("/new cannot be written: why\n")
    path = tmp_path / "run.jsonl"
    call("simulate", "--num-requests", 2, "--policies", "max_utilization", "--record", path)
    monkeypatch.setattr(Path, "write_bytes", fail)
    outcome = call("picture", path, "--output", path.with_suffix(".html"))
    assert outcome.code == code and outcome.err.endswith(".html' cannot be written: why\n")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["simulate", "--num-requests", "2"]]
)
def test_a_standard_output_that_is_full(call, monkeypatch, arguments):
    with open("/dev/full", "w") as full:
        # what is flushed must not fail once more when Python ends: the descriptor is another then
        monkeypatch.setattr(sys, "stdout", full)
        outcome = call(*arguments)
        full.flush()
    assert outcome.code == 1
    assert outcome.err.endswith(f"gptmanager: {UNWRITABLE}: No space left on device\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["env"],
        ["simulate", "--num-requests", 2, "--output-len", 2, "--json"],
        ["models", "--json"],
    ],
)
def test_a_standard_output_that_is_full_and_has_no_buffer(call, monkeypatch, arguments):
    """As with PYTHONUNBUFFERED=1, which images of containers set."""
    with io.TextIOWrapper(open("/dev/full", "wb", buffering=0), write_through=True) as full:
        monkeypatch.setattr(sys, "stdout", full)
        outcome = call(*arguments)
    assert outcome.code == 1
    assert outcome.err == f"gptmanager: {UNWRITABLE}: No space left on device\n"


@pytest.mark.parametrize("unbuffered", [False, True])
def test_the_answer_to_a_prompt_that_cannot_be_printed(call, model, monkeypatch, unbuffered):
    buffering = 0 if unbuffered else -1
    with io.TextIOWrapper(open("/dev/full", "wb", buffering), write_through=unbuffered) as full:
        monkeypatch.setattr(sys, "stdout", full)
        outcome = call("run", "--model", model, "--prompt", "a", "--max-new-tokens", 1)
    assert outcome.code == 1
    assert outcome.err.endswith(f"gptmanager: {UNWRITABLE}: No space left on device\n")


def test_a_standard_input_that_is_closed_or_none(call, model, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    outcome = call("run", "--model", model, "--requests", "-")
    assert outcome.code == 2
    assert outcome.err == "gptmanager: --requests -: the standard input is closed\n"


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["run", "--output", "X", "--stats", "X"], "--output and --stats"),
        (["run", "--record", "X", "--output", "./X"], "--output and --record"),
        (["picture", "X", "--output", "X"], "RECORDING and --output"),
        (["picture", "Y", "--output", "X", "--chrome-trace", "X"], "--output and --chrome-trace"),
        (["simulate", "--recording", "X", "--record", "X"], "--recording and --record"),
        (["simulate", "--fit", "X", "--record", "X"], "--fit and --record"),
    ],
)
def test_no_file_is_written_over_another(call, model, tmp_path, monkeypatch, arguments, options):
    monkeypatch.chdir(tmp_path)
    if arguments[0] == "run":
        arguments = [*arguments, "--model", model, "--requests", "requests.jsonl"]
    outcome = call(*arguments)
    assert outcome.code == 2 and not Path("X").exists()
    assert f"gptmanager: {options} must be different files" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["simulate", "--num-requests", "1" + "0" * 30], "must be at most 2147483647"),
        (["simulate", "--prompt-len", "1:" + "9" * 5000], "must be at most 2147483647"),
        (["bench", "--prompt-len", "1:99999999999"], "must be at most 2147483647"),
        (["bench", "--threads", "1000000000"], "must be at most 1024"),
        (["bench", "e2e", "--batches", ","], "must be words like a,b, got ','"),
        (["bench", "kernels", "--only", ","], "must be words like a,b, got ','"),
        (["picture", "x", "--output", "x.png"], "--output: must end in .html or .svg, got 'x.png'"),
        (["picture", "x", "--output", "-"], "--output: must end in .html or .svg, got '-'"),
        (["chat", "--top-p", "2"], "--top-p: must be a number from 0 to 1, got '2'"),
        (["chat", "--temperature", "1e39"], "--temperature: must be a number from 0 to 100, got"),
        (["chat", "--repetition-penalty", "0"], "must be a number from 0.01 to 100, got '0'"),
        (["run", "--top-k", "-2"], "--top-k: must be an integer from -1 to 2147483647, got '-2'"),
        (["run", "--min-p", "nan"], "--min-p: must be a number from 0 to 1, got 'nan'"),
        (["chat", "--stop", ""], "--stop: must have at least one character"),
        (
            ["simulate", "--num-requests", "2", "--scheduler", "os:getcwd"],
            "--scheduler os:getcwd: TypeError: posix.getcwd",
        ),
    ],
)
def test_impossible_arguments_are_refused_in_a_sentence(call, arguments, told):
    outcome = call(*arguments)
    assert outcome.code == 2 and told in outcome.err and "Traceback" not in outcome.err


@pytest.mark.parametrize(
    "fields", [{"eos_token_id": "x"}, {"eos_token_id": [[1]]}, {"pad_token_id": 1.5}, []]
)
def test_a_generation_config_of_wrong_types(call, tmp_path, fields):
    model = save_text_checkpoint(tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps(fields))
    requests = write_requests(tmp_path / "requests.jsonl", {"prompt": "a"})
    outcome = call("run", "--model", model, "--requests", requests)
    assert outcome.code == 2 and "generation_config.json: " in outcome.err


# Long texts --------------------------------------------------------------------------------------


def test_a_text_that_fits_into_no_request_is_refused_before_it_is_encoded(
    run, tmp_path, monkeypatch
):
    monkeypatch.setattr(TextEncoder, "_batch", None)
    out = tmp_path / "out.jsonl"
    outcome = run(
        {"prompt": "x" * 100_000, "max_new_tokens": 2},
        {"prompt": "Once", "max_new_tokens": 2},
        options=["--output", out],
    )
    assert outcome.code == 1
    long, short = read_lines(out)
    assert "prompt has 100000 bytes: a request may have 160 tokens of at" in long["error"]
    assert len(short["output_ids"]) == 2


def test_a_long_text_is_encoded_while_the_others_run(run, tmp_path, monkeypatch):
    # Given a tokenizer without a bound, which waits for the other line to be answered
    out = tmp_path / "out.jsonl"
    stats = tmp_path / "stats.jsonl"
    monkeypatch.setattr(
        "gptmanager.callbacks.text.text_encoder.longest_token", lambda tokenizer: None
    )
    batch, encoded = TextEncoder._batch, []

    def patient(encoder, text, special):
        while not stats.exists() or len(read_lines(stats)) < 3:
            time.sleep(0.01)
        encoded.append(len(text))
        return batch(encoder, text, special)

    monkeypatch.setattr(TextEncoder, "_batch", patient)
    outcome = run(
        {"prompt": "x" * 70_000}, {"prompt": "Once", "max_new_tokens": 3},
        options=["--output", out, "--stats", stats],
    )  # fmt: skip
    assert encoded == [70_000] and outcome.code == 1
    long, short = read_lines(out)
    assert "Prompt length (70000) exceeds maximum input length" in long["error"]
    assert len(short["output_ids"]) == 3


# As a process ------------------------------------------------------------------------------------


def command(*arguments):
    return [sys.executable, "-m", "gptmanager", *map(str, arguments)]


@pytest.fixture
def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TERM": "xterm"}


def slow_requests(path):
    return write_requests(
        path,
        {"prompt": "short", "max_new_tokens": 1},
        *({"prompt": f"long {i}", "max_new_tokens": 150} for i in range(3)),
    )


def test_an_interrupt_ends_a_run_keeps_its_results_and_leaves_the_terminal_as_it_was(
    model, tmp_path, environment
):
    # Given a run that takes long, draws on a terminal, and has one result
    out = tmp_path / "out.jsonl"
    master, slave = pty.openpty()
    path = slow_requests(tmp_path / "requests.jsonl")
    with Child(
        command("run", "--model", model, "--requests", path, "--output", out, "--pace", 0.3),
        stdout=subprocess.PIPE,
        stderr=slave,
        env=environment,
        text=True,
    ) as process:
        os.close(slave)
        seen = b""
        while b" LENGTH " not in seen or b" running " not in seen:
            seen += os.read(master, 65536)

        # When it is interrupted
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):
            while piece := os.read(master, 65536):
                seen += piece
        printed = process.stdout.read()
    os.close(master)

    # Then it ends before its requests, without a traceback, what is done is done, and nothing stays
    assert process.returncode == -signal.SIGINT
    assert b"Traceback" not in seen and printed == ""
    screen = Screen(80)
    screen.feed(seen.decode())
    assert screen.shows_cursor and screen.column == 0
    assert not any(" running " in line for line in screen.lines)
    assert screen.lines[-3:] == ["1 of 4 requests were done", "gptmanager: interrupted", ""]
    assert [result["request_id"] for result in read_lines(out)] == [1]


@pytest.mark.parametrize("options", [(), ("--output", "-")])
def test_a_reader_that_leaves_early(run, monkeypatch, options):
    reader, writer = os.pipe()
    os.close(reader)
    with io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True) as stream:  # unbuffered
        monkeypatch.setattr(sys, "stdout", stream)
        outcome = run({"prompt": "a", "max_new_tokens": 1}, options=options)
    assert outcome.code == 1
    assert "request 1 joins" in outcome.err
    assert "Error" not in outcome.err and "Broken pipe" not in outcome.err


def run_in_shell(environment, *arguments):
    line = " ".join(command(*arguments))
    return subprocess.run(["sh", "-c", line], capture_output=True, env=environment, text=True)


@pytest.mark.parametrize(
    ("arguments", "unbuffered"),
    [
        (["--version"], ""),
        (["journal", "--help"], "1"),
        pytest.param(
            ["simulate", "--num-requests", 2, "--output-len", 2], "", marks=pytest.mark.slow
        ),
        pytest.param(
            ["simulate", "--num-requests", 2, "--output-len", 2, "--json"],
            "1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_closed_standard_output_is_an_error_of_what_prints(arguments, unbuffered, environment):
    environment["PYTHONUNBUFFERED"] = unbuffered
    ended = run_in_shell(environment, *arguments, ">&-")
    why = "it is closed; redirect it to a file, or to /dev/null"
    assert (ended.returncode, ended.stderr) == (1, f"gptmanager: {UNWRITABLE}: {why}\n")
    if arguments[0] != "simulate":  # it starts slowly, and ends as the others do
        assert run_in_shell(environment, *arguments, ">&-", "2>&-").returncode == 1


@pytest.mark.slow
def test_a_closed_standard_output_is_an_error_of_what_it_cannot_encode(environment, tmp_path):
    path = tmp_path / "ä.jsonl"
    options = ["--num-requests", 2, "--policies", "max_utilization", "--record", path]
    assert run_in_shell(environment, "simulate", *options).returncode == 0
    environment |= {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ended = run_in_shell(environment, "picture", path, "--output", tmp_path / "ä.html", ">&-")
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"gptmanager: {UNWRITABLE}: it is closed")


def test_closed_streams_that_a_command_does_not_use(environment, model, tmp_path):
    out = tmp_path / "out.jsonl"
    options = ["--model", model, "--prompt", "a", "--max-new-tokens", 1, "--output", out]
    ended = run_in_shell(environment, "run", *options, "<&-", "2>&-")
    assert ended.returncode == 0 and len(read_lines(out)) == 1
    assert ended.stdout.startswith("requests ")


def test_no_file_gets_the_number_of_a_closed_stream(environment):
    """Children would inherit the file. libffi, which ctypes loads, may open its own file before."""
    code = (
        "import os, ctypes; from gptmanager.terminal.streams import prepare_streams;"
        'prepare_streams(); print(os.readlink("/proc/self/fd/0"))'
    )
    line = f"{sys.executable} -c '{code}' <&- 2>&-"
    ended = subprocess.run(["sh", "-c", line], capture_output=True, env=environment, text=True)
    assert ended.returncode == 0
    assert ended.stdout == "/dev/null\n" or "/libffi" in ended.stdout


@pytest.mark.slow  # everyday runs have one on a terminal that is interrupted, and each display
def test_the_whole_run_on_a_terminal(model, tmp_path, environment):
    # Given a terminal of unknown size for what happens, and a pipe for the report
    master, slave = pty.openpty()
    requests = [{"prompt": f"no. {i}", "max_new_tokens": 3 + 9 * i} for i in range(5)]
    path = write_requests(tmp_path / "requests.jsonl", *requests)
    options = ["--pace", 0.02, "--max-batch-size", 3]
    with Child(
        command("run", "--model", model, "--requests", path, *options),
        stdout=subprocess.PIPE,
        stderr=slave,
        env=environment,
        text=True,
    ) as process:
        os.close(slave)

        # When it runs
        seen = b""
        with contextlib.suppress(OSError):  # Linux says EIO when the other side has closed
            while piece := os.read(master, 65536):
                seen += piece
        report = process.stdout.read()
    os.close(master)

    # Then requests were seen running, and only the finished ones stay
    assert process.returncode == 0
    text = seen.decode()
    assert re.search(r"  1/5 requests .* batch [23]   KV cache \d+%", text)
    assert " running " in text
    screen = Screen(80)
    screen.feed(text)
    rows = [line for line in screen.lines if " LENGTH " in line]
    assert [int(row.split()[0]) for row in rows] == [1, 2, 3, 4, 5]
    assert not any(" running " in line or "requests " in line for line in screen.lines)
    assert re.match(r"requests +5\nfailed +0\n", report) and "\x1b" not in report
