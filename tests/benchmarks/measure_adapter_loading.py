"""How long iterations take while an adapter is read, written and copied beside them.

`python tests/benchmarks/measure_adapter_loading.py [small | qwen2-0.5b] [dtype]` runs requests that
generate, and brings adapters of rank 64 for all modules, one after the other. It prints
iterations as multiples of the median of quiet ones around: those while nothing is loaded, which are
what the machine does by itself, and those while an adapter is on its way. It is quiet for as long
as an adapter takes, so that both see as much of what else runs on the machine. Every other adapter
is left to threads, also where the loop would do it between its steps: their iterations are told
apart. Of those in which the loop had a turn it also tells how many were within 1.2 times the median
but for the turn.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch

from gptmanager import GptManager, ModelType, OptionalParams
from gptmanager.bench.load import SHAPES, random_llama
from gptmanager.callbacks import RequestQueue
from gptmanager.models.decoder.lora_modules import lora_modules
from gptmanager.models.read_spec import read_spec
from gptmanager.request.adapter_modules import LoraModule

RANK, REQUESTS, ADAPTERS, QUIET_S, LIMIT = 64, 16, 8, 2.0, 1.2
LEAST_TURN = 0.001  # seconds; a shorter piece only reads the clock
LENGTH = 8192  # tokens of each request: all outlast the measurement


def all_modules(config: Any) -> dict[int, LoraModule]:
    """But attn_qkv, whose parts are there."""
    return {i: it for i, it in lora_modules(read_spec(config)).items() if i != 0}


def num_elements(config: Any) -> int:
    """Return the number of elements of an adapter, without the padding of its rows."""
    return (
        RANK * read_spec(config).num_layers * sum(it.width for it in all_modules(config).values())
    )


def adapter(config: Any, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    spec, modules = read_spec(config), all_modules(config)
    rows = [[i, layer, RANK] for layer in range(spec.num_layers) for i in modules]
    width = RANK * max(it.width for it in modules.values())
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(rows), width, generator=generator).mul_(0.01), torch.tensor(rows)


def main(shape: str = "small", dtype: str = "bfloat16") -> None:
    config = SHAPES[shape] | {"max_position_embeddings": LENGTH}
    state = random_llama(config, 0, dtype=getattr(torch, dtype))
    adapters = [adapter(config, seed) for seed in range(ADAPTERS)]
    nbytes = num_elements(config) * getattr(torch, dtype).itemsize
    ends: list[float] = []
    turns: dict[int, float] = {}  # seconds, by the index in `ends` of the iteration's end
    queue = RequestQueue(max_pending=None)
    params = OptionalParams(dtype=dtype, max_batch_size=REQUESTS + 1, max_seq_len=LENGTH)
    callbacks = queue.get_inference_requests, queue.send_response, queue.poll_stop_signal
    with GptManager(
        (config, state), ModelType.INFLIGHT_FUSED_BATCHING, 1, None, *callbacks,
        lambda record: ends.append(time.perf_counter()), params,
    ) as manager:  # fmt: skip
        queue.attach(manager)
        jobs: Any = manager._host.adapter_loader.jobs
        take_turn = jobs._work_after_step

        def watched(step_s: float) -> None:
            began = time.perf_counter()
            take_turn(step_s)
            turns[len(ends)] = time.perf_counter() - began

        jobs._work_after_step = watched
        running = [queue.submit([1, 2, 3, 4], LENGTH - 4) for _ in range(REQUESTS)]
        time.sleep(QUIET_S)
        quiet: list[list[float]] = []  # before each adapter, and behind the last
        loading: list[list[float]] = []
        loads: list[list[float]] = []  # the loop's turns in them
        took: dict[bool, list[float]] = {True: [], False: []}
        quiet_s = QUIET_S
        for task, (weights, rows) in enumerate(adapters):
            jobs.loop_helps = loops(task)
            mark = len(ends)
            time.sleep(quiet_s)
            middle, began = len(ends), time.perf_counter()
            given: Any = {"lora_weights": weights, "lora_config": rows}
            handle = queue.submit([5, 6, 7], 1, lora_task_id=task, **given)
            handle.result()
            quiet.append(differences(ends[mark:middle]))
            # the last of them is that of its own context
            loading.append(differences(ends[middle - 1 : -1]))
            own = [turns.get(index, 0.0) for index in range(middle, middle + len(loading[-1]))]
            loads.append(own)
            quiet_s = time.perf_counter() - began
            took[loops(task)].append(quiet_s)
        mark = len(ends)
        time.sleep(quiet_s)
        quiet.append(differences(ends[mark:]))
        for generation in running:
            generation.cancel()
    print(f"{shape}, {dtype}: {len(adapters)} adapters of about {nbytes / 1e6:.0f} MB each")
    # contexts grow, and iterations with them: each is told by the quiet ones around it
    stretches: dict[bool | None, list[list[float]]] = {None: [], True: [], False: []}
    with_turn: list[tuple[float, float]] = []
    for times in quiet:
        stretches[None].append([it / statistics.median(times) for it in times])
    for task, times in enumerate(loading):
        unit = statistics.median(quiet[task] + quiet[task + 1])
        stretches[loops(task)].append([it / unit for it in times])
        shares = ((it / unit, own / unit) for it, own in zip(times, loads[task], strict=True))
        with_turn += [it for it in shares if it[1] > LEAST_TURN]
    cases = {
        "nothing is loaded": stretches[None],
        f"the loop loads, {statistics.mean(took[True]):.1f} s each": stretches[True],
        "the loop loads, those with a turn": [[it for it, _ in with_turn]],
        f"threads load, {statistics.mean(took[False]):.1f} s each": stretches[False],
    }
    middle_s = statistics.median(it for times in quiet for it in times)
    print(f"iterations as multiples of the quiet median around, of about {middle_s * 1e3:.0f} ms")
    for name, found in cases.items():
        every = sorted(it for times in found for it in times)
        told = [f"{every[int(share * (len(every) - 1))]:.2f}" for share in (0.5, 0.9, 0.99, 1)]
        beyond = sum(it > LIMIT for it in every) / len(every)
        print(f"while {name}: {len(every)} iterations; p50, p90, p99, longest {', '.join(told)}")
        longest = " ".join(f"{max(times):.2f}" for times in found)
        print(f"  {beyond:.1%} above {LIMIT}; longest of each stretch: {longest}")
    pushed = sum(it > LIMIT >= it - own for it, own in with_turn)
    longest_turn = max((own for _, own in with_turn), default=0.0)
    print(f"turns took up to {longest_turn:.3f}; {pushed} iterations are above {LIMIT} by a turn")


def loops(task: int) -> bool:
    """Whether the loop loads this adapter."""
    return task % 2 == 0


def differences(times: list[float]) -> list[float]:
    return [after - before for before, after in zip(times, times[1:], strict=False)]


if __name__ == "__main__":
    main(*sys.argv[1:])
