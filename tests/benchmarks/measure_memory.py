"""What a manager's memory does over hours, and over many managers: not tests, since they take long.

OMP_NUM_THREADS=1 python tests/benchmarks/measure_memory.py soak [MINUTES] |
    starts [MANAGERS] | bias [N]

`soak`: all kinds of requests, in the order of a seed; what grows after the first third, in MB a
minute. `starts`: a manager after the other. `bias`: N requests with a bias for each of 128k tokens.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import logging
import random
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from gptmanager import (
    CapacitySchedulerPolicy,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.bench import SMALL_LLAMA, random_llama
from gptmanager.callbacks import load_guided_decoding
from gptmanager.testing import RecordingCallbacks, ScriptedModel

MODEL = "examples/tiny_llama"
TINY_LLAMA = {**SMALL_LLAMA, "vocab_size": 512, "num_hidden_layers": 2}
MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION


class EndlessHost:
    """Keeps `in_flight` of `requests` with the manager, and nothing of what it is told."""

    def __init__(self, requests: Iterator[InferenceRequest], in_flight: int) -> None:
        self._requests = requests
        self._in_flight = in_flight
        self._open: dict[int, int] = {}  # id -> responses so far
        self.num_ended = 0
        self.num_errors = 0
        self._stops: set[int] = set()
        self.is_over = threading.Event()

    def get_inference_requests(self, room: int) -> list[InferenceRequest]:
        count = self._in_flight - len(self._open)
        if room >= 0:
            count = min(count, room)
        taken = list(itertools.islice(self._requests, max(0, count)))
        if not (taken or self._open):
            self.is_over.set()
        for request in taken:
            self._open[request.request_id] = 0
        return taken

    def send_response(self, request_id: int, tensors: Any, is_final: bool, error: str) -> None:
        self._open[request_id] += 1
        if request_id % 17 == 3 and self._open[request_id] == 5:
            self._stops.add(request_id)
        if is_final:
            self.num_ended += 1
            self.num_errors += bool(error)
            self._stops.discard(request_id)
            del self._open[request_id]

    def poll_stop_signal(self) -> set[int]:
        return self._stops

    def return_batch_manager_stats(self, record: str) -> None:
        """Not kept."""

    keywords = RecordingCallbacks.keywords


def mixed_requests(vocab_size: int, guided: Any, seed: int = 0) -> Iterator[InferenceRequest]:
    """Without end: streaming, beams, processors, grammars, biases, log probabilities, errors."""

    def process(request_id, logits, tokens, stream, client_id):
        logits[0, 0, 5] += 1.0

    chance = random.Random(seed)
    for request_id in itertools.count():
        more: dict[str, Any] = {"is_streaming": chance.random() < 0.5}
        kind = chance.randrange(16)
        if kind in (0, 1):
            more |= {"temperature": 0.8, "runtime_top_k": 40, "random_seed": request_id}
        elif kind == 2:
            more["beam_width"] = 3
        elif kind == 3:
            more |= {"num_return_sequences": 2, "temperature": 1.1}
        elif kind == 4:
            more["logits_post_processor"] = process
        elif kind == 5 and guided is not None:
            pattern = f"[a-z]{{1,{chance.randrange(1, 100)}}}"
            more["logits_post_processor"] = guided.regex(pattern)
        elif kind == 6:
            more["embedding_bias"] = np.linspace(-1, 1, vocab_size, dtype=np.float32)
        elif kind in (7, 8):
            more |= dict.fromkeys(("return_log_probs", "return_generation_logits"), True)
        elif kind == 9:
            more["stop_words_list"] = [[chance.randrange(vocab_size)] for _ in range(8)]
        elif kind == 10:
            more["temperature"] = -1.0  # refused
        elif kind == 11:
            more |= {"deadline_s": 0.01, "cache_salt": f"tenant {request_id}"}
        elif kind == 12:
            more["draft_input_ids"] = [1, 2, 3]
        elif kind == 13:
            more["return_context_logits"] = True
        elif kind == 14:
            more |= {"repetition_penalty": 1.2, "bad_words_list": [[3, 4]]}
        shared = [7] * chance.randrange(1, 40)
        prompt = shared + [chance.randrange(vocab_size) for _ in range(chance.randrange(1, 40))]
        yield InferenceRequest.from_tokens(request_id, prompt, chance.randrange(1, 60), **more)


def start(source: Any, host: EndlessHost, **options: Any) -> GptManager:
    kv_cache = KvCacheConfig(max_tokens=4096, tokens_per_block=16, enable_block_reuse=True)
    params = OptionalParams(
        **{
            "kv_cache_config": kv_cache, "max_batch_size": 16, "max_num_tokens": 512,
            "idle_poll_s": 0.001, **options,
        }
    )  # fmt: skip
    return GptManager(
        source,
        ModelType.INFLIGHT_FUSED_BATCHING,
        3,
        SchedulerConfig(MAX_UTILIZATION),
        optional_params=params,
        **host.keywords(),
    )


def resident_mb() -> float:
    """Return the resident memory of this process after a garbage collection."""
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 1e6


def trimmed_mb() -> float:
    """Without what the allocator could give back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident_mb()


def slope(points: list[tuple[float, float]]) -> float:
    """MB a minute of (minutes, MB), by least squares, without the first third."""
    kept = np.array(points[len(points) // 3 :])
    return float(np.polyfit(kept[:, 0], kept[:, 1], 1)[0]) if len(kept) > 1 else 0.0


def soak(minutes: float = 15.0, **options: Any) -> None:
    logging.disable(logging.CRITICAL)
    guided = load_guided_decoding(MODEL)
    host = EndlessHost(mixed_requests(512, guided), 24)
    points = []
    with start(MODEL, host, **options) as manager:
        started = time.monotonic()
        while (now := (time.monotonic() - started) / 60) < minutes:
            time.sleep(min(10.0, minutes * 3))
            points.append((now, resident_mb()))
            print(f"{now:5.2f} min {host.num_ended:8} ended {points[-1][1]:8.1f} MB", flush=True)
        manager.shutdown(drain=False)
    print(
        f"{host.num_ended} ended, {host.num_errors} with errors, {slope(points):+.2f} MB a minute"
    )


def starts(count: int = 300) -> None:
    logging.disable(logging.CRITICAL)
    source = (TINY_LLAMA, random_llama(TINY_LLAMA, 7))
    for number in range(count):
        requests = itertools.islice(mixed_requests(TINY_LLAMA["vocab_size"], None, number), 8)
        host = EndlessHost(requests, 8)
        with start(source, host):
            host.is_over.wait()
        if number % (count // 10 or 1) == 0:
            print(f"{number:5} managers {resident_mb():8.1f} MB", flush=True)
    kept = resident_mb()
    print(f"{count} managers: {kept:.1f} MB, trimmed {trimmed_mb():.1f} MB")


def bias(count: int = 6000) -> None:
    logging.disable(logging.CRITICAL)
    size = 128_000
    values = np.where(np.arange(size) % 100, 0, 1).astype(np.float32)
    requests = (
        InferenceRequest.from_tokens(i, [1, 2], 2, embedding_bias=values.copy())
        for i in range(count)
    )
    host = EndlessHost(requests, 8)
    before = resident_mb()
    with start(ScriptedModel(lambda history: 3, vocab_size=size), host):
        while not host.is_over.wait(5):
            print(f"{host.num_ended:6} requests {resident_mb() - before:8.1f} MB", flush=True)
        print(f"{host.num_ended:6} requests {resident_mb() - before:8.1f} MB", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, *arguments = sys.argv[1:] or [""]
    trials = {"soak": soak, "starts": starts, "bias": bias}
    if name not in trials:
        sys.exit(__doc__)
    trials[name](*map(int, arguments))
