"""How large the end-to-end benchmark is: one size for a large GPU, one for a CPU."""

from __future__ import annotations

from dataclasses import dataclass

from gptmanager.bench.pressure import Pressure

SATURATED = ((128, 128, 4096), (1000, 1000, 512), (2048, 128, 768))  # in, out, requests


@dataclass(frozen=True, slots=True)
class Scale:
    """Lengths in tokens. Steps are timed at all `batches` with the first of `contexts`; with the
    others at all but the largest.
    """

    requests: int
    lengths: tuple[int, int]  # of prompts and outputs, both ends included
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    steps: int
    peer_requests: int
    max_batch_size: int
    max_num_tokens: int
    max_seq_len: int
    copy_bytes: int
    product_width: int
    pressure: Pressure
    saturated: tuple[tuple[int, int, int], ...] = ()
    kv_cache_tokens: int | None = None


GPU_SCALE = Scale(256, (100, 1024), (1, 32, 128, 256), (1024, 4096), 64, 64, 256, 8192, 8192,
                  4 << 30, 8192, Pressure(512, 128, 1024, (64, 512), 65536), SATURATED)  # fmt: skip
CPU_SCALE = Scale(16, (16, 128), (1, 8), (128,), 16, 16, 64, 1024, 1024, 64 << 20, 1024,
                  Pressure(24, 16, 128, (8, 64), 1024), kv_cache_tokens=16384)  # fmt: skip
