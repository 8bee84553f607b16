"""Measures how max_batch_size and max_num_tokens change throughput and latency on this machine.

    python examples/sweep_parameters.py

Prints the tables of docs/parameters.md. Each point is the best of three runs. The points run in
turn, so other work on the machine does not hit one point alone. It uses one thread: on a shared
machine two threads wait for each other.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace

import torch
from rich.progress import track

from gptmanager import KvCacheConfig, OptionalParams, SchedulerConfig
from gptmanager.bench import SMALL_LLAMA, Figures, Load, random_llama, run_manager

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
NUM_TOKENS = (64, 128, 256, 512, 1024, 2048)
ROUNDS = 3

MANY = OptionalParams(
    kv_cache_config=KvCacheConfig(max_tokens=32768, tokens_per_block=32),
    max_batch_size=64,
    max_num_tokens=2048,
    max_seq_len=640,
    enable_chunked_context=True,
)


def sweep(load: Load, name: str, values: tuple[int, ...]) -> dict[int, Figures]:
    """The best of `ROUNDS` runs at each value of one option."""
    source = (SMALL_LLAMA, random_llama(SMALL_LLAMA, load.seed))
    requests = load.requests(SMALL_LLAMA["vocab_size"])
    best: dict[int, Figures] = {}
    for value in track(values * ROUNDS, name, transient=True):
        figures = run_manager(source, requests, replace(MANY, **{name: value}), SchedulerConfig())
        if value not in best or figures.seconds < best[value].seconds:
            best[value] = figures
    return best


def print_table(name: str, best: dict[int, Figures]) -> None:
    print(f"\n| {name} | output tokens/s | first token, median ms | ms a token, median |")
    print("| ---: | ---: | ---: | ---: |")
    for value, figures in best.items():
        first = figures.latencies["time_to_first_token_ms"]["p50"]
        each = figures.latencies["time_per_output_token_ms"]["p50"]
        print(f"| {value} | {figures.tokens_per_second:.0f} | {first:.0f} | {each:.1f} |")


def main() -> None:
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    print(f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, 1 thread, load {load:.1f}")
    generating = Load(num_requests=64, prompt_len=(16, 16), output_len=(24, 24))
    print_table("max_batch_size", sweep(generating, "max_batch_size", BATCH_SIZES))
    reading = Load(num_requests=24, prompt_len=(256, 512), output_len=(16, 16))
    print_table("max_num_tokens", sweep(reading, "max_num_tokens", NUM_TOKENS))
    print(f"load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
