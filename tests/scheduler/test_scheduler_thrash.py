"""A manager's MAX_UTILIZATION does not thrash: half the KV cache that the requests want.

`PYTHONPATH=tests/support python tests/scheduler/test_scheduler_thrash.py` prints the table of
docs/scheduling.md.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
from fuzz import FUZZ

from gptmanager.config import CapacitySchedulerPolicy
from gptmanager.request.inference_request import InferenceRequest
from gptmanager.simulator import simulate
from gptmanager.simulator.comparison import Machine, hypothetical, variant
from gptmanager.simulator.cost_model import CostModel
from gptmanager.simulator.figures import Figures
from gptmanager.simulator.load import SyntheticLoad

# Seconds as on a GPU: generation is bound by memory, a row more costs little; a context is not.
COST = CostModel(fixed=2e-2, context_token=5e-5, generation_row=2e-5, kv_token=1e-8)
NO_EVICT = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION
END_ID = 1


@dataclass
class StoppingLoad(SyntheticLoad):
    """Each output ends after a share of what is asked for, drawn uniformly from `stop_at`."""

    stop_at: tuple[float, float] = (1.0, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        shares = np.random.default_rng(self.seed + 1).uniform(*self.stop_at, self.num_requests)
        self.lengths = np.maximum(1, (self._outputs * shares).astype(int))

    def request(self, number: int) -> InferenceRequest:
        tensors = {**super().request(number).tensors, "end_id": END_ID}
        return InferenceRequest(number, tensors)

    def output(self, number: int) -> Sequence[int]:  # type: ignore[override]
        length = int(self.lengths[number])
        whole = length == self._outputs[number]
        return [0] * length if whole else [0] * (length - 1) + [END_ID]


class Workload(NamedTuple):
    max_batch_size: int
    prompt_len: tuple[int, int]
    output_len: tuple[int, int]
    tokens_per_block: int = 64
    max_num_tokens: int = 2048


WORKLOADS = {
    "chat": Workload(64, (64, 1024), (64, 512)),
    "short": Workload(32, (16, 256), (16, 256), tokens_per_block=32),
    "all alike": Workload(64, (128, 128), (512, 512)),
    "long prompts": Workload(32, (1024, 4096), (64, 512), max_num_tokens=8192),
}
WHOLE, EARLY = (1.0, 1.0), (0.1, 0.8)


def run(
    policy: CapacitySchedulerPolicy,
    workload: Workload,
    stop_at: tuple[float, float],
    seed: int,
    num_requests: int,
) -> Figures:
    load = StoppingLoad(
        num_requests, workload.prompt_len, workload.output_len, seed=seed, stop_at=stop_at
    )
    wanted = float(np.mean(load._prompts + load._outputs)) * workload.max_batch_size
    machine = Machine(
        max_batch_size=workload.max_batch_size,
        max_num_tokens=workload.max_num_tokens,
        kv_cache_tokens=int(wanted / 2),
        tokens_per_block=workload.tokens_per_block,
    )
    longest = workload.prompt_len[1] + workload.output_len[1]
    return simulate(variant(hypothetical(machine, longest), policy, machine), load, COST)


def compare(
    name: str, stop_at: tuple[float, float], seed: int, num_requests: int
) -> tuple[Figures, Figures]:
    workload = WORKLOADS[name]
    return (
        run(NO_EVICT, workload, stop_at, seed, num_requests),
        run(MAX_UTILIZATION, workload, stop_at, seed, num_requests),
    )


# iterations and seconds of GUARANTEED_NO_EVICT by those of MAX_UTILIZATION, at least; the share of
# its context tokens that it computes for paused requests, at most
EXPECTED = {
    ("chat", WHOLE): (1.1, 1.05, 0.15),
    ("chat", EARLY): (1.15, 1.1, 0.05),
    ("short", WHOLE): (1.2, 1.15, 0.2),
    ("short", EARLY): (1.3, 1.25, 0.05),
    ("all alike", WHOLE): (1.2, 1.15, 0.65),
    ("all alike", EARLY): (1.3, 1.3, 0.1),
    ("long prompts", WHOLE): (1.0, 0.97, 0.1),  # prompts fill nearly all of the cache
    ("long prompts", EARLY): (1.0, 0.97, 0.05),
}


@pytest.mark.parametrize("seed", range(min(FUZZ, 2)))
@pytest.mark.parametrize(("name", "stop_at"), EXPECTED)
@pytest.mark.every(3)
def test_half_the_memory_costs_no_throughput(
    name: str, stop_at: tuple[float, float], seed: int
) -> None:
    no_evict, max_utilization = compare(name, stop_at, seed, num_requests=150)

    iterations, seconds, again = EXPECTED[name, stop_at]
    assert no_evict.failed == max_utilization.failed == 0
    assert no_evict.output_tokens == max_utilization.output_tokens
    assert no_evict.iterations / max_utilization.iterations >= iterations
    assert no_evict.makespan_s / max_utilization.makespan_s >= seconds
    assert max_utilization.recomputed_tokens <= again * max_utilization.context_tokens


def main(num_requests: int = 400, num_seeds: int = 3) -> None:
    logging.disable(logging.WARNING)
    print("| load | outputs | throughput | iterations | pauses a request | recomputed |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for name, stop_at in EXPECTED:
        pairs = [compare(name, stop_at, seed, num_requests) for seed in range(num_seeds)]
        seconds = [a.makespan_s / b.makespan_s for a, b in pairs]
        iterations = [a.iterations / b.iterations for a, b in pairs]
        pauses = sum(b.pauses for _, b in pairs) / num_requests / num_seeds
        again = sum(b.recomputed_tokens for _, b in pairs) / sum(b.context_tokens for _, b in pairs)
        print(
            f"| {name} | {'whole' if stop_at == WHOLE else 'stop early'} "
            f"| {np.mean(seconds):.2f} ({min(seconds):.2f}) | {np.mean(iterations):.2f} "
            f"| {pauses:.2f} | {again:.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
