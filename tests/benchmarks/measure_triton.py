"""Measures what Triton's protocol over gRPC costs: streams of `tensorrt_llm`, beside the same load
in one process through `RequestQueue`.

    .venv/bin/python tests/benchmarks/measure_triton.py [--clients 64] [--runs 3]

As `measure_serving.py`, whose model, load and busy neighbour these are.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import torch
from measure_serving import compare, in_process, manager, prompts, save_model
from tritonclient.grpc import service_pb2 as pb

from gptmanager.callbacks import AsyncRequestQueue

_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"


def message(prompt: list[int], num_tokens: int) -> bytes:
    found = pb.ModelInferRequest(model_name="tensorrt_llm", id="1")
    for name, datatype, array in (
        ("input_ids", "INT32", np.array([prompt], dtype=np.int32)),
        ("input_lengths", "INT32", np.array([[len(prompt)]], dtype=np.int32)),
        ("request_output_len", "INT32", np.array([[num_tokens]], dtype=np.int32)),
        ("streaming", "BOOL", np.array([[True]])),
    ):
        found.inputs.add(name=name, datatype=datatype, shape=array.shape)
        found.raw_input_contents.append(array.tobytes())
    return found.SerializeToString()


async def one_client(channel: grpc.aio.Channel, prompt: list[int], num_tokens: int) -> float:
    """Seconds to the first response."""
    start = time.perf_counter()
    call = channel.stream_stream(_METHOD)()
    await call.write(message(prompt, num_tokens))
    await call.done_writing()
    answers, first = 0, 0.0
    while (await call.read()) is not grpc.aio.EOF:
        answers += 1
        first = first or time.perf_counter() - start
    if answers != num_tokens:
        raise RuntimeError(f"{answers} responses came")
    return first


def clients(port: int, count: int, num_tokens: int, seed: int, out: object) -> None:
    """In a process: all clients at once, and what they took."""

    async def main() -> tuple[float, list[float], float]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            await channel.channel_ready()
            wall, cpu = time.perf_counter(), time.process_time()
            asked = prompts(count, seed)
            work = (one_client(channel, it, num_tokens) for it in asked)
            firsts = await asyncio.gather(*work)
            return time.perf_counter() - wall, firsts, time.process_time() - cpu

    wall, firsts, cpu = asyncio.run(main())
    out.put((count * num_tokens / wall, statistics.median(firsts), cpu / wall))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder))
        command = [sys.executable, "-m", "gptmanager", "serve", "--model", str(model)]
        command += ["--port", "0", "--threads", "1", "--kv-cache-tokens", str(1 << 16)]
        with subprocess.Popen(
            [*command, "--grpc-port", "0"], stderr=subprocess.PIPE, text=True
        ) as server:
            try:
                told = (line for line in server.stderr if "gRPC" in line)
                port = int(next(told).partition(",")[0].rpartition(":")[2])
                queue = AsyncRequestQueue(max_pending=None, exclude_input_in_output=True)
                with queue, manager(model, queue) as running:
                    queue.attach(running)
                    compare("gRPC", partial(in_process, clients, port), queue, options)
            finally:
                server.terminate()


if __name__ == "__main__":
    main()
