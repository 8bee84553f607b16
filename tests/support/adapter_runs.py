"""Runs of a manager with adapters, next to models that were tuned alike."""

from __future__ import annotations

import json
import random
from collections import Counter

from checkpoints import checkpoint
from tuned_models import RANKS, cache_of, tuned

from gptmanager import (
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    PromptLookup,
    SchedulerConfig,
)
from gptmanager.testing import ContractChecker, RecordingCallbacks

FAMILIES = ("llama", "qwen3", "qwen2", "gpt2")
FUSED, V1 = ModelType.INFLIGHT_FUSED_BATCHING, ModelType.V1
POLICIES = CapacitySchedulerPolicy
TASKS = (None, *range(len(RANKS)))
LONGEST = 40  # prompt and output


class Run:
    """One random configuration, and its requests."""

    def __init__(self, seed: int, num_requests: int) -> None:
        chance = self.chance = random.Random(seed)
        self.family = FAMILIES[seed % len(FAMILIES)]
        self.model_type = chance.choice([FUSED, FUSED, FUSED, ModelType.INFLIGHT_BATCHING, V1])
        is_v1 = self.model_type is V1
        self.beams = chance.choice([1, 1, 2, 3])
        ahead = chance.choice(["", "", "run_ahead", "overlap"])
        policy = chance.choice([*POLICIES, *[POLICIES.MAX_UTILIZATION] * 3])
        is_static = is_v1 or policy is POLICIES.STATIC_BATCH
        chunked = not is_v1 and chance.random() < 0.5
        reuse = not is_v1 and self.beams == 1 and chance.random() < 0.6
        batch = chance.randint(2, 6)
        blocks = chance.choice([1, 1, 1, 3]) * 10 * self.beams
        most = batch * 10 * self.beams * (2 if ahead == "overlap" else 1)
        lookup = None
        if not is_v1 and ahead != "overlap" and chance.random() < 0.4:
            lookup = PromptLookup(4, 3, 1)
        self.tight = chance.random() < 0.6
        pages = cache_of(self.family, *(chance.choice([(12, 10), (60, 10)])))
        self.brings = True
        if not self.tight:
            self.brings, pages = chance.random() < 0.3, cache_of(self.family, 80, 80)
        self.scheduler = SchedulerConfig(
            POLICIES.STATIC_BATCH if is_static else policy,
            chance.choice([*ContextChunkingPolicy]) if chunked else None,
        )
        self.params = OptionalParams(
            kv_cache_config=KvCacheConfig(
                max_tokens=4 * (most if is_static else blocks),
                tokens_per_block=4,
                enable_block_reuse=reuse,
                host_cache_size=200_000 if reuse and chance.random() < 0.6 else None,
                host_swap=chance.choice(["auto", "always"]),
            ),
            enable_trt_overlap=ahead == "overlap" and not is_v1,
            run_ahead=int(ahead == "run_ahead"),
            enable_chunked_context=chunked,
            peft_cache_manager_config=pages,
            max_batch_size=batch,
            max_num_tokens=16 if chunked else 64,
            max_seq_len=LONGEST,
            max_active_requests=chance.choice(["auto", 4, None]),
            deterministic=chance.random() < 0.3,
            speculative_decoding_config=lookup,
            exclude_input_in_output=True,
        )
        self.tasks = chance.sample(TASKS, chance.randint(3, len(TASKS)))
        self.asked = [self._ask() for _ in range(num_requests)]
        self.counts: Counter[str] = Counter()

    def _ask(self):
        """Task, prompt, output length and beams of one request."""
        chance = self.chance
        beginning = [[5, 6, 7, 8, 9, 10, 11, 12] * 2, [3] * 12][chance.randrange(2)]
        prompt = beginning[: chance.randint(0, 16)]
        prompt += [chance.randrange(96) for _ in range(chance.randint(1, 6))]
        beams = chance.randint(1, self.beams)
        return chance.choice(self.tasks), prompt, chance.randint(2, LONGEST - len(prompt)), beams

    def requests(self):
        brought: set[int | None] = set()
        for number, (task, prompt, length, beams) in enumerate(self.asked):
            brings = self.brings or task not in brought or self.chance.random() < 0.2
            brought.add(task)
            tensors = {"input_ids": prompt, "request_output_len": length, "beam_width": beams}
            tensors |= tuned(self.family).lora(task, brings=brings)
            priority = self.chance.choice([0.5, 0.5, 0.9]) if self.brings else 0.5
            yield InferenceRequest(number, tensors, priority=priority)

    def run(self) -> RecordingCallbacks:
        host = RecordingCallbacks(self.requests())
        checker = ContractChecker(host.get_inference_requests, host.send_response)
        callbacks = checker.get_inference_requests, checker.send_response
        more = host.poll_stop_signal, host.return_batch_manager_stats
        model = tuned(self.family).source
        arguments = model, self.model_type, self.beams, self.scheduler
        with GptManager(*arguments, *callbacks, *more, self.params) as manager:
            self.watch(manager)
            checker.check(manager)
            self.check_caches(manager)
        self.count(host)
        return host

    def watch(self, manager: GptManager) -> None:
        """Questions in the middle harm nobody."""
        while not manager.wait_idle(0.02):
            report = manager.audit()
            assert report.ok, report.problems
            for number in range(len(self.asked)):
                if manager.explain(number).reason == "adapter_pages":
                    self.counts["waits"] += 1

    def check_caches(self, manager: GptManager) -> None:
        report = manager.audit()
        assert report.ok and report.adapters is not None and report.used_blocks == 0
        adapters = manager._worker.loop.table.adapters
        assert not (adapters.requests or adapters.waiting or adapters.reads or adapters.moves)
        assert not any(it.requests or it.running for it in adapters.cache.adapters)
        counts = report.adapters.counts
        assert counts.host_used_pages + counts.host_free_pages == counts.host_total_pages
        assert counts.device_used_pages + counts.device_free_pages == counts.device_total_pages
        assert counts.host_used_pages == len(report.adapters.host_owners)
        assert counts.device_used_pages == len(report.adapters.device_owners)
        with_adapters = sum(task is not None for task, *_ in self.asked)
        assert counts.hits + counts.misses >= with_adapters
        self.counts.update(counts._asdict())

    def count(self, host: RecordingCallbacks) -> None:
        counts = self.counts
        for text in host.statistics:
            record = json.loads(text)
            counts["pauses"] += record["Paused Requests"]
            counts["swapped"] += record["gptmanager"]["block_reuse"]["onboarded_blocks"]
        last = json.loads(host.statistics[-1])["gptmanager"]
        counts["reused"] += last["block_reuse"]["reused_tokens"]
        counts["drafted"] += last["draft_tokens"]["accepted"]
        counts["beams"] += sum(beams > 1 for *_, beams in self.asked)

    def check_tokens(self, host: RecordingCallbacks) -> None:
        made = tuned(self.family)
        several: dict[int | None, list[int]] = {}
        for number, (task, prompt, length, beams) in enumerate(self.asked):
            if beams > 1:
                several.setdefault(task, []).append(number)
                continue
            (text,) = texts_of(*host.of(number))
            assert len(text) == length, (number, text)
            assert made.is_greedy(task, prompt, text), (self.params, number, task, prompt, text)
        for task, numbers in several.items():
            expected = beams_of_merged(self.family, task, [self.asked[n] for n in numbers])
            for number, texts in zip(numbers, expected, strict=True):
                assert texts_of(*host.of(number)) == texts, (self.params, number, task)


def beams_of_merged(family, task, asked):
    """What each finds in a manager of the merged model, which has no adapters."""
    network = tuned(family).networks[task]
    host = RecordingCallbacks(
        InferenceRequest.from_tokens(number, prompt, length, beam_width=beams)
        for number, (_, prompt, length, beams) in enumerate(asked)
    )
    options = OptionalParams(
        kv_cache_config=KvCacheConfig(max_tokens=1000, tokens_per_block=4),
        max_batch_size=8,
        max_num_tokens=64,
        max_seq_len=LONGEST,
        exclude_input_in_output=True,
    )
    with GptManager(
        checkpoint(network), FUSED, 3, **host.keywords(), optional_params=options
    ) as it:
        assert it.wait_idle(60)
    return [texts_of(host.final(number)) for number in range(len(asked))]


def texts_of(response):
    """The text of each beam."""
    assert not response.error, response.error
    lengths = response.tensors["sequence_length"][0].tolist()
    rows = response.tensors["output_ids"][0]
    return [row[:length].tolist() for row, length in zip(rows, lengths, strict=True)]
