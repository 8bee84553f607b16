"""Recorded runs of whole managers over scripted models: chosen ones and random ones."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from gptmanager import (
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.errors import ManagerDeadError
from gptmanager.recorder.recording_file import Recording, read_recording
from gptmanager.testing import ContractChecker, RecordingCallbacks, ScriptedModel

VOCAB_SIZE = 50
NO_EVICT = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION
STATIC_BATCH = CapacitySchedulerPolicy.STATIC_BATCH


def next_token(history: list[int]) -> int:
    """A function of the last tokens, so that outputs differ and stop words come up."""
    return (history[-1] * 31 + history[len(history) // 2] * 7 + len(history)) % VOCAB_SIZE


class ScheduledHost(RecordingCallbacks):
    """Gives requests, stops and failures of SendResponse when their turn has come.

    `script`: for each call of Get from the first on, the requests that have come in by then.
    `stop_after`: by request, the polls after which it is stopped. `failing`: requests whose
    streamed responses cannot be delivered.
    """

    def __init__(
        self,
        script: list[list[InferenceRequest]],
        stop_after: dict[int, int] | None = None,
        failing: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__()
        self._script = script
        self._stop_after = stop_after or {}
        self._failing = failing
        self._polls = 0
        self.checker = ContractChecker(
            super().get_inference_requests, super().send_response, tolerates_duplicates=True
        )

    def get_inference_requests(self, max_num_requests: int) -> list[InferenceRequest]:
        if self._script:
            self._waiting.extend(self._script.pop(0))
        return self.checker.get_inference_requests(max_num_requests)

    def send_response(self, request_id: int, tensors: Any, is_final: bool, error: str) -> None:
        self.checker.send_response(request_id, tensors, is_final, error)
        if request_id in self._failing and not is_final:
            raise ConnectionError("the client has gone")

    def poll_stop_signal(self) -> set[int]:
        self._polls += 1
        due = {i for i, polls in self._stop_after.items() if self._polls >= polls}
        return super().poll_stop_signal() | due

    @property
    def has_given_all(self) -> bool:
        return not self._script and not self._waiting


def serve(
    host: ScheduledHost,
    path: Path | None,
    policy: CapacitySchedulerPolicy = NO_EVICT,
    *,
    kv_cache: KvCacheConfig | None = None,
    chunking: ContextChunkingPolicy | None = None,
    model: Any = None,
    model_type: ModelType = ModelType.INFLIGHT_FUSED_BATCHING,
    **options: Any,
) -> None:
    """Run a manager to the end of what `host` gives, or until `model` fails."""
    params = OptionalParams(
        kv_cache_config=kv_cache or KvCacheConfig(max_tokens=96, tokens_per_block=4),
        idle_poll_s=0.0,
        **{"max_batch_size": 4, "max_num_tokens": 32, "max_seq_len": 64},
    )
    for name, value in {"recording_path": path, **options}.items():
        setattr(params, name, value)
    with GptManager(
        model or ScriptedModel(next_token, vocab_size=VOCAB_SIZE),
        model_type,
        3,
        SchedulerConfig(policy, chunking),
        optional_params=params,
        **host.keywords(),
    ) as manager:
        with suppress(ManagerDeadError):
            while not host.has_given_all:
                assert manager.wait_idle(30)
            assert manager.wait_idle(30)
        host.checker.check(manager)


def record(path: Path, host: ScheduledHost, *positional: Any, **keywords: Any) -> Recording:
    """Call `serve`, and return the recording; with `black_box_path`, read that file instead."""
    serve(host, None if "black_box_path" in keywords else path, *positional, **keywords)
    return read_recording(path)


class CrashingModel(ScriptedModel):
    """Runs so many steps, then raises."""

    def __init__(self, num_steps: int) -> None:
        super().__init__(next_token, vocab_size=VOCAB_SIZE)
        self.num_steps = num_steps

    def forward(self, batch: Any, kv_pool: Any) -> Any:
        if self.num_forwards == self.num_steps:
            raise RuntimeError("the device is on fire")
        return super().forward(batch, kv_pool)


def request(request_id: int, prompt_len: int, max_new_tokens: int, **more: Any) -> InferenceRequest:
    prompt = [(request_id * 13 + i * 5) % VOCAB_SIZE for i in range(prompt_len)]
    return InferenceRequest.from_tokens(request_id, prompt, max_new_tokens, **more)


def random_request(chance: np.random.Generator, request_id: int) -> InferenceRequest:
    more: dict[str, Any] = {"is_streaming": bool(chance.integers(2))}
    if chance.random() < 0.3:
        end_id = int(chance.integers(VOCAB_SIZE))
        more["end_id"] = [end_id, end_id * 7 % VOCAB_SIZE][: 1 + request_id % 2]
    if chance.random() < 0.3:
        more["stop_words_list"] = [
            chance.integers(0, VOCAB_SIZE, chance.integers(1, 3)).tolist() for _ in range(3)
        ]
    if chance.random() < 0.3:
        more["priority"] = float(chance.integers(3)) / 4
    if chance.random() < 0.2:
        more |= {"temperature": 0.8, "random_seed": int(chance.integers(1 << 40))}
    if chance.random() < 0.1:
        more["temperature"] = -1.0  # refused
    if chance.random() < 0.1:
        more["queue_timeout_s"] = 0.001
    if chance.random() < 0.2:
        more["beam_width"] = int(chance.integers(2, 4))
    if request_id % 3 == 0:
        more["retention_priority"] = request_id * 37 % 101
    if request_id % 2:  # a replay has none of it
        names = "return_log_probs", "return_generation_logits", "return_context_logits"
        more |= dict.fromkeys(names, True)
    if request_id % 4 == 2:  # fewer tokens than a search looks at
        more["embedding_bias"] = np.where(np.arange(VOCAB_SIZE) % 17, -np.inf, 0)
    prompt_len, output_len = chance.integers(1, 28), chance.integers(1, 24)
    shared = [7] * int(prompt_len)
    if chance.random() < 0.5:
        shared = chance.integers(0, VOCAB_SIZE, prompt_len).tolist()
    return InferenceRequest.from_tokens(request_id, shared, int(output_len), **more)


def random_run(seed: int, path: Path, **more: Any) -> Recording:
    """One of all kinds of loads, policies and options. `more`: options and `model`."""
    chance = np.random.default_rng(seed)
    count = int(chance.integers(4, 13))
    requests = [random_request(chance, i) for i in range(count)]
    if chance.random() < 0.3:
        requests.append(random_request(chance, 0))  # the id again, perhaps while it is active
    script: list[list[InferenceRequest]] = [[] for _ in range(int(chance.integers(1, 30)))]
    for item in requests:
        script[int(chance.integers(len(script)))].append(item)
    ids = chance.integers(0, count, 2).tolist()
    host = ScheduledHost(
        script,
        {ids[0]: int(chance.integers(1, 40))},
        frozenset(ids[1:] if chance.random() < 0.3 else []),
    )
    policy = CapacitySchedulerPolicy(int(chance.integers(3)))
    chunked = bool(chance.integers(2)) or None
    ahead = [{}, {"run_ahead": 1}, {"enable_trt_overlap": True}][int(chance.integers(3))]
    options = {
        **ahead,
        "enable_chunked_context": chunked,
        "max_active_requests": [None, "auto", 2][int(chance.integers(3))],
        "max_batch_size": int(chance.integers(1, 6)),
    }
    kv_cache = KvCacheConfig(
        max_tokens=int(chance.integers(14, 24)) * 4,
        tokens_per_block=4,
        enable_block_reuse=bool(chance.integers(2)),
    )
    chunking = None
    if chunked:
        chunking = [None, *ContextChunkingPolicy][int(chance.integers(3))]
    return record(path, host, policy, kv_cache=kv_cache, chunking=chunking, **options, **more)
