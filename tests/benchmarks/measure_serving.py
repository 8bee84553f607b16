"""Measures what HTTP costs: streaming clients of `gptmanager serve`, beside the same load in one
process through `RequestQueue`.

    .venv/bin/python tests/benchmarks/measure_serving.py [--clients 64] [--runs 3]

Both sides serve the benchmark's small model with one thread for its products. The clients are one
process, which reads every event. Beside the load through `RequestQueue` a process is as busy as
the clients were in the run before. Runs alternate; each ratio is one of two neighbouring runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import statistics
import string
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gptmanager import GptManager, KvCacheConfig, ModelType, OptionalParams, SchedulerConfig
from gptmanager.bench.load import SHAPES, random_llama
from gptmanager.callbacks import AsyncRequestQueue

PROMPT_LEN = 64
LONE = 20  # requests of a lone client, one after the other


def vocabulary(size: int) -> list[str]:
    """Tokens that are bytes, or words with a space before them."""
    random = Random(0)
    words = dict.fromkeys(pre_tokenizers.ByteLevel.alphabet())
    while len(words) < size:
        words["Ġ" + "".join(random.choices(string.ascii_lowercase, k=random.randint(2, 7)))] = None
    return list(words)


def save_model(folder: Path, shape: str = "small", dtype: torch.dtype = torch.float32) -> Path:
    """A model of random weights, with a tokenizer whose tokens are words."""
    config = {**SHAPES[shape], "dtype": str(dtype).removeprefix("torch.")}
    weights = random_llama(config, 0, dtype=dtype)
    save_file(
        {name: value.contiguous() for name, value in weights.items()},
        folder / "model.safetensors",
    )
    (folder / "config.json").write_text(json.dumps(config))
    words = {word: i for i, word in enumerate(vocabulary(config["vocab_size"]))}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def prompts(count: int, seed: int, length: int = PROMPT_LEN) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(5, 600) for _ in range(length)] for _ in range(count)]


# Over HTTP -----------------------------------------------------------------------------------


async def one_client(
    port: int, name: str, prompt: list[int], num_tokens: int
) -> tuple[float, float, int]:
    """Seconds to the first and to the last event of a token, and how many tokens were counted."""
    body = {
        "model": name, "prompt": prompt, "max_tokens": num_tokens, "stream": True,
        "ignore_eos": True, "temperature": 0, "stream_options": {"include_usage": True},
    }  # fmt: skip
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    start, first, last, rest = time.perf_counter(), 0.0, 0.0, b""
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    while piece := await reader.read(65536):
        rest = rest[-2000:] + piece  # the usage is in the last events
        if b"data: {" in piece:
            now = time.perf_counter() - start
            first, last = first or now, now
    writer.close()
    counted = re.findall(rb'"completion_tokens": ?([0-9]+)', rest)
    if not counted:
        raise RuntimeError(f"no usage came: {rest!r}")
    return first, last, int(counted[-1])


def clients(port: int, name: str, count: int, num_tokens: int, seed: int, out: object) -> None:
    """In a process: all clients at once, and what they took."""

    async def main() -> list[tuple[float, float, int]]:
        if count == 1:
            return [await one_client(port, name, it, num_tokens) for it in prompts(LONE, seed)]
        asked = prompts(count, seed)
        return await asyncio.gather(*(one_client(port, name, it, num_tokens) for it in asked))

    wall, cpu = time.perf_counter(), time.process_time()
    found = asyncio.run(main())
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    first = statistics.median(it[0] for it in found)
    out.put((count * num_tokens / wall, first, cpu / wall))  # type: ignore[attr-defined]


def over_http(port: int, name: str, count: int, num_tokens: int, seed: int):
    """Tokens a second, median seconds to the first, and the clients' share of a core."""
    return in_process(clients, port, name, count, num_tokens, seed)


def in_process(target, *args):
    context = multiprocessing.get_context("spawn")
    out = context.SimpleQueue()
    process = context.Process(target=target, args=(*args, out))
    process.start()
    found = out.get()
    process.join()
    return found


# In one process ------------------------------------------------------------------------------


def burn(share: float, parent: int) -> None:
    """Uses `share` of a core, in short pieces, until its parent ends it."""
    while os.getppid() == parent:
        until = time.perf_counter() + 0.004 * share
        while time.perf_counter() < until:
            pass
        time.sleep(0.004 * (1 - min(share, 0.99)))


def through_queue(queue: AsyncRequestQueue, count: int, num_tokens: int, seed: int, share: float):
    """Tokens a second, and median seconds to the first."""
    context = multiprocessing.get_context("spawn")
    busy = context.Process(target=burn, args=(share, os.getpid()), daemon=True)
    busy.start()
    time.sleep(1.0)  # until it is busy

    async def one(prompt: list[int]) -> float:
        first = 0.0
        start = time.perf_counter()
        generation = queue.submit(prompt, num_tokens, is_streaming=True, end_id=-1, timeout=0)
        async for _ in generation:
            first = first or time.perf_counter() - start
        return first

    async def main() -> list[float]:
        if count == 1:
            return [await one(it) for it in prompts(LONE, seed)]
        return await asyncio.gather(*map(one, prompts(count, seed)))

    start = time.perf_counter()
    firsts = asyncio.run(main())
    seconds = time.perf_counter() - start
    busy.kill()
    busy.join()
    return count * num_tokens / seconds, statistics.median(firsts)


def manager(folder: Path, queue: AsyncRequestQueue) -> GptManager:
    cache = KvCacheConfig(max_tokens=1 << 16, enable_block_reuse=True)
    params = OptionalParams(kv_cache_config=cache, exclude_input_in_output=True)
    callbacks = queue.get_inference_requests, queue.send_response, queue.poll_stop_signal
    kind = ModelType.INFLIGHT_FUSED_BATCHING
    return GptManager(str(folder), kind, 1, SchedulerConfig(), *callbacks, None, params)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--python", default=sys.executable, help="the one that serves")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder))
        command = [options.python, "-m", "gptmanager", "serve", "--model", str(model)]
        command += ["--port", "0", "--threads", "1", "--kv-cache-tokens", str(1 << 16)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
            try:
                url = next(line for line in server.stderr if "http://" in line).split()[-1]
                port = int(url.rpartition(":")[2])
                queue = AsyncRequestQueue(max_pending=None, exclude_input_in_output=True)
                with queue, manager(model, queue) as running:
                    queue.attach(running)
                    compare("HTTP", partial(over_http, port, model.name), queue, options)
            finally:
                server.terminate()


def compare(front: str, served, queue: AsyncRequestQueue, options) -> None:
    """`served(clients, tokens, seed)`: tokens a second, seconds to the first, clients' core."""
    served(options.clients, 20, 1)  # warm
    through_queue(queue, options.clients, 20, 1, 0.1)
    ratios, waits = [], []
    for run in range(options.runs):
        seed = 10 + run
        ours, first, share = served(options.clients, options.tokens, seed)
        own, _ = through_queue(queue, options.clients, options.tokens, seed, share)
        lone = served(1, 8, 100 + run)[1]
        lone_own = through_queue(queue, 1, 8, 100 + run, 0.0)[1]
        ratios.append(ours / own)
        waits.append(1e3 * (lone - lone_own))
        print(
            f"{front} {ours:8,.0f} tokens/s   RequestQueue {own:8,.0f}   ratio {ratios[-1]:.3f}   "
            f"clients' core {share:.2f}   first token of {options.clients} {1e3 * first:.1f} ms, "
            f"of one {1e3 * lone:.2f} ms, without {front} {1e3 * lone_own:.2f} ms",
            flush=True,
        )
    print(f"median ratio {statistics.median(ratios):.3f}, {statistics.median(waits):+.2f} ms")


if __name__ == "__main__":
    main()
