"""Measures `gptmanager serve` beside vLLM's server on the CPU: same model, same client, in turns.

    .venv/bin/python tests/benchmarks/measure_serving_peer.py --peer-python vllm/bin/python

The client is `vllm bench serve`, over /v1/completions. Each server is started anew for each round
and ended before the other one starts; each runs with its own defaults. The model is that of
`measure_serving.py`, in float32, unless `--model` names a folder.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from measure_serving import save_model

MEASURES = [f"p{cut}_{name}_ms" for name in ("ttft", "tpot") for cut in (50, 99)]
# `vllm bench serve`; the command itself asks for the version of a package that builds for the CPU
# do not have
CLIENT = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
START_S = 180


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def server(command: list[str], port: int) -> Iterator[None]:
    """Until it answers, and until it has ended with all that it started."""
    env = {**os.environ, **OFFLINE}
    env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, env=env, stdout=quiet, stderr=quiet, start_new_session=True)
    try:
        give_up = time.monotonic() + START_S
        while not answers(port):
            if process.poll() is not None or time.monotonic() > give_up:
                raise SystemExit(f"it does not start: {' '.join(command)}")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(60)


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def measure(options: argparse.Namespace, model: Path, port: int, clients: int) -> dict[str, float]:
    """What the client says of one load."""
    with tempfile.TemporaryDirectory() as folder:
        command = [options.peer_python, "-c", CLIENT, "--backend", "openai"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--endpoint", "/v1/completions"]
        command += ["--model", "model", "--tokenizer", str(model), "--dataset-name", "random"]
        command += ["--random-input-len", str(options.input_len), "--seed", str(options.seed)]
        command += ["--random-output-len", str(options.output_len), "--ignore-eos"]
        command += ["--num-prompts", str(clients * options.prompts), "--num-warmups", "4"]
        command += ["--max-concurrency", str(clients), "--disable-tqdm", "--save-result"]
        command += ["--percentile-metrics", "ttft,tpot", "--metric-percentiles", "50,99"]
        command += ["--result-dir", folder, "--result-filename", "found.json"]
        env = {**os.environ, **OFFLINE}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        found = json.loads((Path(folder) / "found.json").read_text())
    if found["failed"] or found["completed"] != clients * options.prompts:
        raise SystemExit(f"{found['failed']} requests failed")
    return {name: found[name] for name in (*MEASURES, "output_throughput")}


def one_round(options: argparse.Namespace, model: Path, name: str) -> dict[int, dict[str, float]]:
    port = free_port()
    place = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "model"]
    if name == "gptmanager":
        command = [options.python, "-m", "gptmanager", "serve", "--model", str(model), *place]
    else:
        command = [options.peer_python, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(model), "--dtype", "float32", "--enforce-eager", *place]
    with server(command, port):
        found = {number: measure(options, model, port, number) for number in options.clients}
    for number, row in found.items():
        cells = "  ".join(f"{key} {value:8.2f}" for key, value in row.items())
        print(f"{name:10}  {number:3} clients  {cells}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer-python", required=True, help="an interpreter that has vLLM")
    parser.add_argument("--python", default=sys.executable, help="the one that has gptmanager")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--clients", type=int, nargs="+", default=[4, 64])
    parser.add_argument("--prompts", type=int, default=4, help="for each client")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    values: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or save_model(Path(folder))
        for _ in range(options.rounds):
            for name in ("gptmanager", "vLLM"):
                for number, row in one_round(options, model, name).items():
                    for key, value in row.items():
                        values[name, number, key].append(value)
    print(f"medians of {options.rounds} rounds: gptmanager, vLLM, ratio")
    for number in options.clients:
        for key in (*MEASURES, "output_throughput"):
            own, peer = (
                statistics.median(values[it, number, key]) for it in ("gptmanager", "vLLM")
            )
            print(f"{number:3} clients  {key:18} {own:9.2f} {peer:9.2f}  {own / peer:.2f}")


if __name__ == "__main__":
    main()
