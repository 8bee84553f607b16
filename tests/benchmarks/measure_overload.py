"""Drives `gptmanager serve` beyond what it can do, with a limit of what may wait.

    .venv/bin/python tests/benchmarks/measure_overload.py [--seconds 60] [--load 1.2]

First as many clients as run at once find the capacity, in requests a second. Then requests arrive
at random at `--load` times that rate. It prints what was answered and refused, how long the first
tokens took, how memory went, and how soon the server was idle after the last arrival.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import numpy as np

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@dataclass
class Seen:
    statuses: Counter[int] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)


async def ask(port: int, random: Random, num_tokens: int, seen: Seen) -> None:
    prompt = [random.randrange(5, 600) for _ in range(32)]
    body = {"prompt": prompt, "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    data = json.dumps({"model": "tiny_llama", **body}).encode()
    start, first = time.perf_counter(), 0.0
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{HEAD}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    status = int((await reader.readline()).split()[1])
    while piece := await reader.read(65536):
        if not first and b"data: {" in piece:
            first = time.perf_counter() - start
    writer.close()
    seen.statuses[status] += 1
    if first:
        seen.first_s.append(first)


async def capacity(port: int, clients: int, num_tokens: int, seconds: float) -> float:
    """Requests a second of clients that ask again at once."""
    seen = Seen()
    end = time.perf_counter() + seconds

    async def client(number: int) -> None:
        while time.perf_counter() < end:
            await ask(port, Random(number), num_tokens, seen)

    await asyncio.gather(*map(client, range(clients)))
    return seen.statuses[200] / seconds


async def overload(port: int, rate: float, num_tokens: int, seconds: float) -> Seen:
    seen, random, tasks = Seen(), Random(1), set()
    loop = asyncio.get_running_loop()
    start = at = loop.time()
    while at < start + seconds:
        at += random.expovariate(rate)
        await asyncio.sleep(max(0.0, at - loop.time()))
        task = asyncio.ensure_future(ask(port, random, num_tokens, seen))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    last = loop.time()
    await asyncio.gather(*tasks)
    print(f"idle {loop.time() - last:.2f} s after the last arrival")
    return seen


def resident_mib(pid: int) -> float:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


async def watched(pid: int, sizes: list[float]) -> None:
    while True:
        sizes.append(resident_mib(pid))
        await asyncio.sleep(0.5)


async def drive(port: int, pid: int, options: argparse.Namespace) -> None:
    await capacity(port, options.concurrency, options.tokens, 2.0)  # warm
    most = await capacity(port, options.concurrency, options.tokens, 5.0)
    print(
        f"capacity {most:.1f} requests/s; now {options.load * most:.1f} for {options.seconds:g} s"
    )
    sizes: list[float] = []
    watching = asyncio.ensure_future(watched(pid, sizes))
    seen = await overload(port, options.load * most, options.tokens, options.seconds)
    watching.cancel()
    cuts = np.percentile(seen.first_s, (50, 99))
    print(
        f"statuses {dict(seen.statuses)}; first token p50 {cuts[0]:.3f} s, p99 {cuts[1]:.3f} s; "
        f"memory {sizes[0]:.0f} MiB at first, {max(sizes):.0f} at most, {sizes[-1]:.0f} at last"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--load", type=float, default=1.2)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--queued", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--python", default=sys.executable, help="the one that serves")
    options = parser.parse_args()
    command = [options.python, "-m", "gptmanager", "serve", "--model", "examples/tiny_llama"]
    command += ["--port", "0", "--threads", "1", "--max-concurrency", str(options.concurrency)]
    command += ["--max-queued-requests", str(options.queued), "--kv-cache-tokens", "16384"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            port = int(
                next(line for line in server.stderr if "http://" in line)
                .split()[-1]
                .rpartition(":")[2]
            )
            asyncio.run(drive(port, server.pid, options))
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
