"""A TokenLoop without a manager: a scripted executor, a host that is a few lists, a fake clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from gptmanager.assembly.adapter_sizing import AdapterSizes
from gptmanager.config import ContextChunkingPolicy, PromptLookup
from gptmanager.decoding.end_rule import EndRule
from gptmanager.decoding.search.beam_search import BeamParams, BeamSearch
from gptmanager.errors import RequestError
from gptmanager.kv_cache import KvCacheManager
from gptmanager.loop.adapters import Adapters
from gptmanager.loop.allocation import Allocator
from gptmanager.loop.limits import Limits
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.peft_cache import CacheSizes, PeftCacheManager
from gptmanager.peft_cache.work import (
    AdapterDone,
    AdapterWork,
    CopyAdapter,
    ReadAdapter,
    WriteAdapter,
)
from gptmanager.request.inference_request import InferenceRequest, NamedTensor
from gptmanager.request.post_processor import RequestProcessor
from gptmanager.scheduler import (
    CapacityScheduler,
    GuaranteedNoEvictScheduler,
    MicroBatchScheduler,
    RequestScheduler,
    ReuseCredit,
    SchedulerOutput,
    SimpleScheduler,
)
from gptmanager.statistics import Counts, PhaseTimes
from gptmanager.step import Failure, Intake
from gptmanager.testing import ContractChecker, RecordingCallbacks, ScriptedExecutor
from gptmanager.testing.scripted_executor import candidates

VOCAB_SIZE = 100
MAX_BEAM_WIDTH = 4
# how a loop may run steps before others have returned
AHEAD: list[dict[str, Any]] = [
    *({}, {"run_ahead": 1}, {"overlap": True}),
    *({"num_stages": count} for count in (2, 3, 4)),
]
_FCFS = ContextChunkingPolicy.FIRST_COME_FIRST_SERVED


def next_token(history: list[int]) -> int:
    """A function of the whole history, so that a lost or repeated token changes what follows."""
    return (
        sum((i + 1) * token for i, token in enumerate(history)) * 31 + len(history)
    ) % VOCAB_SIZE


def expected_output(prompt: Iterable[int], max_new_tokens: int) -> list[int]:
    """What a request generates alone."""
    history = list(prompt)
    start = len(history)
    for _ in range(max_new_tokens):
        history.append(next_token(history))
    return history[start:]


def expected_beams(
    prompt: list[int], max_new_tokens: int, params: BeamParams, **ends: Any
) -> list[list[int]]:
    """The beams that a request finds alone, best first."""
    search = BeamSearch(params, EndRule(max_new_tokens, **ends))
    texts: list[list[int]] = [[]]
    while not search.advance(
        candidates([next_token(prompt + text) for text in texts], search.num_candidates)
    ):
        texts = [[node.token for node in live.path()] for live in search.live]
    return [[n.token for n in found.node.path()][: found.end] for found in search.hypotheses()]


def no_evict(max_num_requests: int, kv_cache: KvCacheManager, **options: bool) -> CapacityScheduler:
    """The policy with the guard that a manager sets."""
    return GuaranteedNoEvictScheduler(
        max_num_requests, kv_cache, started_contexts_first=True, **options
    )


class ListHost:
    """A `Host` over RecordingCallbacks, held to the contract by a ContractChecker."""

    def __init__(self) -> None:
        self.callbacks = RecordingCallbacks()
        self.checker = ContractChecker(
            self.callbacks.get_inference_requests,
            self.callbacks.send_response,
            tolerates_duplicates=True,
        )
        self.now = 0.0
        self.counts: list[Counts] = []
        self.stops: set[int] = set()
        self.failures: list[Failure] = []
        self.preparing: dict[int, RequestProcessor] = {}
        self.ready: list[int] = []
        self.work: list[AdapterWork] = []  # on adapters, under way
        self.done: list[AdapterDone] = []
        self.forgotten: list[int] = []
        self.fail_to_send: Callable[[int, bool], bool] = lambda request_id, is_final: False

    def fetch(self, room: int | None, num_active: int) -> Intake:
        requests: list[InferenceRequest] = []
        if room != 0:
            requests = self.checker.get_inference_requests(-1 if room is None else room)
        failures, self.failures = self.failures, []
        stops, self.stops = self.stops, set()
        self.now += 1.0
        ready, self.ready = tuple(self.ready), []
        done, self.done = tuple(self.done), []
        forgotten, self.forgotten = tuple(self.forgotten), []
        return Intake(
            *(self.now, tuple(requests), frozenset(stops), ready, tuple(failures)),
            adapters=done,
            forgotten_adapters=forgotten,
        )

    def respond(
        self, request_id: int, tensors: list[NamedTensor], is_final: bool, error: str
    ) -> None:
        self.checker.send_response(request_id, tensors, is_final, error)
        if self.fail_to_send(request_id, is_final) and not is_final:
            self.failures.append(Failure(request_id, RuntimeError("the client has gone")))

    def prepare(self, request_id: int, processor: RequestProcessor) -> None:
        self.preparing[request_id] = processor

    def load(self, work: AdapterWork) -> None:
        self.work.append(work)

    def finish_work(self, count: int | None = None, error: BaseException | None = None) -> None:
        """What was begun first, or all of it."""
        begun = [it for it in self.work if isinstance(it, (ReadAdapter, WriteAdapter, CopyAdapter))]
        for work in begun[:count]:
            self.work.remove(work)
            self.finish(work, error)

    def finish(
        self, work: ReadAdapter | WriteAdapter | CopyAdapter, error: BaseException | None = None
    ) -> None:
        digest = ""
        if isinstance(work, ReadAdapter) and error is None:
            try:
                digest = work.tensors.read().digest
            except RequestError as raised:
                error = raised
        self.done.append(AdapterDone(work.job, digest, error))

    def fail(self, failure: Failure) -> None:
        self.failures.append(failure)

    def poll(self) -> None:
        self.stops |= self.callbacks.poll_stop_signal()

    def report(self, counts: Counts, phase_times: PhaseTimes) -> None:
        self.counts.append(counts)


class ForcedPauses(RequestScheduler):
    """Wraps a scheduler and pauses the running requests that it is told to, once each."""

    def __init__(self, scheduler: RequestScheduler) -> None:
        self.scheduler = scheduler
        self.victims: set[int] = set()

    def schedule_request(self, active_requests: Any, inflight_request_ids: Any) -> SchedulerOutput:
        paused = [r for r in active_requests if r.request_id in self.victims and r.slot >= 0]
        self.victims.clear()
        others = [r for r in active_requests if r not in paused]
        if not others:
            return SchedulerOutput([], [], paused)
        context, generation, more = self.scheduler.schedule_request(others, inflight_request_ids)
        return SchedulerOutput(context, generation, [*paused, *more])


class LoopDriver:
    """Builds a loop and runs it to the end."""

    def __init__(
        self,
        *,
        num_blocks: int = 20,
        tokens_per_block: int = 4,
        max_batch_size: int = 4,
        max_num_tokens: int = 64,
        max_active: int | None = 8,
        max_seq_len: int = 64,
        run_ahead: int = 0,
        overlap: bool = False,
        num_stages: int = 1,
        lookup: PromptLookup | None = None,
        chunked: bool = False,
        reuse: bool = False,
        num_host_blocks: int = 0,
        policy: Callable[..., CapacityScheduler] = no_evict,
        script: Callable[[list[int]], int] = next_token,
        scheduler: Callable[[RequestScheduler], RequestScheduler] = lambda scheduler: scheduler,
        adapters: AdapterSizes | None = None,
    ) -> None:
        num_micro_batches = max(2 if overlap else 1, num_stages)
        max_num_requests = max_batch_size * num_micro_batches
        self.host = ListHost()
        self.kv_cache = KvCacheManager(
            num_blocks,
            tokens_per_block,
            enable_block_reuse=reuse,
            num_host_blocks=num_host_blocks if reuse else 0,
        )
        self.executor = ScriptedExecutor(script, tokens_per_block)
        micro_batch = MicroBatchScheduler(
            max_batch_size,
            max_num_tokens,
            max_context_length=max_num_tokens,
            context_chunking_policy=_FCFS if chunked else None,
            chunk_unit=tokens_per_block if chunked else None,
            reuse_credit_rule="shift",
            mixed_beam_widths=True,
            num_shares=num_stages,
        )
        capacity = ReuseCredit(
            policy(max_num_requests, self.kv_cache, two_step_lookahead=num_micro_batches > 1),
            self.kv_cache,
        )
        self.scheduler = scheduler(SimpleScheduler(capacity, micro_batch))
        pages = CacheSizes(0, 0, 0, 0, 0) if adapters is None else adapters.cache
        self.loop = TokenLoop(
            self.host,
            self.executor,
            self.scheduler,
            Allocator(self.kv_cache, num_slots=max_num_requests * (1 + run_ahead)),
            Limits(
                vocab_size=VOCAB_SIZE,
                max_seq_len=max_seq_len,
                max_input_len=max_seq_len - 1,
                num_blocks=num_blocks,
                tokens_per_block=tokens_per_block,
                max_beam_width=MAX_BEAM_WIDTH,
                lookup=lookup,
                adapters=None if adapters is None else adapters.limits,
            ),
            adapters=Adapters(PeftCacheManager(pages), self.host.load, patience=max_num_requests),
            max_active=max_active,
            max_batch_size=max_batch_size,
            max_num_tokens=max_num_tokens,
            run_ahead=run_ahead,
            num_micro_batches=num_micro_batches,
            phase_times=PhaseTimes(lambda: 0),
        )

    def submit(self, *requests: InferenceRequest) -> None:
        self.host.callbacks.submit(*requests)

    def run(self, max_iterations: int = 1000) -> int:
        """Iterate until there is nothing to do; returns how many iterations worked."""
        worked = 0
        for _ in range(max_iterations):
            self.loop.allocator.check()
            if self.loop.iterate():
                worked += 1
            elif not self.loop.active:
                self.check_empty()
                return worked
        raise AssertionError(f"not done after {max_iterations} iterations: {self.loop.active}")

    def check_empty(self) -> None:
        """Nothing is held, and every request has had its one final response."""
        self.host.checker.check()
        assert self.kv_cache.get_num_free_blocks() == self.kv_cache.get_max_resource_count()

    def output(self, request_id: int) -> list[int]:
        return self.host.callbacks.output(request_id)

    def final(self, request_id: int) -> Any:
        return self.host.callbacks.final(request_id, timeout=0)
