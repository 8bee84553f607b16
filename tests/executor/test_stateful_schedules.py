"""The promise, with states: no schedule shows in the tokens, whatever snapshots are reused.

The state of the model is a digest of all tokens, and decides the next one. Random policies, pools,
chunks, pauses, stops and new weights; the loop is a manager's, driven without its thread.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any

from fuzz import FUZZ
from loop_driver import ForcedPauses, ListHost
from stateful_runs import MODULUS, Digesting, continued

from gptmanager import (
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.assembly.backend import StepOptions
from gptmanager.assembly.blueprint import Blueprint, build_loop
from gptmanager.assembly.cpu_backend import CpuBackend
from gptmanager.assembly.options import checked_optional_params
from gptmanager.assembly.sizing import size
from gptmanager.decoding.lines import Lines
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.statistics import PhaseTimes

LONGEST = 48  # prompt and output
AT_LEAST = {"loads": 20, "saves": 200, "pauses": 15, "cuts": 20, "cancelled": 2, "cleared": 5}


def random_loop(chance: random.Random, host: ListHost, counts: Counter[str]) -> TokenLoop:
    policy = chance.choice([*CapacitySchedulerPolicy])
    chunked = chance.random() < 0.5
    size_of_block = chance.choice([2, 4, 4, 8])
    tight = -(-LONGEST // size_of_block)
    kind = chance.choice([ModelType.INFLIGHT_FUSED_BATCHING, ModelType.INFLIGHT_BATCHING])
    ahead = chance.choice(["neither", "run_ahead", "overlap"])
    params = OptionalParams(
        kv_cache_config=KvCacheConfig(
            max_tokens=chance.choice([tight, tight + 2, 2 * tight, 5 * tight]) * size_of_block,
            tokens_per_block=size_of_block,
            enable_block_reuse=True,
        ),
        run_ahead=int(ahead == "run_ahead"),
        enable_trt_overlap=ahead == "overlap",
        enable_chunked_context=chunked,
        max_batch_size=chance.randint(1, 6),
        max_num_tokens=chance.randint(10, 40) if chunked else 64,
        max_seq_len=LONGEST,
        max_active_requests=chance.choice(["auto", 8, None]),
    )
    chunking = chance.choice([*ContextChunkingPolicy]) if chunked else None
    config = SchedulerConfig(policy, chunking)
    model, params = Digesting(), checked_optional_params(params)
    sizes = size(params, config, model.spec, kind)
    sizes = dataclasses.replace(sizes, num_snapshots=chance.choice([1, 2, 4, 20]))
    blueprint = Blueprint(params, config, sizes, MODULUS, model_type=kind)
    fused = kind is ModelType.INFLIGHT_FUSED_BATCHING
    options = StepOptions(Lines(blueprint.num_slots), fused=fused)
    executor = CpuBackend(OptionalParams()).executor(model, sizes, options)
    forward = executor.forward

    def follow(step: Any) -> Any:
        counts["loads"] += len(step.state_loads)
        counts["saves"] += len(step.state_saves)
        counts["pauses"] += len(step.paused)
        counts["cuts"] += sum(not row.samples for row in step.context_rows) if not chunked else 0
        return forward(step)

    executor.forward = follow
    return build_loop(blueprint, host, executor, phase_times=PhaseTimes(lambda: 0))


def random_requests(chance: random.Random) -> dict[int, tuple[list[int], int]]:
    """Prompts with common beginnings, and some that continue the output of others."""
    system = [chance.randrange(MODULUS) for _ in range(20)]
    found: dict[int, tuple[list[int], int]] = {}
    for number in range(chance.randint(5, 14)):
        prompt = system[: chance.choice([0, 9, 17])]
        if found and chance.random() < 0.4:
            earlier, length = chance.choice(list(found.values()))
            prompt = [*earlier, *continued(earlier, length)]
        prompt = prompt[: LONGEST - 12]
        prompt = prompt + [chance.randrange(MODULUS) for _ in range(chance.randint(1, 6))]
        found[number] = prompt, chance.randint(1, LONGEST - len(prompt))
    return found


def run(seed: int, counts: Counter[str]) -> None:
    chance, host = random.Random(seed), ListHost()
    loop = random_loop(chance, host, counts)
    loop.scheduler = pauses = ForcedPauses(loop.scheduler)
    asked = random_requests(chance)
    waiting, stopped, iteration = [*asked], set(), 0
    while loop.pending or sum(it.is_final for it in host.callbacks.responses) < len(asked):
        if waiting and chance.random() < 0.4:
            number = waiting.pop(0)
            prompt, length = asked[number]
            host.callbacks.submit(InferenceRequest.from_tokens(number, prompt, length))
        if chance.random() < 0.1:
            pauses.victims = set(chance.sample([*asked], 2))
        if chance.random() < 0.01:
            stopped.add(chance.choice([*asked]))
            host.callbacks.stop(max(stopped))
        if chance.random() < 0.01:
            loop.allocator.kv_cache.clear_cached()
            counts["cleared"] += 1
        loop.iterate()
        loop.allocator.check()
        iteration += 1
        assert iteration < 2000, f"scenario {seed} does not end: {loop.active}"
    host.checker.check()
    kv_cache = loop.allocator.kv_cache
    assert kv_cache.get_num_free_blocks() == kv_cache.get_max_resource_count()
    for number, (prompt, length) in asked.items():
        final, output = host.callbacks.final(number, timeout=0), host.callbacks.output(number)
        assert not final.error, (seed, final)
        wanted = [*prompt, *continued(prompt, length)]
        is_cut = len(output) < len(wanted)
        assert output == wanted[: len(output)] and (not is_cut or number in stopped), (seed, number)
        counts["cancelled"] += is_cut


def test_no_schedule_and_no_snapshot_shows_in_the_tokens() -> None:
    counts: Counter[str] = Counter()
    for seed in range(12 * FUZZ):
        run(seed, counts)
    assert {name: counts[name] for name in AT_LEAST if counts[name] < AT_LEAST[name]} == {}
