"""Sizes of an end-to-end benchmark that takes a second."""

from __future__ import annotations

from dataclasses import replace

from gptmanager.bench.end_to_end.serving_parts import (
    Pressure,
)
from gptmanager.bench.end_to_end.workbench import CPU_SCALE

SMALL = replace(
    CPU_SCALE,
    requests=5,
    lengths=(3, 12),
    batches=(1, 3),
    contexts=(24, 40),
    steps=8,
    peer_requests=3,
    max_batch_size=8,
    max_num_tokens=80,
    max_seq_len=150,
    copy_bytes=1 << 12,
    matmul_width=16,
    pressure=Pressure(6, 5, 100, (3, 6), 512),
    saturated=((6, 4, 5),),
    kv_cache_tokens=2048,
)
