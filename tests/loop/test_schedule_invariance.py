"""The promise: no schedule shows in the tokens. Random ones against each request alone.

A tiny random network with `deterministic=True`; the loop, schedulers, KV cache and sampler are a
manager's, driven without its thread. What must have happened on the way is counted.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from functools import cache

import pytest
from checkpoints import CONFIGS, checkpoint, random_model
from fuzz import FUZZ
from loop_driver import ForcedPauses, ListHost

from gptmanager import (
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    FinishReason,
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
from gptmanager.kernels import CpuKernels
from gptmanager.memory import KvPool
from gptmanager.models import load_model
from gptmanager.statistics import PhaseTimes

pytestmark = pytest.mark.usefixtures("one_thread")
NUM_SCENARIOS, NUM_PARTS = 240 * FUZZ, 4
NUM_TEMPLATES = 80
VOCAB_SIZE = 48
LONGEST = 32  # prompt and output
CONFIG = {
    **CONFIGS["llama"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
FUSED, STATIC_BATCH = ModelType.INFLIGHT_FUSED_BATCHING, CapacitySchedulerPolicy.STATIC_BATCH
MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION


@cache
def model():
    kernels = CpuKernels(deterministic=True)
    kernels.warm_up()
    return load_model(checkpoint(random_model(CONFIG)), kernels=kernels)


@dataclass(frozen=True)
class Template:
    """A request that many scenarios ask for. `options` are those that decide its tokens."""

    request_id: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    options: dict

    def request(self, **more):
        return InferenceRequest.from_tokens(
            self.request_id, self.prompt, self.max_new_tokens, **self.options, **more
        )


@dataclass
class Schedule:
    """What decides the schedule: nothing of it may be seen in the tokens."""

    config: SchedulerConfig
    params: OptionalParams
    model_type: ModelType = FUSED

    def loop(self, host):
        network = model()
        params = checked_optional_params(self.params)
        sizes = size(params, self.config, network.spec, self.model_type)
        blueprint = Blueprint(params, self.config, sizes, VOCAB_SIZE, model_type=self.model_type)
        fused = self.model_type is not ModelType.INFLIGHT_BATCHING
        options = StepOptions(Lines(blueprint.num_slots), fused=fused)
        executor = CpuBackend(OptionalParams(deterministic=True)).executor(network, sizes, options)
        return build_loop(blueprint, host, executor, phase_times=PhaseTimes(lambda: 0))


# Each request alone ---------------------------------------------------------------------------


def alone(templates, **more):
    """What each generates by itself, one after the other."""
    host = ListHost()
    params = OptionalParams(max_batch_size=1, max_num_tokens=64, deterministic=True)
    loop = Schedule(SchedulerConfig(), params).loop(host)
    host.callbacks.submit(*(template.request(**more) for template in templates))
    while loop.iterate() or loop.active:
        pass
    host.checker.check()
    return {t.request_id: host.callbacks.output(t.request_id)[len(t.prompt) :] for t in templates}


@cache
def templates():
    """Greedy and sampled, seeded or not, ended by length, end_id or stop words; prompts alike."""
    chance = random.Random(5)
    beginning = [chance.randrange(VOCAB_SIZE) for _ in range(LONGEST)]
    made = []
    for number in range(NUM_TEMPLATES):
        prompt_len = chance.randint(1, 20)
        shared = chance.choice([0, chance.randint(0, prompt_len), prompt_len])
        rest = [chance.randrange(VOCAB_SIZE) for _ in range(prompt_len - shared)]
        options = {}
        if number % 3:
            options["temperature"] = chance.choice([0.7, 1.0, 1.4])
            if number % 2:
                options["random_seed"] = number
            options |= chance.choice(
                [{}, {"runtime_top_k": 8}, {"runtime_top_p": 0.8}, {"runtime_min_p": 0.05}]
            )
        prompt = tuple(beginning[:shared] + rest)
        made.append(Template(number, prompt, chance.randint(1, 12), options))
    tokens = alone(made)
    for template in made:
        output = tokens[template.request_id]
        place = chance.randrange(len(output))
        end = chance.choice(["length"] * 3 + ["end_id", "stop", "min_length"])
        if end in ("end_id", "min_length"):
            template.options["end_id"] = [output[place], output[0]][: chance.choice([1, 2])]
        if end == "min_length":
            template.options["min_length"] = min(3, template.max_new_tokens)
        if end == "stop":
            template.options["stop_words_list"] = [output[place : place + 2]]
    return made


@cache
def expected():
    """Return each template's output, without and with the end or stop word that ended it."""
    cut, whole = alone(templates()), alone(templates(), include_stop_in_output=True)
    return {number: (cut[number], whole[number]) for number in cut}


# Scenarios ------------------------------------------------------------------------------------


def random_schedule(chance):
    """Policy, limits, pool and overlap. A pool of blocks for one request, or for many."""
    model_type = chance.choice([FUSED, FUSED, FUSED, ModelType.INFLIGHT_BATCHING, ModelType.V1])
    is_v1 = model_type is ModelType.V1
    policy = STATIC_BATCH if is_v1 else chance.choice([*CapacitySchedulerPolicy, MAX_UTILIZATION])
    chunked = not is_v1 and chance.random() < 0.6
    chunking = chance.choice([*ContextChunkingPolicy]) if chunked else None
    tokens_per_block = chance.choice([2, 4, 4, 8])
    tight = -(-LONGEST // tokens_per_block)
    num_blocks = chance.choice([tight, tight + 2, 2 * tight, 4 * tight, 6 * tight])
    ahead = chance.choice(["neither", "run_ahead", "overlap"])
    # what is paused runs as one context again, unless it may run in chunks
    max_num_tokens = chance.randint(max(8, tokens_per_block), 40) if chunked else 48
    max_batch_size = chance.randint(1, 8)
    params = OptionalParams(
        kv_cache_config=KvCacheConfig(
            max_tokens=(max_batch_size * LONGEST if is_v1 else num_blocks * tokens_per_block),
            tokens_per_block=tokens_per_block,
            enable_block_reuse=not is_v1 and chance.random() < 0.5,
        ),
        run_ahead=int(ahead == "run_ahead"),
        enable_trt_overlap=ahead == "overlap" and not is_v1,
        enable_chunked_context=chunked,
        max_batch_size=max_batch_size,
        max_num_tokens=max_num_tokens,
        max_seq_len=LONGEST,
        max_active_requests=chance.choice(["auto", 8, None]),
        deterministic=True,
    )
    return Schedule(SchedulerConfig(policy, chunking), params, model_type)


def run(seed, counts):
    """One scenario: its requests, what was stopped, and what happened on the way."""
    chance = random.Random(seed)
    schedule = random_schedule(chance)
    chosen = chance.sample(templates(), chance.randint(4, 12))
    host = ListHost()
    loop = schedule.loop(host)
    steps = followed(loop.executor)
    pauses = ForcedPauses(loop.scheduler)
    forces_pauses = schedule.model_type is not ModelType.V1 and chance.random() < 0.5
    loop.scheduler = pauses
    bursts = chance.choice([1, 0.5, 0.2])  # how likely the next one comes with the last
    waiting, streaming = list(chosen), set()
    iteration = 0
    while loop.pending or num_finals(host) < len(chosen):
        if not iteration % 2:
            while waiting:
                template, is_streaming = waiting.pop(), chance.random() < 0.4
                streaming |= {template.request_id} if is_streaming else set()
                host.callbacks.submit(
                    template.request(
                        is_streaming=is_streaming, priority=chance.choice([0.5, 0.5, 0.2, 0.8])
                    )
                )
                if chance.random() > bursts:
                    break
        if forces_pauses and chance.random() < 0.15:
            pauses.victims = set(chance.sample([t.request_id for t in chosen], 2))
        if chance.random() < 0.02:
            host.callbacks.stop(chance.choice(chosen).request_id)
        was_pending, num_steps = loop.pending, len(steps)
        loop.iterate()
        counts["overlapped steps"] += bool(was_pending) and len(steps) > num_steps
        loop.allocator.check()
        iteration += 1
        assert iteration < 1000, f"scenario {seed} does not end: {loop.active}"
    host.checker.check()
    kv_cache = loop.allocator.kv_cache
    assert kv_cache.get_num_free_blocks() == kv_cache.get_max_resource_count()
    count(counts, schedule, steps, kv_cache)
    return chosen, streaming, host.callbacks, schedule


def num_finals(host):
    return sum(response.is_final for response in host.callbacks.responses)


def followed(executor):
    """The steps that it is going to run."""
    forward, steps = executor.forward, []

    def follow(step):
        steps.append(step)
        return forward(step)

    executor.forward = follow
    return steps


def count(counts, schedule, steps, kv_cache):
    params = schedule.params
    counts["steps"] += len(steps)
    for step in steps:
        rows = step.rows
        counts["pauses"] += len(step.paused)
        counts["unfinished chunks"] += sum(not row.samples for row in step.context_rows)
        counts["steps of both phases"] += bool(step.context_rows and step.generation_rows)
        counts["steps of 3 requests or more"] += len(rows) >= 3
        counts["block copies"] += len(step.block_copies)
        counts["second micro batches"] += step.micro_batch_id
    counts["reused blocks"] += kv_cache.reuse_counts.reused_blocks
    counts["run ahead"] += params.run_ahead
    counts["overlap"] += params.enable_trt_overlap
    counts["in chunks"] += bool(params.enable_chunked_context)
    counts[schedule.config.capacity_scheduler_policy.name] += 1
    counts[schedule.model_type.name] += 1


def check(seed, chosen, streaming, callbacks, schedule, counts):
    for template in chosen:
        number = template.request_id
        final, output = callbacks.final(number, timeout=0), callbacks.output(number)
        assert not final.error, (seed, final)
        if number not in streaming:
            assert tuple(output[: len(template.prompt)]) == template.prompt, (seed, number)
            output = output[len(template.prompt) :]
        reason = FinishReason(int(final.tensors["finish_reasons"]))
        cut, whole = expected()[number]
        wanted = whole[: len(output)] if reason is FinishReason.CANCELLED else cut
        assert output == wanted, f"scenario {seed}, request {number}: {schedule}"
        counts[reason.name] += 1
        counts["streaming"] += number in streaming
        counts["tokens"] += len(output)


# what each part of the scenarios has at least, so that equal tokens say something
AT_LEAST = {
    "tokens": 1125,
    "steps": 900,
    "steps of 3 requests or more": 112,
    "steps of both phases": 90,
    "unfinished chunks": 112,
    "pauses": 36,
    "reused blocks": 112,
    "block copies": 9,
    "overlapped steps": 315,
    "run ahead": 11,
    "in chunks": 22,
    "MAX_UTILIZATION": 13,
    "GUARANTEED_NO_EVICT": 6,
    "STATIC_BATCH": 6,
    "streaming": 90,
    "END_ID": 36,
    "STOP_WORDS": 27,
    "LENGTH": 90,
    "CANCELLED": 4,
    "V1": 5,
    "INFLIGHT_BATCHING": 5,
    "overlap": 9,
    "second micro batches": 36,
}


@pytest.mark.timeout(240 * FUZZ)
@pytest.mark.parametrize("part", range(NUM_PARTS))
@pytest.mark.every(4)
def test_no_schedule_shows_in_the_tokens(part):
    counts = Counter()
    for seed in range(part, NUM_SCENARIOS, NUM_PARTS):
        check(seed, *run(seed, counts), counts)
    print(dict(counts))
    assert {name: counts[name] for name in AT_LEAST if counts[name] < AT_LEAST[name]} == {}


def test_a_block_copy_that_is_lost_would_show(monkeypatch):
    monkeypatch.setattr(KvPool, "copy", lambda self, copies: None)
    shown = r"scenario \d+, request \d+: Schedule\(|LogitsError"  # memory may hold NaN instead
    with pytest.raises(AssertionError, match=shown):
        for seed in range(100):
            check(seed, *run(seed, Counter()), Counter())


def test_the_requests_differ_in_what_decides_their_tokens():
    """Else equal tokens would say little."""
    assert len({tuple(whole) for _, whole in expected().values()}) > 0.8 * NUM_TEMPLATES
    greedy = [t for t in templates() if "temperature" not in t.options]
    seeded = [t for t in templates() if "random_seed" in t.options]
    ended = [number for number, (cut, whole) in expected().items() if cut != whole]
    assert len(greedy) > 20 and len(seeded) > 20 and len(ended) > 20
