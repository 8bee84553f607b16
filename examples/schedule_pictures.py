"""Draws the pictures of docs/scheduling.md and docs/parameters.md, from loops without a model.

    python examples/schedule_pictures.py docs/pictures

The pictures are the same on every machine: a test compares them with the committed files.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gptmanager import CapacitySchedulerPolicy, ContextChunkingPolicy, InferenceRequest
from gptmanager.loop.admission import Limits
from gptmanager.loop.allocation import Allocator
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.picture.drawing import draw
from gptmanager.picture.observer import observe
from gptmanager.picture.svg import STYLE, element, label, path, rect
from gptmanager.picture.trace import Trace
from gptmanager.request.inference_request import NamedTensor
from gptmanager.scheduler import (
    GuaranteedNoEvictScheduler,
    KvCacheManager,
    MaxUtilizationScheduler,
    MicroBatchScheduler,
    SimpleScheduler,
    StaticBatchScheduler,
)
from gptmanager.simulator import comparison as simulator
from gptmanager.simulator import simulate
from gptmanager.simulator.cost_model import CostModel
from gptmanager.simulator.load import SyntheticLoad
from gptmanager.simulator.stages import Work
from gptmanager.statistics import Counts, PhaseTimes
from gptmanager.step import Intake
from gptmanager.testing import ScriptedExecutor

END_ID = 1
MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION
GUARANTEED_NO_EVICT = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
STATIC_BATCH = CapacitySchedulerPolicy.STATIC_BATCH


@dataclass(frozen=True)
class Job:
    """A request for at most `max_new_tokens`; `stops_at` n: its n-th token is the end id."""

    prompt_len: int
    max_new_tokens: int
    stops_at: int | None = None
    priority: float = 0.5


@dataclass(frozen=True)
class Machine:
    """Policy and sizes. `chunk_unit` None: a context runs in one piece."""

    policy: CapacitySchedulerPolicy
    max_batch_size: int
    max_num_tokens: int
    num_blocks: int
    tokens_per_block: int
    chunk_unit: int | None = None
    max_pauses: int | None = None
    resume_headroom_blocks: int = 0
    start_headroom_steps: int = 0


class Host:
    """Has all jobs from the beginning; ignores responses."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.now = 0.0
        self.requests = [
            InferenceRequest.from_tokens(
                number,
                # the prompt tells the script which request it continues
                [number + 10] * job.prompt_len,
                job.max_new_tokens,
                end_id=END_ID,
                priority=job.priority,
            )
            for number, job in enumerate(jobs, start=1)
        ]

    def fetch(self, room: int | None, num_active: int) -> Intake:
        self.now += 1.0
        requests, self.requests = self.requests, []
        return Intake(self.now, tuple(requests))

    def respond(
        self, request_id: int, tensors: list[NamedTensor], is_final: bool, error: str
    ) -> None:
        if error:
            raise RuntimeError(error)

    def prepare(self, request_id: int, processor: object) -> None:
        raise RuntimeError("no job has a logits post-processor")

    def load(self, work: object) -> None:
        raise RuntimeError("no job has an adapter")

    def fail(self, failure: object) -> None:
        raise RuntimeError(failure)

    def poll(self) -> None:
        pass

    def report(self, counts: Counts, phase_times: PhaseTimes) -> None:
        pass


def run(machine: Machine, jobs: Sequence[Job]) -> Trace:
    """The schedule of `jobs`: requests 1, 2, ..., all there at the start."""

    def next_token(history: list[int]) -> int:
        job = jobs[history[0] - 10 - 1]
        return END_ID if len(history) + 1 - job.prompt_len == job.stops_at else 2

    kv_cache = KvCacheManager(machine.num_blocks, machine.tokens_per_block)
    max_seq_len = machine.num_blocks * machine.tokens_per_block
    loop = TokenLoop(
        Host(jobs),
        ScriptedExecutor(next_token, machine.tokens_per_block),
        scheduler(machine, kv_cache),
        Allocator(kv_cache, machine.max_batch_size),
        Limits(
            vocab_size=10 + len(jobs) + 1,
            max_seq_len=max_seq_len,
            max_input_len=max_seq_len - 1,
            num_blocks=machine.num_blocks,
            tokens_per_block=machine.tokens_per_block,
        ),
        max_active=None,
        max_batch_size=machine.max_batch_size,
        max_num_tokens=machine.max_num_tokens,
        phase_times=PhaseTimes(lambda: 0),
    )
    builder = observe(loop, policy=machine.policy.name, chunk_unit=machine.chunk_unit)
    while loop.iterate():
        pass
    return builder.build()


def scheduler(machine: Machine, kv_cache: KvCacheManager) -> SimpleScheduler:
    size = machine.max_batch_size
    capacity: GuaranteedNoEvictScheduler | MaxUtilizationScheduler
    if machine.policy is MAX_UTILIZATION:
        capacity = MaxUtilizationScheduler(
            size,
            kv_cache,
            max_pauses=machine.max_pauses,
            resume_headroom_blocks=machine.resume_headroom_blocks,
            start_headroom_steps=machine.start_headroom_steps,
        )
    elif machine.policy is STATIC_BATCH:
        capacity = StaticBatchScheduler(size, kv_cache)
    else:
        capacity = GuaranteedNoEvictScheduler(size, kv_cache)
    chunked = machine.chunk_unit is not None
    micro_batch = MicroBatchScheduler(
        size,
        machine.max_num_tokens,
        context_chunking_policy=ContextChunkingPolicy.FIRST_COME_FIRST_SERVED if chunked else None,
        chunk_unit=machine.chunk_unit,
    )
    return SimpleScheduler(capacity, micro_batch)


def toy(chunked: bool) -> Trace:
    """Five requests; at most 4 requests and 12 tokens a batch; the first stops at token 2."""
    machine = Machine(
        GUARANTEED_NO_EVICT,
        max_batch_size=4,
        max_num_tokens=12,
        num_blocks=32,
        tokens_per_block=4,
        chunk_unit=1 if chunked else None,
    )
    return run(machine, [Job(5, 4, stops_at=2), Job(5, 4), Job(3, 4), Job(3, 4), Job(3, 4)])


def outputs_of_512(policy: CapacitySchedulerPolicy) -> Trace:
    """18 requests of 64 + 512 tokens; memory holds four whole requests.

    The first three stop early, after 128, 256 and 384 tokens. So the others do not all begin and
    end together.
    """
    machine = Machine(
        policy,
        max_batch_size=16,
        max_num_tokens=256,
        num_blocks=72,
        tokens_per_block=32,
        chunk_unit=32 if policy is MAX_UTILIZATION else None,
        max_pauses=3,
        resume_headroom_blocks=1,
        start_headroom_steps=16,
    )
    early = [Job(64, 512, stops_at=count) for count in (128, 256, 384)]
    return run(machine, early + [Job(64, 512)] * 15)


SQUARE, LEFT, TOP = 24, 150, 96
SEQUENCE, BUDGET = 14, 16  # max_seq_len and max_num_tokens of the drawing, in tokens

# cached tokens; then the kind and the number of tokens that this iteration computes
ROWS = ((0, "context", 7), (3, "context", 4), (9, "generation", 1), (5, "generation", 1))


def three_maxima() -> str:
    """One iteration, and what each of the three limits bounds."""
    bottom, right = TOP + len(ROWS) * 34, LEFT + SEQUENCE * SQUARE
    strip = bottom + 84
    marks = [mark for index, row in enumerate(ROWS) for mark in sequence_row(index, *row)]
    marks += token_strip(strip)
    marks += [
        path(f"M{right + 14} {TOP}h8V{bottom - 12}h-8", "frame"),
        label(right + 30, TOP + 54, "max_batch_size", "title"),
        label(right + 30, TOP + 74, "requests in one iteration", "faint"),
        path(f"M{LEFT} {bottom}v8H{right}v-8", "frame"),
        label(LEFT, bottom + 28, "max_seq_len", "title"),
        label(LEFT, bottom + 48, "tokens of one request, prompt and output", "faint"),
        path(f"M{LEFT} {strip + 32}v8H{LEFT + BUDGET * SQUARE}v-8", "frame"),
        label(LEFT, strip + 60, "max_num_tokens", "title"),
        label(LEFT, strip + 80, "tokens computed in one iteration, packed", "faint"),
    ]
    x = 20.0
    for kind, name in (
        ("context", "context, computed now"),
        ("generation", "generation, computed now"),
        ("memory", "computed before, in the KV cache"),
    ):
        marks += [rect(x, 46, 16, 16, kind, round_=3), label(x + 22, 59, name)]
        x += 44 + 6.6 * len(name)
    width, height = 720, strip + 100
    return element(
        "svg",
        f"<style>{STYLE}</style>",
        rect(0, 0, width, height, "paper", round_=8),
        label(20, 30, "The three maxima, in one iteration", "title"),
        *("\n" + mark for mark in marks),
        xmlns="http://www.w3.org/2000/svg",
        class_="picture",
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
    )


def sequence_row(index: int, cached: int, kind: str, num_tokens: int) -> Iterator[str]:
    y = TOP + index * 34
    yield label(LEFT - 12, y + 16, f"request {index + 1}", "end")
    for position in range(SEQUENCE):
        computed = kind if position < cached + num_tokens else ""
        yield square(position, y, "memory" if position < cached else computed)


def token_strip(y: float) -> Iterator[str]:
    yield label(LEFT - 12, y + 16, "computed now", "end")
    kinds = [kind for _, kind, num_tokens in ROWS for _ in range(num_tokens)]
    for index in range(BUDGET):
        yield square(index, y, kinds[index] if index < len(kinds) else "")


def square(column: int, y: float, kind: str) -> str:
    """One token; without a kind an empty square."""
    return rect(LEFT + column * SQUARE, y, SQUARE - 2, SQUARE - 2, kind or "grid", round_=3)


def pipeline() -> str:
    """Twelve requests on two stages."""
    options = simulator.Machine(max_batch_size=8, pipeline_parallel_size=2)
    load = SyntheticLoad(12, (20, 200), (4, 9))
    work: list[Work] = []
    simulate(simulator.hypothetical(options, 256), load, CostModel(), work=work)
    return draw_stages(
        work, "Two stages, two micro batches: A and B, with the numbers of their steps"
    )


def draw_stages(work: Sequence[Work], title: str) -> str:
    """The stages' work along a time axis. A label "B7" means step 7, of the second micro batch."""
    left, wide, row, top = 90, 900, 34, 62
    classes = ("context", "generation", "memory", "frame")  # of successive micro batches
    first, last = min(it.begin for it in work), max(it.end for it in work)
    scale = wide / (last - first)
    count = 1 + max(it.stage for it in work)
    marks = []
    for stage in range(count):
        own = [it for it in work if it.stage == stage]
        busy = sum(it.end - it.begin for it in own) / (last - first)
        y = top + stage * row
        marks.append(label(left - 8, y + 17, f"stage {stage}", "end"))
        marks.append(label(left + wide + 8, y + 17, f"{busy:.0%} busy", "faint small"))
        for it in own:
            x, width = left + (it.begin - first) * scale, (it.end - it.begin) * scale
            name = f"{chr(65 + it.micro_batch_id % 26)}{it.iteration}"
            tip = f"stage {stage}: step {it.iteration}, micro batch {it.micro_batch_id}, "
            tip += f"{it.begin * 1000:.1f} to {it.end * 1000:.1f} ms"
            kind = classes[it.micro_batch_id % len(classes)]
            marks.append(rect(x, y, width, row - 8, kind, tip, 2))
            if width > 22:
                inside = f"mid small on-{kind}" if kind in classes[:2] else "mid small"
                marks.append(label(x + width / 2, y + 17, name, inside))
    bottom = top + count * row + 14
    marks.append(label(left, bottom, f"{first * 1000:.0f} ms", "faint small"))
    marks.append(label(left + wide, bottom, f"{last * 1000:.0f} ms", "faint small end"))
    width, height = left + wide + 90, bottom + 14
    return element(
        "svg",
        element("style", STYLE),
        rect(0, 0, width, height, "paper"),
        label(16, 30, title, "title"),
        *marks,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
        class_="picture",
    )


def pictures() -> dict[str, str]:
    """File name -> SVG."""
    no_evict, static = outputs_of_512(GUARANTEED_NO_EVICT), outputs_of_512(STATIC_BATCH)
    max_utilization = outputs_of_512(MAX_UTILIZATION)
    return {
        "toy_whole.svg": draw(toy(chunked=False), "Five requests, each context in one piece"),
        "toy_chunked.svg": draw(toy(chunked=True), "The same five, contexts in chunks"),
        "static_batch.svg": draw(
            static, "STATIC_BATCH: a batch begins when the last one has ended"
        ),
        "no_evict.svg": draw(no_evict, "GUARANTEED_NO_EVICT: a started request is never paused"),
        "max_utilization.svg": draw(max_utilization, "MAX_UTILIZATION: memory as it is needed"),
        "max_utilization_start.svg": draw(
            max_utilization.window(0, 8), "MAX_UTILIZATION, its first iterations"
        ),
        "max_utilization_resume.svg": draw(
            max_utilization.window(508, 524), "MAX_UTILIZATION, requests that resume"
        ),
        "three_maxima.svg": three_maxima(),
        "pipeline.svg": pipeline(),
    }


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/pictures")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pictures().items():
        (folder / name).write_text(text + "\n", encoding="utf-8")
        print(folder / name)


if __name__ == "__main__":
    main()
