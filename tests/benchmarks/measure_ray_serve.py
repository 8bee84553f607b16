"""What Ray Serve costs: requests a second and latencies of a manager alone, and of its replicas.

python tests/benchmarks/measure_ray_serve.py  # prints the table of docs/ranks.md; needs Ray
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PORT, SECONDS, TOKENS = 8766, 6.0, 64
PROMPT = "Count from 1 to 12:"
Ask = Callable[[], tuple[float, float]]  # seconds to the first token, and to the end


def measure(new_client: Callable[[], Ask], num_clients: int) -> tuple[float, float, float]:
    """Requests a second; medians of the milliseconds to the first token, and to the end."""
    times: list[tuple[float, float]] = []
    begin, lock = time.monotonic() + 2.0, threading.Lock()

    def run() -> None:
        ask = new_client()
        while (now := time.monotonic()) < begin + SECONDS:
            own = ask()
            if now >= begin:  # before that it warms up
                with lock:
                    times.append(own)

    threads = [threading.Thread(target=run) for _ in range(num_clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, last = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    return len(times) / SECONDS, first, last


def timed(lines: Any) -> tuple[float, float]:
    begin = time.monotonic()
    iterator = iter(lines())
    next(iterator)
    first = time.monotonic()
    count = 1 + sum(1 for _ in iterator)
    assert count >= TOKENS, count
    return first - begin, time.monotonic() - begin


def over_http() -> Ask:
    connection = http.client.HTTPConnection("127.0.0.1", PORT)
    body = {"prompt": PROMPT, "max_new_tokens": TOKENS, "min_length": TOKENS}

    def lines() -> Any:
        connection.request("POST", "/", json.dumps(body))
        return connection.getresponse()

    return lambda: timed(lines)


def in_process(module: Any) -> Ask:
    """The same replica without Ray: its queue, its manager, its lines."""
    replica = module.Replica(str(EXAMPLES / "tiny_llama"))
    prompt = replica._tokenizer.encode(PROMPT).ids

    def lines() -> Any:
        text = module.TextStream(replica._tokenizer, prompt)
        length = {"max_new_tokens": TOKENS, "min_length": TOKENS, "is_streaming": True}
        for token in replica._queue.submit(prompt, **length):
            yield json.dumps({"text": text.push(token)})

    return lambda: timed(lines)


def main() -> None:
    os.environ |= {"PYTHONPATH": str(EXAMPLES), "OMP_NUM_THREADS": "1"}
    sys.path.insert(0, str(EXAMPLES))
    import ray
    import ray_serve_host as module
    from ray import serve

    rows = []
    alone = in_process(module)
    for num_clients in (1, 8, 16):
        rows.append(("alone", num_clients, *measure(lambda: alone, num_clients)))
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"port": PORT})
    for replicas in (1, 2):
        scaling = {"initial_replicas": replicas, "downscale_delay_s": 3600.0}
        serve.run(module.application(EXAMPLES / "tiny_llama", replicas, **scaling))
        for num_clients in (1, 8, 16):
            rows.append((f"Ray, {replicas}", num_clients, *measure(over_http, num_clients)))
        serve.delete("default")
    serve.shutdown()
    for name, num_clients, rate, first, last in rows:
        print(f"| {name} | {num_clients} | {rate:.1f} | {first:.1f} | {last:.0f} |")
    os._exit(0)  # the manager alone runs on


if __name__ == "__main__":
    main()
