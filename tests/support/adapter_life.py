"""One life of a manager with a journal, in a process that is to be killed.

Reads JSON lines: first what the host has of each request, then requests, tasks to forget, and how
many more responses it may write. Writes each of them as a JSON line.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import numpy as np

from gptmanager import (
    Delivered,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    PeftCacheManagerConfig,
)

MODEL = "examples/tiny_llama"
_MAY_WRITE = threading.Semaphore(0)


def _adapter(seed: int) -> dict[str, Any]:
    """Weights of rank 4 for the queries of layer 0, so large that they change each token."""
    weights = np.random.default_rng(seed).normal(0, 0.1, (1, 4 * 256)).astype(np.float32)
    return {"lora_weights": weights, "lora_config": np.array([[1, 0, 4]], dtype=np.int32)}


def _request(line: dict[str, Any]) -> InferenceRequest:
    given = {} if line["weights"] is None else _adapter(line["weights"])
    return InferenceRequest.from_tokens(
        *(line["id"], line["prompt"], line["length"]),
        is_streaming=True,
        lora_task_id=line["task"],
        temperature=1.0,
        random_seed=7,
        **given,
    )


def _write(request_id: int, tensors: Any, is_final: bool, error: str) -> None:
    _MAY_WRITE.acquire()
    ids = dict(tensors)["output_ids"][0, 0].tolist() if not error else []
    print(json.dumps({"id": request_id, "ids": ids, "final": is_final, "error": error}), flush=True)


def main(folder: str) -> None:
    had = json.loads(sys.stdin.readline())
    lines: list[dict[str, Any]] = []
    lock = threading.Lock()

    def get(room: int) -> list[InferenceRequest]:
        with lock:
            taken, lines[:] = lines[:], []
        return [_request(line) for line in taken]

    def restore(request_id: int) -> Delivered:
        return Delivered(*had.get(str(request_id), (0, False)))

    params = OptionalParams(
        journal_path=folder,
        restore_cb=restore,
        kv_cache_config=KvCacheConfig(max_tokens=2048, tokens_per_block=8),
        peft_cache_manager_config=PeftCacheManagerConfig(
            num_host_module_layer=960, num_device_module_layer=960
        ),
        max_batch_size=8,
        max_seq_len=128,
        deterministic=True,
        exclude_input_in_output=True,
    )
    fused = ModelType.INFLIGHT_FUSED_BATCHING
    with GptManager(MODEL, fused, 1, None, get, _write, optional_params=params) as manager:
        for text in sys.stdin:
            line = json.loads(text)
            if "forget" in line:
                manager.forget_adapter(line["forget"])
                continue
            if "allow" in line:
                _MAY_WRITE.release(line["allow"])
                continue
            with lock:
                lines.append(line)
            manager.notify()
        manager.wait_idle()


if __name__ == "__main__":
    main(sys.argv[1])
