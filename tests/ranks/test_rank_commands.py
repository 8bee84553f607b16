"""Ranks as processes: the commands under a launcher, and the host of docs/ranks.md."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from ranks_by_hand import free_port, outputs, started_ranks

from gptmanager import OptionalParams
from gptmanager.cli import main
from gptmanager.commands.follow import is_follower

ROOT = Path(__file__).resolve().parents[2]
MODEL = str(ROOT / "examples" / "tiny_llama")


def run_arguments(folder, *more):
    requests = folder / "requests.jsonl"
    lines = [{"prompt": text, "max_new_tokens": 12} for text in ("17 + 25 =", "a b c", "One ")]
    requests.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return ["-m", "gptmanager", "run", "--model", MODEL, "--requests", str(requests), *more]


@pytest.mark.parametrize(
    "options",
    [
        # What rank 0 alone does need not be the same.
        ("--tensor-parallel-size", "2", "--pace", "0.001"),
        ("--pipeline-parallel-size", "2"),
    ],
)
@pytest.mark.slow
def test_a_file_of_requests_runs_on_ranks_as_on_one(options, tmp_path):
    written = [str(tmp_path / name) for name in ("alone", "ranks")]
    command = run_arguments(tmp_path, "--json", "--dtype", "float64", "--output")
    assert main([*command[2:], written[0]]) == 0
    with started_ranks([*command, written[1], *options], 2) as ranks:
        reports = outputs(ranks)
    assert json.loads(reports[0])["requests"] == 3 and reports[1] == ""
    alone, ranks = (
        [json.loads(line)["output_ids"] for line in Path(path).read_text().splitlines()]
        for path in written
    )
    assert alone == ranks


@pytest.mark.slow
def test_a_chat_over_ranks_is_that_of_rank_0(tmp_path):
    lines = tmp_path / "lines"
    lines.write_text("17 + 25 =\n")
    command = ["-m", "gptmanager", "chat", "--model", MODEL, "--temperature", "0"]
    parallel = "--tensor-parallel-size", "2"
    with lines.open() as stdin, started_ranks([*command, *parallel], 2, stdin=stdin) as ranks:
        assert outputs(ranks) == [" 42\n", ""]


@pytest.mark.parametrize(
    ("size", "config", "warns"), [("2", None, True), ("1", None, False), ("x", None, False)]
)
def test_processes_of_a_launcher_that_share_nothing_are_warned(
    monkeypatch, caplog, size, config, warns
):
    monkeypatch.setenv("WORLD_SIZE", size)
    assert not is_follower(OptionalParams(parallel_config=config))
    text = "a launcher has started 2 processes, and each of them runs everything"
    assert (text in caplog.text) == warns


@pytest.mark.timeout(240)  # two processes import torch at the same time
def test_a_server_over_ranks_answers_and_ends_on_both():
    command = ["-m", "gptmanager", "serve", "--model", MODEL, "--port", "0"]
    with started_ranks([*command, "--tensor-parallel-size", "2"], 2) as (first, second):
        lines = iter(first.stderr.readline, "")
        url = next(
            found[0] for found in (re.search(r"http://\S+", line) for line in lines) if found
        )
        body = {"prompt": "17 + 25 =", "temperature": 0, "stop": ["4 2"], "n": 2}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert [choice["text"] for choice in answer.json()["choices"]] == [" 42", " 42"]
        form = {"prompt": "a", "guided_choice": ["red", "blue"], "bad_words": ["r"]}
        (choice,) = httpx.post(f"{url}/v1/completions", json=form, timeout=60).json()["choices"]
        assert choice["text"] == "blue"
        for rank in (second, first):  # rank 1 leaves signals to rank 0
            rank.send_signal(signal.SIGTERM)
        assert outputs([first, second])[1] == ""


def test_ranks_end_with_a_block_that_fails():
    with pytest.raises(KeyError), started_ranks(["-c", "import time; time.sleep(600)"], 2) as ranks:
        raise KeyError
    assert [rank.returncode for rank in ranks] == [-signal.SIGKILL] * 2


# Each machine has a network of its own.
MACHINES = """
set -e
for n in a b; do ip netns add gptm-$n-{pid}; done
ip link add gptm-a type veth peer name gptm-b
for n in a b; do ip link set gptm-$n netns gptm-$n-{pid}; done
for n in a b; do for d in lo gptm-$n; do ip -n gptm-$n-{pid} link set $d up; done; done
ip -n gptm-a-{pid} addr add 10.77.0.1/24 dev gptm-a
ip -n gptm-b-{pid} addr add 10.77.0.2/24 dev gptm-b
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def on_two_machines(names, host):
    """A launcher on each, which starts one rank."""
    each = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1"]
    where = ["--master-addr", "10.77.0.1", "--master-port", "29500", host]
    return [
        ["ip", "netns", "exec", name, *each, "--node-rank", str(number), *where]
        for number, name in enumerate(names)
    ]


def on_one_machine(host):
    return [[*TORCHRUN, "--nproc-per-node", "2", "--master-port", str(free_port()), host]]


@pytest.mark.slow
def test_the_host_of_the_page_runs_under_torchrun(tmp_path):
    """On two machines, where there is the right to make networks that stand for them."""
    host = tmp_path / "host.py"
    host.write_text(host_of_the_page())
    names = [f"gptm-{letter}-{os.getpid()}" for letter in "ab"]
    made = subprocess.run(["sh", "-c", MACHINES.format(pid=os.getpid())], capture_output=True)
    launchers = []
    try:
        there_are_two = made.returncode == 0
        commands = on_two_machines(names, str(host)) if there_are_two else on_one_machine(str(host))
        launchers = [
            subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for command in commands
        ]
        told = outputs(launchers)
    finally:
        for launcher in launchers:
            launcher.kill()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
    lines = sorted("".join(told).splitlines())
    assert lines == ["rank 0 sent 4 responses", "rank 1 sent 0 responses"]


def host_of_the_page():
    (host,) = re.findall(r"```python\n(# host.py\n.*?)```", page(), re.DOTALL)
    return host


def page():
    return (ROOT / "docs" / "ranks.md").read_text(encoding="utf-8")
