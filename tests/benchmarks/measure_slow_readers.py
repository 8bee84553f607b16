"""Measure the cost of clients that do not read their streams.

    .venv/bin/python tests/benchmarks/measure_slow_readers.py [--readers 1000]

First, some clients measure how many requests per second `gptmanager serve` answers. Then each of
`--readers` other clients asks for a stream of about 1 MB, and reads nothing. When these requests
have ended, the first clients measure again: with the slow readers still connected, then without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import time
import urllib.request

from measure_overload import HEAD, capacity, resident_mib


def slow_reader(port: int, num_tokens: int) -> socket.socket:
    """Return a connection with a small buffer that has sent its request."""
    body = {"prompt": [5, 6, 7], "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    body |= {"logprobs": 20, "temperature": 1.0}
    data = json.dumps({"model": "tiny_llama", **body}).encode()
    found = socket.socket()
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    found.connect(("127.0.0.1", port))
    found.sendall(f"{HEAD}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return found


def num_open(port: int) -> int:
    """Return the number of requests that run or wait."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    names = ("gptmanager_num_requests_running", "gptmanager_num_requests_waiting")
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(names))


def drive(port: int, pid: int, options: argparse.Namespace) -> None:
    def ask(what: str) -> None:
        rate = asyncio.run(capacity(port, 16, 32, 5.0))
        print(f"{what}: {rate:.1f} requests/s, {resident_mib(pid):.0f} MiB", flush=True)

    asyncio.run(capacity(port, 16, 32, 2.0))  # warm
    ask("before")
    start = time.perf_counter()
    readers = [slow_reader(port, options.tokens) for _ in range(options.readers)]
    time.sleep(1.0)  # until the server has accepted all connections
    while num_open(port):
        time.sleep(0.2)
    seconds = time.perf_counter() - start
    print(f"{options.readers} unread streams have ended after {seconds:.1f} s")
    ask("with slow readers")
    for reader in readers:
        reader.close()
    ask("without slow readers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readers", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--python", default=sys.executable, help="the one that serves")
    options = parser.parse_args()
    command = [options.python, "-m", "gptmanager", "serve", "--model", "examples/tiny_llama"]
    command += ["--port", "0", "--threads", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            port = int(
                next(line for line in server.stderr if "http://" in line)
                .split()[-1]
                .rpartition(":")[2]
            )
            drive(port, server.pid, options)
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
