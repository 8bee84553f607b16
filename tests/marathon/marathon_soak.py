"""A soak of one manager whose KV cache is tight: is every answer the one of a lone run?

make marathon-soak MINUTES=15

Under MAX_UTILIZATION, with block reuse, requests with adapters, grammars, drafts, beams, streams
and seeds keep a batch full, and some are cancelled. Each is a canary: its answer is held against
the one that it had alone. Prints JSON, and exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from memory_growth import lasting_growth

from gptmanager import (
    CapacitySchedulerPolicy,
    FinishReason,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    PeftCacheManagerConfig,
    SchedulerConfig,
)
from gptmanager.callbacks import RequestQueue, load_guided_decoding
from gptmanager.config import PromptLookup

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny_llama"
NUM_CANARIES, NUM_ADAPTERS = 60, 5
OPEN = 24  # requests that the manager has at a time
PAUSES_A_MINUTE, MOST_MB_A_MINUTE = 500 / 15, 1.0
_SLOPE_S = 120.0  # the resident set is judged in longer runs
# inputs and outputs of the model's matrices by module id, as docs/adapters.md has them
_MODULES = {1: (128, 128), 2: (128, 64), 3: (128, 64), 4: (128, 128), 5: (128, 384), 6: (384, 128),
            7: (128, 384)}  # fmt: skip
_LAYERS, _RANK = 4, 8


@dataclass
class Canary:
    """`make` gives a new request each time. `expected`: its outputs alone."""

    kind: str
    tensors: dict[str, Any]
    keywords: dict[str, Any]
    expected: Any = None

    def make(self, request_id: int) -> InferenceRequest:
        return InferenceRequest(request_id, dict(self.tensors), **self.keywords)


def adapter(task: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(task)
    rows, config = [], []
    for layer in range(_LAYERS):
        for module, (inputs, outputs) in _MODULES.items():
            rows.append(torch.randn(_RANK * (inputs + outputs), generator=generator) / 20)
            config.append((module, layer, _RANK))
    weights = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"lora_task_id": task, "lora_weights": weights, "lora_config": config}


def canaries(chance: random.Random, count: int) -> list[Canary]:
    guided = load_guided_decoding(MODEL)
    grammars = [
        guided.regex(r"[A-Z][a-z]{2,5} (had|lost) a (red|blue|green) ball\."),
        guided.choice(["red", "blue", "green", "red and blue and green"]),
        guided.json_schema({"type": "array", "items": {"enum": [7, 8, 9]}, "maxItems": 12}),
    ]
    adapters = [adapter(task) for task in range(NUM_ADAPTERS)]
    shared = [chance.randrange(2, 600) for _ in range(24)]
    kinds = ("greedy", "seeded", "adapter", "guided", "drafts", "beams", "stream", "adapter_beams")
    found = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        prompt = shared[: chance.choice([0, 8, 24])]
        prompt = prompt + [chance.randrange(2, 600) for _ in range(chance.randint(3, 20))]
        tensors = {"input_ids": prompt, "request_output_len": chance.randint(24, 64)}
        keywords: dict[str, Any] = {}
        if kind in ("seeded", "stream", "guided"):
            tensors |= {"temperature": 1.0, "runtime_top_k": 20, "random_seed": number}
        if kind.startswith("adapter"):
            tensors |= adapters[number % NUM_ADAPTERS]
        if kind == "guided":
            tensors["end_id"] = 0
            keywords["logits_post_processor"] = grammars[number // 8 % len(grammars)]
        if kind == "drafts":
            tensors["draft_input_ids"] = [chance.randrange(2, 600) for _ in range(3)]
        if kind.endswith("beams"):
            tensors["beam_width"] = 2
        keywords["is_streaming"] = kind == "stream"
        keywords["priority"] = chance.choice([0.3, 0.5, 0.5, 0.7])
        found.append(Canary(kind, tensors, keywords))
    return found


class Run:
    """A manager with its queue. Counts what the contract promises: one final response each."""

    def __init__(
        self,
        *,
        max_tokens: int,
        max_batch_size: int,
        max_active: int | None = OPEN,
        max_waiting: int | None = None,
    ) -> None:
        self.queue = RequestQueue(exclude_input_in_output=True, max_pending=None)
        self.open: set[int] = set()
        self.violations: list[str] = []
        self.counts: Counter[str] = Counter()
        params = OptionalParams(
            kv_cache_config=KvCacheConfig(
                max_tokens=max_tokens, tokens_per_block=8, enable_block_reuse=True
            ),
            # two pages on the device, each for one adapter
            peft_cache_manager_config=PeftCacheManagerConfig(
                num_host_module_layer=12 * _RANK * _LAYERS * len(_MODULES),
                num_device_module_layer=6 * _LAYERS * len(_MODULES),
            ),
            max_batch_size=max_batch_size,
            max_active_requests=max_active,
            max_waiting_requests=max_waiting,
            max_num_tokens=128,
            max_seq_len=160,
            deterministic=True,
            exclude_input_in_output=True,
            speculative_decoding_config=PromptLookup(),
        )
        self.manager = GptManager(
            MODEL,
            ModelType.INFLIGHT_FUSED_BATCHING,
            2,
            SchedulerConfig(CapacitySchedulerPolicy.MAX_UTILIZATION),
            self._get,
            self._send,
            self.queue.poll_stop_signal,
            self._count,
            params,
        )
        self.queue.attach(self.manager)

    def submit(self, canary: Canary, request_id: int) -> Any:
        return self.queue.submit(canary.make(request_id))

    def _get(self, room: int) -> list[InferenceRequest]:
        fetched = self.queue.get_inference_requests(room)
        self.open.update(request.request_id for request in fetched)
        self.counts["fetched"] += len(fetched)
        return fetched

    def _send(self, request_id: int, tensors: Any, is_final: bool, error: str) -> None:
        if request_id not in self.open:
            self.violations.append(f"request {request_id} was answered after its final response")
        if is_final:
            self.open.discard(request_id)
            self.counts["finals"] += 1
        self.queue.send_response(request_id, tensors, is_final, error)

    def _count(self, record: str) -> None:
        statistics = json.loads(record)
        self.counts["iterations"] += 1
        self.counts["pauses"] += statistics["Paused Requests"]

    def faults(self) -> list[str]:
        """What is wrong with an idle manager, and with the responses that it has sent."""
        self.manager.wait_idle(30)
        report, found = self.manager.audit(), list(self.violations)
        found += [f"request {it} has no final response" for it in sorted(self.open)]
        if self.counts["finals"] != self.counts["fetched"]:
            found.append(f"{self.counts['finals']} finals, {self.counts['fetched']} requests")
        if not report.ok or self.manager.exception is not None:
            found.append(f"at the end: {report.problems[:3]} {self.manager.exception!r}")
        self.counts["adapter_evictions"] = report.adapters.counts.device_evictions
        return found

    def end(self) -> None:
        self.manager.shutdown(timeout=60)
        self.queue.close()


def learn(found: list[Canary]) -> None:
    """What each answers alone, in a manager with room."""
    run = Run(max_tokens=4096, max_batch_size=8)
    for number, canary in enumerate(found):
        canary.expected = run.submit(canary, number + 1).result(600).output_ids
    if run.counts["pauses"]:
        raise AssertionError("a lone request was paused")
    run.end()


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def soak(
    minutes: float,
    seed: int,
    most_requests: float = math.inf,
    num_canaries: int = NUM_CANARIES,
) -> dict[str, Any]:
    """With `most_requests` it is a short one, of which no amounts are demanded."""
    chance = random.Random(seed)
    found = canaries(chance, num_canaries)
    learn(found)
    run = Run(max_tokens=264, max_batch_size=8)
    ends, seen, failures = Counter[str](), Counter[str](), []
    pending: deque[tuple[Any, Canary, int]] = deque()
    samples: list[tuple[float, float]] = []
    began = last = time.monotonic()
    next_id = 0
    goes_on = True
    while goes_on or pending:
        now = time.monotonic()
        goes_on = now - began < 60 * minutes and next_id < most_requests
        if goes_on and len(pending) < OPEN + 6:
            next_id += 1
            canary = chance.choice(found)
            pending.append((run.submit(canary, next_id), canary, next_id))
        elif pending and chance.random() < 0.02:
            run.queue.cancel(chance.choice(pending)[2])
            time.sleep(0.002)
        else:
            time.sleep(0.005)
        for _ in range(len(pending)):
            handle, canary, number = pending.popleft()
            if not handle.done():
                pending.append((handle, canary, number))
                continue
            ends[judge_handle(handle, canary, number, failures)] += 1
            seen[canary.kind] += 1
        if now - last > 1:
            last = now
            samples.append((now - began, resident_mb()))
            report = run.manager.audit()
            if not report.ok:
                failures.append(f"audit: {report.problems[:3]}")
    failures += run.faults()
    run.end()
    if most_requests == math.inf:
        failures += _missed_bars(minutes, run.counts, ends, samples)
    return {
        "minutes": minutes if most_requests == math.inf else None,
        "seed": seed,
        "requests": sum(ends.values()),
        "ends": dict(sorted(ends.items())),
        "kinds": dict(sorted(seen.items())),
        **dict(sorted(run.counts.items())),
        "resident_mb": [round(size, 1) for _, size in samples[:: max(1, len(samples) // 10)]],
        "mb_a_minute": rise_of(minutes, samples),
        "failures": failures[:20],
        "num_failures": len(failures),
    }


def judge_handle(handle: Any, canary: Canary, number: int, failures: list[str]) -> str:
    error = handle.exception()
    if error is not None:
        failures.append(f"request {number} ({canary.kind}): {error!r}")
        return "failed"
    result = handle.result()
    outputs = [tuple(text) for text in result.output_ids]
    if FinishReason.CANCELLED in result.finish_reasons:
        is_right = len(outputs) > 1 or outputs[0] == canary.expected[0][: len(outputs[0])]
        kind = "cancelled"
    else:
        is_right = outputs == [tuple(text) for text in canary.expected]
        kind = "equal"
    if not is_right:
        failures.append(f"request {number} ({canary.kind}) is not as alone: {outputs}")
        return "unequal"
    return kind


def rise_of(minutes: float, samples: list[tuple[float, float]]) -> float | None:
    """MB a minute of the resident set after warming up; None: the run was too short."""
    if 60 * minutes < _SLOPE_S:
        return None
    return lasting_growth(dict(samples), 60 * minutes)


def _missed_bars(
    minutes: float, counts: Counter[str], ends: Counter[str], samples: list[tuple[float, float]]
) -> list[str]:
    missed = []
    rise = rise_of(minutes, samples)
    if rise is not None and rise >= MOST_MB_A_MINUTE:
        missed.append(f"the resident set grows by {rise} MB a minute")
    least = max(1, math.floor(PAUSES_A_MINUTE * minutes))
    if counts["pauses"] < least:
        missed.append(f"{counts['pauses']} pauses, at least {least} must be: raise the load")
    if not counts["adapter_evictions"]:
        missed.append("no adapter has left the device: its pages are not tight")
    missed += [f"no request ended as {name}" for name in ("equal", "cancelled") if not ends[name]]
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    told = soak(options.minutes, options.seed)
    print(json.dumps(told))
    return 1 if told["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
