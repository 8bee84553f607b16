"""`gptmanager bench --peer vllm-cpu`: another interpreter runs the same load, in turn with ours.

Stand-ins take the place of that interpreter, or of vLLM in this one. GPTMANAGER_VLLM_PYTHON names a
real one.
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from bench_load import LOAD, TINY
from child import Child
from safetensors.torch import load_file

from gptmanager import OptionalParams, SchedulerConfig
from gptmanager.bench import (
    SHAPES,
    BenchOptions,
    VllmPeer,
    bench,
    random_llama,
    run_manager,
)
from gptmanager.bench.peers import vllm_cpu_script
from gptmanager.bench.peers.transformers_peer import TooSlow
from gptmanager.errors import ConfigError, GptManagerError

REQUESTS = LOAD.requests(96)
REAL = os.environ.get("GPTMANAGER_VLLM_PYTHON")

# What the stand-ins for an interpreter begin with: it tells its version, then reads the load.
BEGIN = """
import json, os, subprocess, sys, time
script, *files = sys.argv[1:]
assert os.path.basename(script) == "vllm_cpu_script.py" and os.path.exists(script)
if not files:
    print(json.dumps({"version": "0.0", "device": "cpu"}))
    sys.exit()
with open(files[0]) as file:
    load = json.load(file)
def zeros():
    return [[0] * new_tokens for _, new_tokens in load["requests"]]
"""
ANSWER = 'print(json.dumps({"seconds": 0.5, "outputs": zeros()}))'
# A process that outlives the one that started it, and keeps its error output open.
LINGER = """
child = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
with open(os.path.join(os.environ["NOTES"], str(child.pid)), "w"): pass
"""

VLLM = """
import atexit, json, os, subprocess, sys, time
__version__ = "0.0"
class SamplingParams:
    def __init__(self, **given):
        self.given = given
class Result:
    def __init__(self, token_ids):
        self.token_ids = token_ids
        self.outputs = [self]
class LLM:
    def __init__(self, model, **given):
        print("noise of vLLM", flush=True)
        subprocess.run(["echo", "noise of a process of vLLM"])
        self.told = {"model": model, **given}
        atexit.register(print, "noise at the end")
    def generate(self, prompts, params, use_tqdm):
        note = {**self.told, "path": sys.path, "prompts": prompts, "use_tqdm": use_tqdm,
                "params": [each.given for each in params], "environment": dict(os.environ)}
        with open(os.path.join(os.environ["NOTES"], "vllm.json"), "w") as file:
            json.dump(note, file)
        AFTER
        return [Result(range(each.given["max_tokens"])) for each in params]
"""


@pytest.fixture
def notes(tmp_path, monkeypatch):
    """Where stand-ins write what they saw."""
    folder = tmp_path / "notes"
    folder.mkdir()
    monkeypatch.setenv("NOTES", str(folder))
    return folder


@pytest.fixture
def interpreter(tmp_path, notes, monkeypatch):
    """Makes an interpreter that runs a given text instead of the script."""

    def make(text, begin=BEGIN):
        (tmp_path / "stand_in.py").write_text(begin + textwrap.dedent(text))
        path = tmp_path / "python"
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{tmp_path}/stand_in.py" "$@"\n')
        path.chmod(0o755)
        return str(path)

    monkeypatch.setitem(SHAPES, "small", TINY)
    return make


@pytest.fixture
def fake_vllm(tmp_path, notes, monkeypatch):
    """Makes a module `vllm` for this interpreter. `after`: what it does before it answers."""

    def make(after="pass", device="cpu", tree=tmp_path / "site"):
        (tree / "vllm").mkdir(parents=True)
        (tree / "vllm" / "__init__.py").write_text(VLLM.replace("AFTER", after))
        (tree / "vllm" / "platforms.py").write_text(
            f"class current_platform:\n    device_type = {device!r}\n"
        )
        monkeypatch.setenv("PYTHONPATH", str(tree))

    return make


def peer(folder, python, **params):
    return VllmPeer((TINY, random_llama(TINY, 3)), OptionalParams(**params), folder, python)


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def lingering(notes):
    """Processes that stand-ins left behind. One that ends has closed its files a moment before."""
    pids = [int(path.name) for path in notes.iterdir() if path.name.isdecimal()]
    assert pids
    deadline = time.monotonic() + 30
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return [pid for pid in pids if is_alive(pid)]


def test_engines_take_turns_and_each_is_alone(interpreter, notes):
    # Given a peer that leaves a process behind each time
    python = interpreter(LINGER + ANSWER)
    events = []
    others = {*threading.enumerate()}  # threads of grammars that other tests keep

    def starts(name, number, count):
        events.append((name, number, count))
        if name == "vllm-cpu":  # nothing of a manager runs
            mine = {*threading.enumerate()} - others
            assert not any("gptmanager" in thread.name for thread in mine)
        elif number:  # nothing of the peer runs
            assert lingering(notes) == []

    def ran(name, figures):
        events.append(name)

    # When both run twice
    options = BenchOptions(load=LOAD, repeats=2, peer="vllm-cpu", peer_python=python)
    report = bench(options, on_start=starts, on_run=ran)

    # Then they take turns, and their figures are compared
    ours, theirs = "gptmanager", "vllm-cpu"
    assert events == [
        *((ours, 0, 4), ours, (theirs, 1, 4), theirs),
        *((ours, 2, 4), ours, (theirs, 3, 4), theirs),
    ]
    assert lingering(notes) == [] and len(list(notes.iterdir())) == 2
    tokens = sum(new_tokens for _, new_tokens in REQUESTS)
    assert report["engines"][theirs]["of_every_run"] == [round(tokens / 0.5, 1)] * 2
    assert report["ratio_to_vllm_cpu"] == pytest.approx(
        report["engines"][ours]["output_tokens_per_second"] / (tokens / 0.5), rel=0.01, abs=0.01
    )
    assert report["vllm_version"] == "0.0"


def test_the_same_outputs_are_counted(interpreter, notes):
    source = (TINY, random_llama(TINY, LOAD.seed))
    outputs = [*run_manager(source, REQUESTS, OptionalParams(), SchedulerConfig()).outputs]
    outputs[1] = [(outputs[1][0] + 1) % 96, *outputs[1][1:]]
    (notes / "answer").write_text(json.dumps({"seconds": 1, "outputs": outputs}))
    python = interpreter('print(open(os.path.join(os.environ["NOTES"], "answer")).read())')
    report = bench(BenchOptions(load=LOAD, repeats=1, peer="vllm-cpu", peer_python=python))
    assert report["same_outputs"] == "4 of 5"


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_the_peer_gets_the_same_weights_and_requests(interpreter, notes, tmp_path, dtype):
    folder = tmp_path / "weights"
    folder.mkdir()
    copied = 'os.link(files[0], os.path.join(os.environ["NOTES"], "load.json"))\n'
    engine = peer(folder, interpreter(copied + ANSWER), dtype=dtype, max_batch_size=2)
    engine.run(REQUESTS, 30)

    load = json.loads((notes / "load.json").read_text())
    assert load["requests"] == [list(request) for request in REQUESTS]
    assert load["warm_up"] == [[0] * 16, 2]
    longest = max(len(prompt) + new_tokens for prompt, new_tokens in REQUESTS)
    itemsize = 2 if dtype else 4
    assert load["engine"] == {
        "model": str(folder),
        "dtype": dtype or "float32",
        "max_model_len": longest,
        "max_num_seqs": 2,
        # two requests of a block, and 8 blocks to spare; 2 layers, 2 heads of 8
        "kv_cache_memory_bytes": 10 * 128 * 2 * 2 * 2 * 8 * itemsize,
    }
    assert json.loads((folder / "config.json").read_text()) == TINY
    written = load_file(folder / "model.safetensors")
    expected = random_llama(TINY, 3, dtype=torch.float32)
    assert written.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(written[name], weight.to(getattr(torch, dtype or "float32")))


def test_a_checkpoint_stays_where_it_is(interpreter, tmp_path):
    model = Path("examples/tiny_llama")
    engine = VllmPeer(model, OptionalParams(), tmp_path, interpreter(ANSWER))
    requests = LOAD.requests(512)
    assert [*map(len, engine.run(requests, 30).outputs)] == [count for _, count in requests]
    load = json.loads((tmp_path / "load.json").read_text())
    assert load["engine"]["model"] == str(model)
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("raise ModuleNotFoundError('No module named vllm')", "ModuleNotFoundError: No module"),
        ("import sys; sys.exit(3)", "exit status 3"),
        ("print('hello')", "it printed b'hello'"),
        ("print('{}')", "it printed b'{}'"),
        ("", "it printed b''"),
        ('print(\'{"version": "1", "device": "cuda"}\')', "its vLLM 1 is for the device 'cuda'"),
    ],
)
def test_an_interpreter_without_vllm_is_refused_before_anything_runs(interpreter, text, why):
    python = interpreter(text, begin="")
    options = BenchOptions(load=LOAD, peer="vllm-cpu", peer_python=python)
    with pytest.raises(ConfigError) as caught:
        bench(options, on_start=lambda *start: pytest.fail("a run has begun"))
    assert str(caught.value).startswith(f"--peer-python {python}: {why}")
    assert "--peer vllm-cpu needs an interpreter that can import vLLM's CPU build" in str(
        caught.value
    )


def test_without_a_name_a_missing_vllm_is_skipped(monkeypatch, interpreter):
    python = interpreter("raise ModuleNotFoundError('No module named vllm')", begin="")
    monkeypatch.setattr(sys, "executable", python)
    report = bench(BenchOptions(load=LOAD, repeats=1, peer="vllm-cpu"))
    assert list(report["engines"]) == ["gptmanager"]
    [note] = report["notes"]
    assert note.startswith(
        f"vLLM is skipped: --peer-python {python}: ModuleNotFoundError: No module"
    )


def test_no_interpreter_is_refused(tmp_path):
    path = str(tmp_path / "none")
    with pytest.raises(ConfigError, match=f"^--peer-python {path}: No such file or directory; "):
        peer(tmp_path, path)


def test_without_a_name_it_is_the_interpreter_that_runs_this(fake_vllm, tmp_path):
    fake_vllm()
    engine = peer(tmp_path, None)
    assert engine.describe()["vllm_version"] == "0.0"


def test_the_options_must_fit(tmp_path):
    with pytest.raises(ConfigError, match="--peer-python needs --peer vllm-cpu"):
        bench(BenchOptions(peer="transformers", peer_python="python"))
    with pytest.raises(ConfigError, match="--peer vllm-cpu runs on the CPU, not on --device cuda"):
        peer(tmp_path, None, device="cuda")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "for i in range(50): print('line', i, file=sys.stderr)\nsys.exit(7)",
            "vLLM failed with exit status 7:" + "".join(f"\n  line {i}" for i in range(30, 50)),
        ),
        ("os.kill(os.getpid(), 11)", "vLLM failed with exit status -11:"),
        ("print('hello')", "vLLM's answer cannot be read: b'hello'"),
        ("", "vLLM's answer cannot be read: b''"),
        ("print('[1]')", "vLLM's answer cannot be read: "),
        (
            'print(\'{"seconds": 1, "outputs": [[1]]}\')',
            "vLLM generated fewer or more tokens than requested",
        ),
    ],
)
@pytest.mark.every(4)
def test_a_failed_run_is_reported(interpreter, tmp_path, text, why):
    engine = peer(tmp_path, interpreter(text))
    with pytest.raises(GptManagerError) as caught:
        engine.run(REQUESTS, 30)
    assert str(caught.value).startswith(why)


def test_a_run_that_takes_too_long_is_ended(interpreter, notes, tmp_path):
    engine = peer(tmp_path, interpreter(LINGER + "time.sleep(600)"))
    with pytest.raises(TooSlow, match="vLLM was not done after 1 s"):
        engine.run(REQUESTS, 1)
    assert lingering(notes) == []


def test_the_script_asks_vllm_for_what_we_do(fake_vllm, notes, tmp_path):
    fake_vllm()
    engine = peer(tmp_path, sys.executable)
    figures = engine.run(REQUESTS, 50)  # what vLLM prints does not disturb

    assert figures.outputs == tuple(tuple(range(new_tokens)) for _, new_tokens in REQUESTS)
    assert 0 < figures.seconds < 50
    told = json.loads((notes / "vllm.json").read_text())
    assert told["prompts"] == [{"prompt_token_ids": prompt} for prompt, _ in REQUESTS]
    assert told["params"] == [
        {"temperature": 0, "max_tokens": new_tokens, "ignore_eos": True, "detokenize": False}
        for _, new_tokens in REQUESTS
    ]
    load = json.loads((tmp_path / "load.json").read_text())
    asked = {"enforce_eager": True, "enable_prefix_caching": False, "skip_tokenizer_init": True}
    assert told.items() >= {**load["engine"], **asked}.items()
    # modules beside the script are none of vLLM's
    assert not any(path.endswith("bench") for path in told["path"])
    assert told["environment"]["VLLM_NO_USAGE_STATS"] == "1"


def test_a_setting_of_the_environment_is_reported_and_kept(fake_vllm, notes, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    fake_vllm()
    engine = peer(tmp_path, sys.executable)
    engine.run(REQUESTS, 50)
    assert engine.describe()["vllm_settings"] == {"VLLM_CPU_OMP_THREADS_BIND": "0-1"}
    environment = json.loads((notes / "vllm.json").read_text())["environment"]
    assert environment["HF_HUB_OFFLINE"] == "0"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"


def test_the_peer_ends_with_its_parent(tmp_path):
    """Even if nobody could tell it to: the end of its standard input is enough."""
    (tmp_path / "vllm.py").write_text("print(flush=True)\nimport time\ntime.sleep(600)\n")
    pipes = dict.fromkeys(("stdin", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-S", vllm_cpu_script.__file__]
    with Child(command, env={"PYTHONPATH": str(tmp_path)}, start_new_session=True, **pipes) as own:
        own.stderr.readline()  # it runs
        own.stdin.close()
        assert own.wait(60) == -signal.SIGKILL


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.slow
def test_whatever_ends_the_command_ends_the_peer(fake_vllm, notes, sent):
    # Given a peer that runs, with a process of its own
    fake_vllm("\n        ".join(LINGER.strip().splitlines()) + "; time.sleep(600)")
    arguments = ["--num-requests", "1", "--prompt-len", "4", "--output-len", "2"]
    command = [sys.executable, "-m", "gptmanager", "bench", "--peer", "vllm-cpu", *arguments]
    with Child(command, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 50
        while not any(path.name.isdecimal() for path in notes.iterdir()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)

        # When the command is ended
        process.send_signal(sent)
        told = process.communicate(timeout=30)[1]

    # Then nothing of the peer stays
    assert lingering(notes) == []
    if sent == signal.SIGINT:
        assert process.returncode == -signal.SIGINT
        assert told.splitlines()[-1] == "gptmanager: interrupted"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(REAL is None, reason="GPTMANAGER_VLLM_PYTHON names no interpreter with vLLM")
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vllm_itself(monkeypatch, family, dtype):
    config = {**TINY, "hidden_size": 128}  # heads of 32
    if family == "qwen2":
        config |= {"model_type": family, "architectures": ["Qwen2ForCausalLM"]}
        config["tie_word_embeddings"] = True
    monkeypatch.setitem(SHAPES, "small", config)
    params = OptionalParams(dtype=dtype)
    report = bench(
        BenchOptions(load=LOAD, repeats=1, peer="vllm-cpu", peer_python=REAL, params=params)
    )
    assert report["ratio_to_vllm_cpu"] > 0
    if dtype == "float32":  # the other rounds too much for that
        assert report["same_outputs"] == "5 of 5"
