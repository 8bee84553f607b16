"""Measures `gptmanager serve` next to vLLM's server on the CPU and llama.cpp's `llama-server`.

    python tests/benchmarks/measure_server_peers.py --vllm-python vllm/bin/python \\
      --llama-server build/bin/llama-server

Random weights of one shape are written once, for each server in its format. Each server runs alone
and is started anew in each round; the servers take turns. The client is the same for all: streams
of /v1/completions whose prompts are token ids. A peer that is not given, or not there, is skipped.

Where a run must be short, measure in pieces: `--servers`, `--weights` and `--clients` select what
runs, `--files` keeps the files of weights for the next run, and `--add-to` adds the requests of
this run to those of an earlier report.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from measure_serving import in_process, one_client, prompts, save_model, vocabulary
from safetensors.torch import load_file

from gptmanager.bench import SHAPES
from gptmanager.bench.machine import machine, processor, versions
from gptmanager.bench.peers.gguf_writer import write_gguf

NAME = "model"
START_S = 600
MEASURES = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "tokens_per_s")
MOST, LEAST = 1.05, 1.0  # goals: ours to a peer's, of latencies and of tokens/s


@dataclass(frozen=True)
class Contender:
    """A server. Those with the same `weights` are compared."""

    name: str
    weights: str
    command: Sequence[str]  # without the port
    env: Mapping[str, str] = field(default_factory=dict)


class Load(NamedTuple):
    """A number of clients of one server, which measure the same things in each round."""

    clients: int
    weights: str
    server: str


Rounds = dict[Load, list[Any]]  # what `measured` has returned, round by round


# Servers -------------------------------------------------------------------------------------


def contenders(options: argparse.Namespace, folder: Path) -> tuple[list[Contender], list[str]]:
    """The servers that can run, with their files written into `folder`; why others cannot."""
    found, notes = [], []
    model = folder / "model"
    if not (model / "tokenizer.json").exists():  # the last file that is written
        model.mkdir(exist_ok=True)
        save_model(model, options.shape, getattr(torch, options.dtype))
    own = [options.python, "-m", "gptmanager", "serve", "--served-model-name", NAME]
    own += ["--threads", str(options.threads)] if options.threads else []
    command = [*own, "--model", str(model), "--dtype", options.dtype]
    found.append(Contender("gptmanager", options.dtype, command))
    if not is_program(options.vllm_python):
        notes.append("vLLM is skipped: pass an interpreter that has it as --vllm-python")
    else:
        found.append(vllm(options, model))
    server = options.llama_server
    quantize = server and server.with_name("llama-quantize")
    if not is_program(server) or not is_program(quantize):
        needs = "pass its path as --llama-server, with llama-quantize next to it"
        notes.append(f"llama-server is skipped: {needs}")
        return found, notes
    plain, small = folder / "BF16.gguf", folder / "Q8_0.gguf"
    if not small.exists():
        save_gguf(options, model, plain)
        part = small.with_suffix(".part")
        command = [str(quantize), str(plain), str(part), "Q8_0"]
        subprocess.run(command, check=True, capture_output=True)
        part.rename(small)
    if options.dtype == "bfloat16":
        found.append(llama_server(options, plain, options.dtype))
    found.append(Contender("gptmanager", "Q8_0", [*own, "--model", str(small)]))
    found.append(llama_server(options, small, "Q8_0"))
    return found, notes


def save_gguf(options: argparse.Namespace, model: Path, path: Path) -> None:
    """Write the weights of the folder `model` to a GGUF file."""
    words = vocabulary(SHAPES[options.shape]["vocab_size"])
    tokenizer = {"model": "gpt2", "pre": "qwen2", "tokens": words, "merges": []}
    keys = {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    write_gguf(path, SHAPES[options.shape], load_file(model / "model.safetensors"), keys)


def is_program(path: Path | None) -> bool:
    return path is not None and os.access(path, os.X_OK) and path.is_file()


def vllm(options: argparse.Namespace, model: Path) -> Contender:
    command = [str(options.vllm_python), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", NAME, "--dtype", options.dtype]
    command += ["--enforce-eager", "--max-model-len", str(length(options))]
    env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    env["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
    if options.threads:
        env["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{options.threads - 1}"
    return Contender("vLLM", options.dtype, command, {**env, **os.environ})


def llama_server(options: argparse.Namespace, model: Path, weights: str) -> Contender:
    count = max(options.clients)
    command = [str(options.llama_server), "--model", str(model), "--alias", NAME]
    command += ["--parallel", str(count), "--ctx-size", str(count * length(options))]
    command += ["--threads", str(options.threads)] if options.threads else []
    return Contender("llama-server", weights, command)


def length(options: argparse.Namespace) -> int:
    """Tokens of a prompt and its output, rounded up."""
    return -(-(options.input_len + options.output_len + 1) // 64) * 64


@contextlib.contextmanager
def running(contender: Contender, folder: Path) -> Iterator[int]:
    """The port of a server that answers; at the end it has ended with all that it started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = [*contender.command, "--host", "127.0.0.1", "--port", str(port)]
    env = {**os.environ, **contender.env}
    with (folder / "server.log").open("w+") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            give_up = time.monotonic() + START_S
            while not answers(port):
                if process.poll() is not None or time.monotonic() > give_up:
                    log.seek(0)
                    raise SystemExit(f"{' '.join(command)} does not start:\n{log.read()[-3000:]}")
                time.sleep(0.2)
            yield port
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


# The client ----------------------------------------------------------------------------------


def load(
    port: int, asked: list[list[int]], count: int, num_tokens: int, out: Any
) -> None:  # in a process
    """`count` clients, each of which sends its next request when its last one has ended."""
    waiting, found = iter(asked), []

    async def client() -> None:
        for prompt in waiting:
            first, last, tokens = await one_client(port, NAME, prompt, num_tokens)
            if tokens != num_tokens:
                raise RuntimeError(f"{tokens} tokens instead of {num_tokens}")
            found.append((first, (last - first) / (num_tokens - 1)))

    async def main() -> None:
        await asyncio.gather(*(client() for _ in range(count)))

    try:
        start = time.perf_counter()
        asyncio.run(main())
        out.put((found, len(asked) * num_tokens / (time.perf_counter() - start)))
    except Exception as error:
        out.put(error)


def measured(port: int, options: argparse.Namespace, count: int, seed: int) -> Any:
    """Seconds to the first token and for each further one, of each request; tokens/s."""
    asked = prompts(max(options.requests, 2 * count), seed, options.input_len)
    found = in_process(load, port, asked, count, options.output_len)
    if isinstance(found, Exception):
        raise SystemExit(f"the client failed: {found}")
    return found


# The report ----------------------------------------------------------------------------------


def row_of(load: Load, rounds: Sequence[Any]) -> dict[str, Any]:
    """Percentiles of the requests of all rounds, and the median of their tokens/s."""
    requests = np.array([pair for pairs, _ in rounds for pair in pairs]) * 1e3
    cuts = np.percentile(requests, (50, 99), axis=0)
    figures = [*cuts[:, 0], *cuts[:, 1], statistics.median(speed for _, speed in rounds)]
    values = {name: round(float(value), 2) for name, value in zip(MEASURES, figures, strict=True)}
    return {**load._asdict(), **values}


def ratios_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Ours to each peer's, of the same weights and the same number of clients."""
    found = []
    for row in rows:
        ours = {**row, "server": "gptmanager"}
        own = next((it for it in rows if all(it[key] == ours[key] for key in Load._fields)), None)
        if own is not None and row is not own:
            ratios = {name: round(own[name] / row[name], 3) for name in MEASURES}
            missed = [name for name in MEASURES[:-1] if ratios[name] > MOST]
            missed += [name for name in MEASURES[-1:] if ratios[name] < LEAST]
            head = {key: row[key] for key in ("server", "weights", "clients")}
            found.append({**head, **ratios, "missed": missed})
    return found


def table(report: Mapping[str, Any]) -> str:
    head = f"{'server':14}{'weights':10}{'clients':>7}"
    lines = [f"{report['processor']}; {report['machine']}", *report["notes"], ""]
    lines.append(head + "".join(f"{name:>14}" for name in MEASURES))
    for part in ("rows", "ratios"):
        if part == "ratios" and report[part]:
            lines += ["", f"gptmanager's to those of (goals: at most {MOST}, tokens/s {LEAST})"]
        for row in report[part]:
            cells = "".join(f"{row[name]:14,.2f}" for name in MEASURES)
            missed = f"  missed: {', '.join(row['missed'])}" if row.get("missed") else ""
            lines.append(f"{row['server']:14}{row['weights']:10}{row['clients']:7}{cells}{missed}")
    return "\n".join(lines)


def main() -> None:
    options = arguments().parse_args()
    earlier = json.loads(options.add_to.read_text())["rounds"] if options.add_to else []
    rounds = {Load(*load): own for load, own in earlier}
    with contextlib.ExitStack() as stack:
        folder = options.files or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        servers, notes = contenders(options, folder)
        for turn in range(options.rounds):
            for server in servers:
                if server.weights in options.weights and server.name in options.servers:
                    run_round(server, folder, options, turn, rounds)
    rows = [row_of(load, own) for load, own in sorted(rounds.items())]
    report = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "processor": processor(),
        "machine": machine(),
        "versions": versions(),
        "notes": notes,
        "rows": rows,
        "ratios": ratios_of(rows),
        "rounds": sorted(rounds.items()),
    }
    print(table(report))
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n")


def run_round(
    server: Contender, folder: Path, options: argparse.Namespace, turn: int, rounds: Rounds
) -> None:
    """Start a server, and add what its clients measure to `rounds`."""
    with running(server, folder) as port:
        measured(port, options, min(8, max(options.clients)), 1)  # warm
        for count in options.clients:
            load = Load(count, server.weights, server.name)
            own = rounds.setdefault(load, [])
            own.append(measured(port, options, count, 10 + 100 * len(own) + count))
            row = json.dumps(row_of(load, own[-1:]))
            print(f"round {turn + 1}: {row}", file=sys.stderr, flush=True)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--vllm-python", type=Path, help="an interpreter that has vLLM")
    add("--llama-server", type=Path, help="llama.cpp's program, with llama-quantize next to it")
    add("--python", default=sys.executable, help="the one that has gptmanager")
    add("--shape", choices=SHAPES, default="qwen2-0.5b")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="for all but Q8_0")
    add("--threads", type=int, help="of each server; without it each decides")
    add("--clients", type=int, nargs="+", default=[1, 8, 64], help="at once, in each load")
    weights, servers = ("bfloat16", "float32", "Q8_0"), ("gptmanager", "vLLM", "llama-server")
    add("--weights", choices=weights, nargs="+", default=weights, help="only these")
    add("--servers", choices=servers, nargs="+", default=servers, help="only these")
    add("--requests", type=int, default=16, help="of a load; at least two for each client")
    add("--input-len", type=int, default=64)
    add("--output-len", type=int, default=64)
    add("--rounds", type=int, default=3)
    add("--files", type=Path, help="a folder that keeps the files of weights")
    add("--add-to", type=Path, help="a report; its requests are counted, too")
    add("--output", type=Path, help="a file for the report as JSON")
    return parser


if __name__ == "__main__":
    main()
